"""The Python client, in both forms, against a stand-in for the server and against answers made up here."""

import asyncio
import dataclasses
import inspect
import json
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, assert_type

import httpx
import numpy as np
import pytest

from tests.unit.fake_api import FakeApi, served, sse
from volley.client import AsyncClient, AsyncRun, Client, Metrics, Run, Update
from volley.client import http as client_http
from volley.client import live as client_live
from volley.client import routes as client_routes
from volley.errors import (
    ApiError,
    Conflict,
    DeadlineExceeded,
    HostError,
    InvalidRequest,
    JobError,
    NotAllowed,
    NotFound,
    RunFailed,
    ServerAway,
    ServerBusy,
    VolleyError,
)
from volley.job import JOB
from volley.views import RunView

Handler = Callable[[httpx.Request], httpx.Response]


class Blocking:
    """Calls the blocking form."""

    def __init__(self, server: str | None, transport: httpx.MockTransport | None) -> None:
        self.client = Client(server, transport=transport)

    def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return method(*args, **options)

    def items(self, method: Callable[..., Iterator[Any]], *args: Any, **options: Any) -> list[Any]:
        return list(method(*args, **options))

    def close(self) -> None:
        self.client.close()


class Awaiting:
    """Calls the asynchronous form in an event loop of its own."""

    def __init__(self, server: str | None, transport: httpx.MockTransport | None) -> None:
        self.runner = asyncio.Runner()
        self.client = AsyncClient(server, transport=transport)

    def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self.runner.run(method(*args, **options))

    def items(self, method: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        async def collect() -> list[Any]:
            return [item async for item in method(*args, **options)]

        return self.runner.run(collect())

    def close(self) -> None:
        self.runner.run(self.client.close())
        self.runner.close()


Form = Blocking | Awaiting
Connect = Callable[..., Form]


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("VOLLEY_TOKEN", "VOLLEY_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("VOLLEY_HOME", str(tmp_path / "home"))


@pytest.fixture(params=[Blocking, Awaiting])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Open a client of one form: of a server by its URL, or of a function that answers requests."""
    opened: list[Form] = []

    def open_client(server: str | Handler) -> Form:
        transport = None if isinstance(server, str) else httpx.MockTransport(server)
        opened.append(request.param(server if isinstance(server, str) else "http://server", transport))
        return opened[-1]

    yield open_client
    for form in opened:
        form.close()


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    with served(fake.app) as url:
        fake.url = url
        yield fake


def problem(status: int, detail: str, kind: str = "x", **headers: str) -> httpx.Response:
    document = {"type": f"urn:volley:problem:{kind}", "title": kind, "status": status, "detail": detail, "errors": []}
    return httpx.Response(status, json=document, headers=headers)


# ---- runs ----------------------------------------------------------------------------------------------------------


def test_a_job_is_submitted_as_a_dict_or_an_object(api: FakeApi, connect: Connect, tmp_path: Path) -> None:
    form = connect(api.url)
    tree = {
        "kind": "rl",
        "name": "tried",
        "model": {"path": tmp_path / "model"},
        "data": {"path": "prompts.jsonl"},
        "scorer": {"kind": "exact"},
        "objective": {"kind": "max_at_k", "weights": {1: 0.5, 8: 0.5}},
        "steps": 4,
    }
    run = form.call(form.client.submit, tree, tags={"who": "me"}, key="k1", folder=tmp_path)
    assert (run.id, run.url) == ("tried-1", f"{api.url}/#/runs/tried-1")
    _, path, headers, body = api.seen[-1]
    assert (path, headers["idempotency-key"], body["tags"]) == ("/v1/runs", "k1", {"who": "me"})
    assert body["job"]["data"]["path"] == str(tmp_path / "prompts.jsonl")
    assert body["job"]["model"]["path"] == str(tmp_path / "model")
    assert body["job"]["objective"]["weights"] == {"1": 0.5, "8": 0.5}
    form.call(form.client.submit, JOB.validate_python(tree), folder=tmp_path)
    sent = api.seen[-1][3]["job"]
    assert sent["data"]["path"] == str(tmp_path / "prompts.jsonl")
    assert sent["checkpoint"], "an object has every default"


def test_a_relative_path_is_relative_to_the_current_folder(
    api: FakeApi, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    form = connect(api.url)
    form.call(form.client.submit, {"name": "a", "data": [{"path": "b.jsonl"}, {"path": "s3://bucket/c"}]})
    paths = [each["path"] for each in api.seen[-1][3]["job"]["data"]]
    assert paths == [str(tmp_path / "b.jsonl"), "s3://bucket/c"]


@pytest.mark.parametrize("job", [[], "job.yaml", None, {"name": object()}, {"steps": math.nan}])
def test_what_is_no_job_is_rejected_before_it_is_sent(connect: Connect, job: Any) -> None:
    form = connect(lambda request: pytest.fail("sent"))
    with pytest.raises(JobError, match=r"a job is a dict|not JSON"):
        form.call(form.client.submit, job)


def test_a_run_is_found_by_the_beginning_of_its_id(api: FakeApi, connect: Connect) -> None:
    for run_id in ("sevens-1", "sevens-2", "tens-1", "sevens-1-again"):
        api.add(run_id, state="running")
    form = connect(api.url)
    assert form.call(form.client.run, "tens").id == "tens-1"
    assert form.call(form.client.run, "sevens-1").id == "sevens-1", "an id is no beginning"
    with pytest.raises(NotFound, match=r"several runs begin with sevens: .*write more of the id"):
        form.call(form.client.run, "sevens")
    with pytest.raises(NotFound, match="there is no run elevens"):
        form.call(form.client.run, "elevens")
    with pytest.raises(JobError, match="the id of the run is empty"):
        form.call(form.client.run, "")


def test_lists_are_read_page_by_page(api: FakeApi, connect: Connect) -> None:
    for number in range(5):
        api.add(f"run-{number}", state="running")
    form = connect(api.url)
    assert [each.id for each in form.call(form.client.runs)] == [f"run-{number}" for number in (4, 3, 2, 1, 0)]
    assert [each.id for each in form.call(form.client.runs, 3)] == ["run-4", "run-3", "run-2"]


def test_a_run_is_changed(api: FakeApi, connect: Connect) -> None:
    api.add("a", state="running")
    form = connect(api.url)
    run = form.call(form.client.run, "a")
    for method, arguments, sent in (
        (run.scale, {"actors": 0}, {"actors": 0}),
        (run.set, {"k": 4, "max_lag": 2}, {"objective": {"k": 4}, "max_lag": 2}),
        (run.set, {"objective": {"k": 4}, "center": True}, {"objective": {"k": 4, "center": True}}),
        (run.set, {"objective": None}, {"objective": None}),
        (run.pause, {}, {"paused": True}),
    ):
        form.call(method, **arguments)
        assert api.seen[-1][3] == sent
    form.call(run.set, {"objective.k": np.int64(2)})
    assert api.seen[-1][3] == {"objective": {"k": 2}}
    form.call(run.change, {"actors": 1}, revision=7)
    assert api.seen[-1][2]["if-match"] == '"7"'
    assert form.call(run.stop).desired.stopped
    assert not form.call(run.resume).desired.stopped
    with pytest.raises(JobError, match="not JSON"):
        form.call(run.set, learning_rate=math.inf)
    for method, words in ((run.scale, "nothing to scale"), (run.set, "nothing to change")):
        with pytest.raises(JobError, match=words):
            form.call(method)
    with pytest.raises(JobError, match=r"actors\.count: only objective has fields"):
        form.call(run.set, {"actors.count": 2})


# ---- following -----------------------------------------------------------------------------------------------------


def live(api: FakeApi, end: str = "done") -> None:
    """A run of two steps whose live stream is cut in the middle; the last rows come after its last state."""
    view = api.add("a", state="running", steps=2)
    done = {**view["observed"], "state": end, "step": 2, "problem": "out of luck"}
    api.stream = [
        sse("observed", desired=view["desired"], observed=view["observed"], state="running"),
        sse("metrics", rows=[{"step": 0, "reward_mean": 0.5}]),
        None,
        sse("events", items=[{"id": f"{i}-0", "kind": "tick", "time": float(i)} for i in (1, 2)]),
        sse("observed", desired=view["desired"], observed=done, state=end),
        sse("metrics", rows=[{"step": 1, "reward_mean": 0.75}]),
        sse("evaluations", items=[{"version": 2, "estimates": []}]),
        sse("ended", state=end),
        sse("metrics", rows=[{"step": 2, "reward_mean": 1.0}]),
    ]


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_http, "RETRY_SECONDS", 0.02)


@pytest.mark.usefixtures("_hasty")
def test_following_yields_one_thing_at_a_time_until_the_run_has_ended(api: FakeApi, connect: Connect) -> None:
    live(api)
    form = connect(api.url)
    run = form.call(form.client.run, "a")
    found = form.items(run.follow)
    assert [each.kind for each in found] == ["state", "step", "event", "event", "state", "step", "evaluation"]
    assert found[-2].data == {"step": 1, "reward_mean": 0.75}
    resumed = [headers.get("last-event-id") for _, path, headers, _ in api.seen if path.endswith("/live")]
    assert resumed == [None, "2"]


@pytest.mark.usefixtures("_hasty")
def test_steps_begin_with_the_run(api: FakeApi, connect: Connect) -> None:
    live(api, "failed")
    form = connect(api.url)
    run = form.call(form.client.run, "a")
    assert [row["step"] for row in form.items(run.steps)] == [0, 1]
    asked = [headers.get("last-event-id") for _, path, headers, _ in api.seen if path.endswith("/live")]
    assert asked == ["0-0.0-0.0-0", "2"]


def test_a_live_view_of_a_failing_server_is_retried_for_a_limited_time(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_http, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(client_live, "AWAY_SECONDS", 0.1)
    stream = {"content-type": "text/event-stream"}
    for answer in (problem(503, "Redis is away"), httpx.Response(200, headers=stream, content=b"")):
        asked: list[httpx.Request] = []

        def fails(request: httpx.Request, answer: httpx.Response = answer, asked: Any = asked) -> httpx.Response:
            asked.append(request)
            return answer

        form = connect(fails)
        with pytest.raises(ServerAway, match="The run continues without this view"):
            form.items(type_of(form)(form.client, "a").follow)
        assert len(asked) > 1


@pytest.mark.parametrize(
    ("status", "kind", "text", "error", "words"),
    [
        (404, "application/problem+json", '{"detail": "there is no run a"}', NotFound, "there is no run a"),
        (200, "text/html", "<html>log in</html>", HostError, "does not answer like a Volley server"),
        (200, "text/event-stream", "data: [\n\n", HostError, "does not answer like a Volley server"),
        (200, "text/event-stream", sse("deleted"), NotFound, "run a was deleted"),
    ],
)
def test_a_live_view_that_cannot_go_on_ends_at_once(
    connect: Connect, status: int, kind: str, text: str, error: type[VolleyError], words: str
) -> None:
    form = connect(lambda request: httpx.Response(status, headers={"content-type": kind}, text=text))
    with pytest.raises(error, match=words):
        form.items(type_of(form)(form.client, "a").follow)


def test_multi_line_events_comments_and_ids_are_parsed() -> None:
    parser = client_live.EventParser()
    lines = [": ping", "", "id: 7", "event: metrics", 'data: {"rows":', "data: []}", "", "data: {}", "", "id: 8"]
    found = [(parser.last_id, event.kind, event.data) for line in lines for event in parser.take(line)]
    assert found == [("7", "metrics", {"rows": []}), ("7", "message", {})]
    parser.cut()
    assert parser.last_id == "7", "an event that was cut is asked for again"


def test_waiting_ends_with_the_run(api: FakeApi, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_routes, "POLL_SECONDS", 0.02)
    for state in ("stopped", "done"):
        api.add(state, state=state)
    api.add("failed", state="failed", problem="no signal")
    view = api.add("running", state="running")
    form = connect(api.url)
    kind = type_of(form)
    assert form.call(kind(form.client, "stopped").wait).state == "stopped"
    with pytest.raises(RunFailed, match="run failed failed: no signal"):
        form.call(kind(form.client, "failed").wait)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s for the end of run running"):
        form.call(kind(form.client, "running").wait, timeout=0.1)
    threading.Timer(0.2, lambda: view.update(state="done")).start()
    assert form.call(kind(form.client, "running").wait, timeout=30).state == "done"


def test_waiting_survives_a_server_that_restarts(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_routes, "POLL_SECONDS", 0.01)
    fake = FakeApi()
    done = fake.add("a", state="done")
    answers: Iterator[Exception | httpx.Response] = iter(
        [httpx.ConnectError("refused"), problem(503, "starting"), httpx.Response(200, json=done)]
    )

    def answer(request: httpx.Request) -> httpx.Response:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    form = connect(answer)
    assert form.call(type_of(form)(form.client, "a").wait).state == "done"
    monkeypatch.setattr(client_routes, "AWAY_SECONDS", 0.05)
    form = connect(lambda request: problem(503, "away"))
    with pytest.raises(ServerBusy, match="away"):
        form.call(type_of(form)(form.client, "a").wait)


def type_of(form: Form) -> Any:
    return Run if isinstance(form, Blocking) else AsyncRun


# ---- measured ------------------------------------------------------------------------------------------------------


def series(rows: dict[int, float]) -> Handler:
    """Answer as `GET /metrics` does, for one metric by step."""

    def answer(request: httpx.Request) -> httpx.Response:
        params = request.url.params
        last, points = int(params.get("to", 1 << 40)), int(params["points"])
        found = [step for step in sorted(rows) if int(params["from"]) <= step <= last]
        buckets = np.array_split(found, min(points, max(1, len(found))))
        means = [float(np.mean([rows[int(step)] for step in bucket])) for bucket in buckets if len(bucket)]
        ends = [int(bucket[-1]) for bucket in buckets if len(bucket)]
        body = {"steps": ends, "series": {"a": means} if means else {}, "total": len(found), "names": ["a"]}
        return httpx.Response(200, json=body)

    return answer


@pytest.mark.parametrize("steps", [range(0), range(3), range(4, 9), range(10), range(11), range(0, 95, 3), [2, 90]])
def test_every_row_is_read_however_many_there_are(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, steps: range | list[int]
) -> None:
    monkeypatch.setattr(client_routes, "POINTS", 10)
    form = connect(series({step: step / 2 for step in steps}))
    run = type_of(form)(form.client, "a")
    found = form.call(run.metrics)
    assert found.steps.tolist() == list(steps)
    assert list(found) == [] if not len(steps) else found["a"].tolist() == [step / 2 for step in steps]
    some = form.call(run.metrics, first=5, last=40)
    assert some.steps.tolist() == [step for step in steps if 5 <= step <= 40]
    assert len(form.call(run.metrics, points=4).steps) == min(4, len(steps))


def test_metrics_are_arrays_with_nan_and_a_data_frame(connect: Connect) -> None:
    body = {"steps": [1, 2], "series": {"loss": [None, 0.5], "kl_k1": [1, 2]}, "total": 2, "names": []}
    form = connect(lambda request: httpx.Response(200, json=body))
    metrics = form.call(type_of(form)(form.client, "a").metrics)
    assert (metrics.steps.dtype, metrics["loss"].dtype) == (np.int64, np.float64)
    np.testing.assert_array_equal(metrics["loss"], [np.nan, 0.5])
    assert (list(metrics), len(metrics)) == (["kl_k1", "loss"], 2)
    with pytest.raises(KeyError, match=r"no metric 'nope': docs/metrics\.md lists them"):
        Metrics(np.array([1, 2]), {})["nope"]
    with pytest.raises(KeyError, match="no metric 'los': there are loss"):
        metrics["los"]
    frame = metrics.frame()
    assert frame.index.tolist() == [1, 2]
    assert frame.loc[2].to_dict() == {"kl_k1": 2.0, "loss": 0.5}


def test_evaluations_are_arrays_and_a_data_frame(connect: Connect) -> None:
    def row(version: int, ks: tuple[int, ...], **more: Any) -> dict[str, Any]:
        estimates = [{"k": k, "mean": k / 10 + version, "low": 0.0, "high": 1.0} for k in ks]
        return {"version": version, "n": 8, "prompts": 5, "estimates": estimates, "majority": [], **more}

    majority = [{"k": 4, "mean": 0.25, "low": 0.0, "high": 0.5}]
    rows = [row(0, (1, 4)), row(10, (1, 8), majority=majority)]
    form = connect(lambda request: httpx.Response(200, json={"items": rows}))
    found = form.call(type_of(form)(form.client, "a").evaluations)
    assert (found.versions.tolist(), found.ks, len(found)) == ([0, 10], (1, 4, 8), 2)
    np.testing.assert_allclose(found.mean, [[0.1, 0.4, np.nan], [10.1, np.nan, 10.8]])
    np.testing.assert_allclose(found.at(1), [0.1, 10.1])
    assert (found.low.shape, found.high.shape) == ((2, 3), (2, 3))
    assert (found.of("majority").ks, found.of("majority").at(4).tolist()[1]) == ((4,), 0.25)
    with pytest.raises(KeyError, match="no evaluation at k=2: there are 1, 4, 8"):
        found.at(2)
    frame = found.frame()
    assert frame["estimator"].tolist() == ["pass@k"] * 4 + ["maj@k"]
    assert frame[frame.k == 8]["mean"].tolist() == [10.8]


def test_without_pandas_a_data_frame_says_what_to_install(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    form = connect(lambda request: httpx.Response(200, json={"items": []}))
    found = form.call(type_of(form)(form.client, "a").evaluations)
    with pytest.raises(HostError, match="pip install pandas"):
        found.frame()


def test_logs_and_what_a_run_counts(api: FakeApi, connect: Connect) -> None:
    api.add("a", state="running")
    form = connect(api.url)
    run = form.call(form.client.run, "a")
    assert form.call(run.logs, tail=5) == "there"
    assert dataclasses.astuple(form.call(run.log_piece, "driver", 5, 0)) == ("hello", 5)
    assert [each.process for each in form.call(run.processes)] == ["driver", "actor-0"]
    assert form.call(run.ledger) == {"admitted": 8, "trained": 8}
    with pytest.raises(NotFound, match="no log of nobody"):
        form.call(run.logs, "nobody")


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "error", "standard"),
    [
        (400, InvalidRequest, ValueError),
        (401, NotAllowed, VolleyError),
        (403, NotAllowed, VolleyError),
        (404, NotFound, LookupError),
        (409, Conflict, VolleyError),
        (412, Conflict, VolleyError),
        (413, InvalidRequest, ValueError),
        (422, InvalidRequest, ValueError),
        (429, ServerBusy, VolleyError),
        (500, ApiError, VolleyError),
        (503, ServerBusy, VolleyError),
    ],
)
def test_errors_are_classes_with_the_servers_sentence(
    connect: Connect, status: int, error: type[ApiError], standard: type[Exception]
) -> None:
    form = connect(lambda request: problem(status, "write something else", "a-kind", **{"retry-after": "5"}))
    with pytest.raises(error, match=r"^write something else") as raised:
        form.call(form.client.cluster)
    found = raised.value
    assert type(found) is error
    assert isinstance(found, standard)
    assert (found.status, found.kind, found.retry_after) == (status, "a-kind", 5.0)
    again = pickle.loads(pickle.dumps(found))  # noqa: S301 - made here
    assert (type(again), str(again), again.kind) == (error, str(found), "a-kind")


def test_an_error_names_the_fields_and_a_missing_token(connect: Connect) -> None:
    fields = [{"pointer": "/job/steps", "detail": "too many"}, {"pointer": "/job/name", "detail": "the job is invalid"}]
    form = connect(lambda request: httpx.Response(422, json={"detail": "the job is invalid", "errors": fields}))
    with pytest.raises(InvalidRequest) as raised:
        form.call(form.client.check, {})
    assert str(raised.value) == "the job is invalid\n  /job/steps: too many"
    assert raised.value.fields == {"/job/steps": "too many", "/job/name": "the job is invalid"}
    form = connect(lambda request: httpx.Response(403, text="<html>forbidden</html>"))
    with pytest.raises(NotAllowed, match="HTTP 403 Forbidden: set VOLLEY_TOKEN to a token with this scope"):
        form.call(form.client.cluster)


@pytest.mark.parametrize("text", ["<html>", "[]", '"text"', "{}", '{"items": 3}', '{"items": [1]}'])
def test_an_answer_of_something_else_is_reported(connect: Connect, text: str) -> None:
    form = connect(lambda request: httpx.Response(200, text=text))
    run = type_of(form)(form.client, "a")
    for method in (run.view, run.samples, run.events, run.metrics, run.log_piece, form.client.runs):
        arguments = ("driver",) if method.__name__ == "log_piece" else ()
        with pytest.raises(HostError, match="does not answer like a Volley server of this release"):
            form.call(method, *arguments)


def test_fields_of_a_newer_server_are_ignored(connect: Connect) -> None:
    view = FakeApi().add("a", state="running")
    view = {**view, "priority": 3, "observed": {**view["observed"], "mood": "good"}}
    form = connect(lambda request: httpx.Response(200, json=view))
    assert form.call(type_of(form)(form.client, "a").view).state == "running"


def test_a_server_that_is_not_there_is_named(connect: Connect) -> None:
    form = connect("http://127.0.0.1:1")
    with pytest.raises(ServerAway, match=r"http://127\.0\.0\.1:1 does not answer: .*`volley up` starts one"):
        form.call(form.client.runs)


@pytest.mark.parametrize("server", ["nonsense", "127.0.0.1:8484", "ftp://host", "http://[::1"])
def test_what_is_no_url_is_rejected(connect: Connect, server: str) -> None:
    with pytest.raises(JobError, match="write http://HOST:PORT"):
        connect(server)


def test_the_token_comes_from_the_argument_and_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("authorization"))
        return httpx.Response(200, json={"items": []})

    def ask(token: str | None = None) -> None:
        with Client("http://server", token, transport=httpx.MockTransport(answer)) as client:
            client.tokens()

    ask()
    monkeypatch.setenv("VOLLEY_TOKEN", "from the environment")
    ask()
    ask("given")
    assert sent == [None, "Bearer from the environment", "Bearer given"]


# ---- form ----------------------------------------------------------------------------------------------------------


def test_both_forms_have_the_same_methods_with_the_same_parameters() -> None:
    blocking, awaiting = Client("http://server"), AsyncClient("http://server")
    pairs: list[tuple[Any, Any]] = [(blocking, awaiting), (Run(blocking, "a"), AsyncRun(awaiting, "a"))]
    for one, other in pairs:
        names = [name for name in dir(one) if not name.startswith("_")]
        assert names == [name for name in dir(other) if not name.startswith("_")]
        for name in (name for name in names if callable(getattr(one, name))):
            first, second = (inspect.signature(getattr(each, name)) for each in (one, other))
            assert list(first.parameters.values()) == list(second.parameters.values()), name
            assert "self" not in first.parameters
            assert name == "close" or inspect.getdoc(getattr(one, name)), name


async def test_results_are_typed(api: FakeApi) -> None:
    """What mypy infers for each form is what a call returns."""
    api.add("a", state="running")
    with Client(api.url) as client:
        run = await asyncio.to_thread(client.run, "a")
        assert assert_type(await asyncio.to_thread(run.view), RunView).state == "running"
        assert assert_type(await asyncio.to_thread(run.metrics), Metrics).steps.tolist() == [2]
        assert isinstance(assert_type(run.follow(), Iterator[Update]), Iterator)
    async with AsyncClient(api.url) as other:
        found = await other.run("a")
        assert assert_type(await found.view(), RunView).state == "running"
        assert assert_type(await found.metrics(), Metrics).steps.tolist() == [2]
        assert isinstance(assert_type(found.follow(), AsyncIterator[Update]), AsyncIterator)


def test_the_client_imports_nothing_heavy() -> None:
    heavy = ("torch", "ray", "vllm", "deepspeed", "transformers", "redis", "fastapi", "typer", "pandas", "yaml")
    code = f"import json, sys, volley.client; print(json.dumps(sorted(set(sys.modules) & set({heavy!r}))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_without_httpx_the_client_says_what_to_install() -> None:
    code = "import sys; sys.modules['httpx'] = None\nimport volley.client"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "volley.client needs httpx, which is not installed: pip install 'volley-rl[client]'" in done.stderr
