"""The routes of the API as operations: what is requested, and what the answer means. docs/api.md describes them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from volley.base import Spec
from volley.client.http import plain, strange
from volley.client.operations import Operation, Request, T
from volley.client.results import Evaluations, LogPiece, Metrics, joined
from volley.errors import ApiError, DeadlineExceeded, JobError, NotFound, RunFailed, ServerAway
from volley.job_paths import absolute_paths
from volley.state import ENDED, Limits
from volley.views import (
    AuditPage,
    AuditView,
    ClusterView,
    Event,
    ExportView,
    LedgerView,
    LogFile,
    LogList,
    MadeToken,
    QueueView,
    RunPage,
    RunSummary,
    RunView,
    SampleView,
    Series,
    TokenList,
    TokenView,
)

CHECK_SECONDS = 150.0  # the server checks a new job's data, tokenizer and scorer, with a limit of its own
POLL_SECONDS = 2.0  # between looks at a run that is waited for
AWAY_SECONDS = 120.0  # how long a wait goes on without an answer
MATCHES_SHOWN = 5
POINTS = 5000  # most rows of metrics per answer
RUNS, EVENTS, SAMPLES, AUDITS = 200, 1000, 200, 1000  # most items per page

Job = Spec | Mapping[str, Any]
Model = TypeVar("Model", bound=BaseModel)
_EVENTS = TypeAdapter(list[Event])
_SAMPLES = TypeAdapter(list[SampleView])
_ROWS = TypeAdapter(list[dict[str, Any]])


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Part of a list. Its items may have fields that this release does not know."""

    items: list[T]
    next: str | None


def create(
    job: Job, folder: Path | None, tags: Mapping[str, str] | None, key: str | None, priority: int
) -> Operation[RunView]:
    headers = {"Idempotency-Key": key} if key else {}
    body = {"job": job_tree(job, folder), "tags": dict(tags or {}), "priority": priority}
    answer = yield Request("POST", "/v1/runs", json=body, headers=headers, timeout=CHECK_SECONDS)
    return _model(RunView, answer)


def check(job: Job, folder: Path | None) -> Operation[None]:
    yield Request("POST", "/v1/jobs/check", json={"job": job_tree(job, folder)}, timeout=CHECK_SECONDS)


def runs(limit: int, filters: Mapping[str, object]) -> Operation[list[RunSummary]]:
    return (yield from _newest(RunPage, "/v1/runs", filters, limit, RUNS, cursor="cursor"))


def _newest(
    kind: type[Model], path: str, filters: Mapping[str, object], limit: int, most: int, *, cursor: str
) -> Operation[list[Any]]:
    """Collect items from as many pages as needed.

    Args:
        most: items that the server puts on a page.
        cursor: name of the parameter that continues after a page.
    """
    found: list[Any] = []
    after = None
    while len(found) < limit:
        params = {**filters, "limit": min(most, limit - len(found)), cursor: after}
        page: Any = _model(kind, (yield Request("GET", path, params)))
        found += page.items
        after = page.next
        if after is None:
            break
    return found


def find(prefix: str) -> Operation[str]:
    """Return the id of the run whose id is, or begins with, ``prefix``. Raises `NotFound` for none or several."""
    if not prefix:
        raise JobError("the id of the run is empty")
    found = [each.id for each in (yield from runs(MATCHES_SHOWN + 1, {"id_prefix": prefix}))]
    if prefix in found or not found:
        return (yield from view(prefix)).record.id  # rejected if there is no such run
    if len(found) > 1:
        shown = ", ".join(found[:MATCHES_SHOWN]) + (", ..." if len(found) > MATCHES_SHOWN else "")
        raise NotFound(f"several runs begin with {prefix}: {shown}; write more of the id", 404)
    return found[0]


def view(run_id: str, delay: float = 0.0) -> Operation[RunView]:
    return _model(RunView, (yield Request("GET", run_path(run_id), delay=delay)))


def wait(run_id: str, timeout: float | None) -> Operation[RunView]:
    began = heard = time.monotonic()
    delay = 0.0
    while True:
        try:
            seen = yield from view(run_id, delay)
            heard = time.monotonic()
        except (ServerAway, ApiError) as error:
            lasting = isinstance(error, ApiError) and error.status < 500 and error.status != 429
            if lasting or time.monotonic() - heard > AWAY_SECONDS:
                raise
        else:
            if seen.state == "failed":
                raise RunFailed(run_id, seen.observed.problem)
            if seen.state in ENDED:
                return seen
        waited = time.monotonic() - began
        if timeout is not None and waited >= timeout:
            raise DeadlineExceeded("client", f"the end of run {run_id}, which goes on", timeout)
        delay = POLL_SECONDS if timeout is None else min(POLL_SECONDS, timeout - waited)


def change(run_id: str, changes: Mapping[str, object], revision: int | None = None) -> Operation[RunView]:
    headers = {} if revision is None else {"If-Match": f'"{revision}"'}
    return _model(RunView, (yield Request("PATCH", run_path(run_id), json=changes, headers=headers)))


def stop(run_id: str) -> Operation[RunView]:
    return _model(RunView, (yield Request("POST", run_path(run_id, "stop"))))


def resume(run_id: str) -> Operation[RunView]:
    return _model(RunView, (yield Request("POST", run_path(run_id, "resume"))))


def delete(run_id: str) -> Operation[None]:
    yield Request("DELETE", run_path(run_id))


def export(run_id: str, checkpoint: int | None) -> Operation[ExportView]:
    return _model(ExportView, (yield Request("POST", run_path(run_id, "export"), json={"checkpoint": checkpoint})))


def metrics(
    run_id: str, names: tuple[str, ...], first: int, last: int | None, points: int | None
) -> Operation[Metrics]:
    """Read all rows, in as many windows of steps as it takes; with ``points``, at most that number of averages."""
    whole = yield from _series(run_id, names, first, last, points or POINTS)
    if points is not None or whole.total <= POINTS:
        return joined([whole])
    end, windows = whole.steps[-1], []
    for start in range(first, end + 1, POINTS):
        windows.append((yield from _series(run_id, names, start, min(start + POINTS - 1, end), POINTS)))
    return joined(windows)


def _series(run_id: str, names: tuple[str, ...], first: int, last: int | None, points: int) -> Operation[Series]:
    params = {"names": ",".join(names) or None, "from": first, "to": last, "points": points}
    return _model(Series, (yield Request("GET", run_path(run_id, "metrics"), params)))


def events(run_id: str, limit: int | None, kind: str | None) -> Operation[list[Event]]:
    """Return the newest ``limit`` events, or all, oldest first."""
    path = run_path(run_id, "events")
    if limit is not None and limit <= EVENTS:
        page = yield from _page(_EVENTS, path, {"limit": limit, "kind": kind, "newest": True})
        return page.items
    found: list[Event] = []
    after = None
    while True:
        page = yield from _page(_EVENTS, path, {"limit": EVENTS, "kind": kind, "after": after})
        found += page.items
        after = page.next
        if after is None:
            return found if limit is None else found[-limit:]


def samples(run_id: str, limit: int, filters: Mapping[str, object]) -> Operation[list[SampleView]]:
    found: list[SampleView] = []
    cursor = None
    while len(found) < limit:
        params = {**filters, "limit": min(SAMPLES, limit - len(found)), "cursor": cursor}
        page = yield from _page(_SAMPLES, run_path(run_id, "samples"), params)
        found += page.items
        cursor = page.next
        if cursor is None:
            break
    return found


def evaluations(run_id: str) -> Operation[Evaluations]:
    return Evaluations(tuple((yield from _page(_ROWS, run_path(run_id, "evaluations"), {})).items))


def ledger(run_id: str) -> Operation[dict[str, int]]:
    return _model(LedgerView, (yield Request("GET", run_path(run_id, "ledger")))).counts


def log_files(run_id: str) -> Operation[list[LogFile]]:
    return _model(LogList, (yield Request("GET", run_path(run_id, "logs")))).items


def log_piece(run_id: str, process: str, most: int, offset: int | None) -> Operation[LogPiece]:
    answer = yield Request("GET", run_path(run_id, "logs", process), {"tail": most, "offset": offset})
    try:
        return LogPiece(answer.text, int(answer.headers["x-next-offset"]))
    except (KeyError, ValueError) as error:
        raise strange(answer, "no X-Next-Offset") from error


def tokens() -> Operation[list[TokenView]]:
    return _model(TokenList, (yield Request("GET", "/v1/tokens"))).items


def create_token(name: str, scope: str, limits: Limits) -> Operation[MadeToken]:
    body = {"name": name, "scope": scope, "limits": limits.model_dump()}
    return _model(MadeToken, (yield Request("POST", "/v1/tokens", json=body)))


def limit_token(name: str, limits: Limits) -> Operation[TokenView]:
    return _model(TokenView, (yield Request("PATCH", _token_path(name), json=limits.model_dump())))


def delete_token(name: str) -> Operation[None]:
    yield Request("DELETE", _token_path(name))


def _token_path(name: str) -> str:
    return f"/v1/tokens/{quote(name, safe='')}"


def queue() -> Operation[QueueView]:
    return _model(QueueView, (yield Request("GET", "/v1/queue")))


def audit(limit: int, filters: Mapping[str, object]) -> Operation[list[AuditView]]:
    return (yield from _newest(AuditPage, "/v1/audit", filters, limit, AUDITS, cursor="before"))


def cluster() -> Operation[ClusterView]:
    return _model(ClusterView, (yield Request("GET", "/v1/cluster")))


def run_path(run_id: str, *more: str) -> str:
    return "/".join(("/v1/runs", quote(run_id, safe=""), *(quote(part, safe="") for part in more)))


def job_tree(job: Job, folder: Path | None) -> dict[str, Any]:
    """Return the job as JSON values, with relative paths made absolute from ``folder``, by default the current one.

    Raises:
        JobError: a value has no JSON form.
    """
    if not isinstance(job, Spec | Mapping):
        raise JobError(f"a job is a dict or one of the classes in volley.job, not {type(job).__name__}")
    try:
        tree = job.model_dump(mode="json") if isinstance(job, Spec) else to_jsonable_python(dict(job), fallback=plain)
    except (PydanticSerializationError, TypeError) as error:
        raise JobError(f"the job has a value that is not JSON: {error}") from error
    absolute: dict[str, Any] = absolute_paths(tree, (folder or Path()).absolute())  # type: ignore[assignment]
    return absolute


def _page(items: TypeAdapter[list[T]], path: str, params: Mapping[str, object]) -> Operation[Page[T]]:
    answer = yield Request("GET", path, params)
    try:
        page = dict(answer.json())
        return Page(items.validate_python(page["items"]), page.get("next"))
    except (ValueError, TypeError, KeyError) as error:
        raise strange(answer, answer.text[:100]) from error


def _model(model: type[Model], answer: httpx.Response) -> Model:
    """Parse an answer. Fields that a newer server adds are ignored."""
    try:
        return model.model_validate_json(answer.content, extra="ignore")
    except ValidationError as error:
        raise strange(answer, f"{error.errors(include_url=False)[0]['msg']}: {answer.text[:100]}") from error
