"""A notice: the body that a webhook gets, its id, and its signature.

Body, headers and signature follow https://www.standardwebhooks.com, for which receivers find libraries.
"""

import base64
import datetime
import hashlib
import hmac
import json

from volley.base import Spec
from volley.state import Observed, RunRecord
from volley.webhooks import WebhookSpec

LEAST_KEY = 24  # bytes
HOW_TO_MAKE_A_KEY = 'echo "whsec_$(openssl rand -base64 32)"'


class Notice(Spec):
    """A message for one webhook, which waits to be delivered. Times are in seconds since 1970.

    Attributes:
        id: stays the same when the message is sent again, so that a receiver can drop repetitions.
        type: such as ``run.failed`` or ``rule.fell``.
        attempts: attempts to deliver it that failed.
        due: when to try next.
    """

    id: str
    run: str
    type: str
    url: str
    secret_env: str | None
    body: str
    attempts: int = 0
    due: float


def notice_of(
    record: RunRecord, observed: Observed, webhook: WebhookSpec, number: int, kind: str, now: float, **about: object
) -> Notice:
    """The notice that something of ``kind`` happened to a run.

    Args:
        number: of this notice among those of the run.
        about: further fields of the message's ``data``; one is ``text``, a sentence for people.
    """
    run = {key: getattr(record, key) for key in ("id", "name", "kind", "tags")}
    state = {key: getattr(observed, key) for key in ("state", "step", "steps", "problem")}
    moment = datetime.datetime.fromtimestamp(now, datetime.UTC).isoformat(timespec="milliseconds")
    body = {"type": kind, "timestamp": moment, "data": {"run": {**run, **state}, **about}}
    return Notice(
        id=f"msg_{hashlib.sha256(f'{record.id}:{number}'.encode()).hexdigest()[:32]}",
        run=record.id,
        type=kind,
        url=webhook.url,
        secret_env=webhook.secret_env,
        body=json.dumps(body, separators=(",", ":")),
        due=now,
    )


def key_problem(secret: str | None, name: str) -> str:
    """What is wrong with the signing key in the variable ``name``; an empty string if nothing is."""
    if not secret:
        return f"the variable {name} is not set: make a key with {HOW_TO_MAKE_A_KEY}"
    try:
        key = _key(secret)
    except ValueError:  # not base64, or not ASCII
        return f"the variable {name} holds no base64: make a key with {HOW_TO_MAKE_A_KEY}"
    return "" if len(key) >= LEAST_KEY else f"the key in {name} is too short: make one with {HOW_TO_MAKE_A_KEY}"


def headers(notice: Notice, secret: str | None, now: float) -> dict[str, str]:
    """The headers of a request with this notice, signed if there is a ``secret`` that `key_problem` accepts."""
    sent = {"Content-Type": "application/json", "webhook-id": notice.id, "webhook-timestamp": str(int(now))}
    if secret is not None:
        signed = f"{notice.id}.{int(now)}.{notice.body}".encode()
        digest = hmac.digest(_key(secret), signed, "sha256")
        sent["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return sent


def _key(secret: str) -> bytes:
    return base64.b64decode(secret.strip().removeprefix("whsec_"), validate=True)
