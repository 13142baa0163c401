"""The client's errors, and the token that it sends."""

import pickle

import httpx
import pytest

from tests.unit.client.forms import Connect, problem, type_of
from tests.unit.fake_api import FakeApi
from volley.client import Client
from volley.errors import (
    ApiError,
    Conflict,
    HostError,
    InvalidRequest,
    JobError,
    NotAllowed,
    NotFound,
    ServerAway,
    ServerBusy,
    VolleyError,
)


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
