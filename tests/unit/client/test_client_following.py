"""The client follows a run, and waits for its end."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.unit.client.forms import Connect, problem, type_of
from tests.unit.fake_api import FakeApi, sse
from volley.client import http as client_http
from volley.client import live as client_live
from volley.client import routes as client_routes
from volley.errors import (
    DeadlineExceeded,
    HostError,
    NotFound,
    RunFailed,
    ServerAway,
    ServerBusy,
    VolleyError,
)


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
