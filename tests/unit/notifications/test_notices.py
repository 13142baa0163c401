"""The message that a webhook gets, and its signature."""

import asyncio
import json
import time

import httpx
import pytest

from services.notifications.deliveries import ATTEMPTS, delay
from services.notifications.notices import Notice, headers, key_problem, notice_of
from services.notifications.sending import NotDelivered, Sender
from services.notifications.watch import end_of, state_words
from volley.state import Observed, RunRecord
from volley.webhooks import WebhookSpec

KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
RECORD = RunRecord(id="a-1", name="a", kind="rl", job={}, created=1.0, folder="/nowhere/a-1", tags={"team": "maths"})


def a_notice(url: str = "https://hooks.example/x", **fields: object) -> Notice:
    given = {"id": "msg_1", "run": "a-1", "type": "run.done", "url": url, "secret_env": None, "body": "{}", "due": 0.0}
    return Notice.model_validate({**given, **fields})


def test_the_signature_is_that_of_the_published_example() -> None:
    """The example is in the tests of the libraries at https://github.com/standard-webhooks/standard-webhooks."""
    notice = a_notice(id="msg_p5jXN8AQM9LWM0D4loKWxJek", body='{"test": 2432232314}')
    assert headers(notice, KEY, 1614265330.9) == {
        "Content-Type": "application/json",
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    assert "webhook-signature" not in headers(notice, None, 0.0)


def test_an_unusable_key_is_named_but_not_shown() -> None:
    assert key_problem(KEY, "K") == key_problem(KEY.removeprefix("whsec_"), "K") == ""
    for secret, instead in (
        (None, "is not set"),
        ("", "is not set"),
        ("s3cret!", "no base64"),
        ("ключ", "no base64"),
        ("c2hvcnQ=", "short"),
    ):
        problem = key_problem(secret, "VOLLEY_WEBHOOK_K")
        assert instead in problem
        assert "VOLLEY_WEBHOOK_K" in problem
        assert "openssl rand" in problem
        assert not secret or secret not in problem


def test_a_notice_says_what_happened_to_which_run_under_an_id_of_its_own() -> None:
    webhook = WebhookSpec(url="https://hooks.example/x")
    observed = Observed(state="failed", step=3, steps=9, problem="no signal", ended=7.0)
    first, same, second = (notice_of(RECORD, observed, webhook, i, "run.failed", 1.5, text="t") for i in (1, 1, 2))
    assert first == same
    assert first.id != second.id
    body = json.loads(first.body)
    assert (body["type"], body["timestamp"]) == ("run.failed", "1970-01-01T00:00:01.500+00:00")
    assert body["data"]["text"] == "t"
    assert body["data"]["run"] == {
        **{"id": "a-1", "name": "a", "kind": "rl", "tags": {"team": "maths"}},
        **{"state": "failed", "step": 3, "steps": 9, "problem": "no signal"},
    }
    assert state_words("a", observed) == "a has failed after step 3 of 9: no signal"
    assert state_words("a", Observed(state="done")) == "a is done"


def test_a_failure_that_another_driver_mends_is_none() -> None:
    assert end_of(Observed(state="failed", ended=1.0), final=False) == ""
    assert end_of(Observed(state="failed", ended=1.0), final=True) != end_of(
        Observed(state="failed", ended=2.0), final=True
    )
    assert end_of(Observed(state="done", ended=1.0), final=False) == end_of(
        Observed(state="done", ended=1.0), final=True
    )
    for state in ("queued", "pending", "starting", "running", "stopping", "stopped"):
        assert end_of(Observed.model_validate({"state": state}), final=True) == ""


def test_attempts_are_spread_over_half_an_hour() -> None:
    pauses = [delay(attempts) for attempts in range(ATTEMPTS - 1)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 2.0
    assert 30 * 60 < sum(pauses) < 40 * 60


# ---- whom it may call ----------------------------------------------------------------------------------------------


class Resolver:
    """Answers every name with the same addresses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
        async def getaddrinfo(host: str, port: int, **_: object) -> list[object]:
            return [(2, 1, 6, "", (address, port)) for address in addresses]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "::1", "169.254.169.254", "fe80::1", "10.0.0.1", "192.168.1.1", "0.0.0.0", "::ffff:127.0.0.1",
     "100.64.0.1", "224.0.0.1", "fd00::1", "::"],
)  # fmt: skip
async def test_a_star_allows_no_private_address(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    for found in ([address], ["93.184.216.34", address]):
        Resolver(monkeypatch, *found)
        async with Sender(["*"]) as sender:
            with pytest.raises(NotDelivered, match="private address"):
                await sender.send(a_notice())


async def test_a_star_pins_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    Resolver(monkeypatch, "93.184.216.34")
    asked: list[httpx.Request] = []

    async def send(request: httpx.Request, **_: object) -> None:
        asked.append(request)
        raise OSError("no network")

    async with Sender(["*"]) as sender:
        monkeypatch.setattr(sender._client, "send", send)
        with pytest.raises(NotDelivered, match="no network"):
            await sender.send(a_notice("https://hooks.example:8443/x?y=1"))
    (request,) = asked
    assert str(request.url) == "https://93.184.216.34:8443/x?y=1"
    assert request.headers["Host"] == "hooks.example:8443"
    assert request.extensions["sni_hostname"] == "hooks.example"


async def test_other_hosts_are_not_called_and_no_message_shows_the_url() -> None:
    async with Sender(["other.example"]) as sender:
        for url in (
            "https://hooks.example/very-secret",
            "http://127.0.0.1:1/very-secret",
            "http://[::1]:1/very-secret",
        ):
            with pytest.raises(NotDelivered, match="not among the hosts") as error:
                await sender.send(a_notice(url))
            assert "very-secret" not in str(error.value)


async def test_without_its_key_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VOLLEY_WEBHOOK_GONE", raising=False)
    async with Sender(["hooks.example"]) as sender:
        with pytest.raises(NotDelivered, match="VOLLEY_WEBHOOK_GONE is not set"):
            await sender.send(a_notice(secret_env="VOLLEY_WEBHOOK_GONE", due=time.time()))
