"""What strange and oversized requests do to a gateway: they are answered, and others are served meanwhile."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from starlette.requests import Request

from actors.gateway import bodies, session
from actors.gateway.aside import INLINE_BYTES
from actors.gateway.asked import BadRequest
from actors.gateway.json_values import MAX_DEPTH, parse_json
from tests.gateway_server import TOKENIZER, USER, Served, Standalone, ask
from volley.gateway import GatewaySpec

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = (
    "a b " * INLINE_BYTES
)  # has many more tokens than there is room for, and is short enough to be one of the longest
TOO_LONG = "a" * (4 << 20)  # cannot fit, whatever its tokens are


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[lambda: Served(GatewaySpec()), Standalone])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    made = request.param()
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sessions() -> AsyncIterator[Served]:
    made = Served(GatewaySpec())
    yield made
    await made.close()


def requests_with(text: str) -> dict[str, tuple[str, Any]]:
    """A request to each route that tokenises, with ``text`` in it."""
    chat = {"messages": [{"role": "user", "content": text}]}
    return {
        "chat": ("/v1/chat/completions", chat),
        "completions": ("/v1/completions", {"prompt": text}),
        "tokenize": ("/tokenize", {"prompt": text}),
        "tokenize-chat": ("/tokenize", chat),
    }


def connected(served: Served, key: str) -> httpx.AsyncClient:
    base = served.server.url.removesuffix("/v1")
    return httpx.AsyncClient(base_url=base, headers={"Authorization": f"Bearer {key}"}, timeout=30)


@pytest.mark.parametrize("route", requests_with(""))
async def test_others_are_served_while_a_long_text_is_tokenised(
    served: Served, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer, tokenising, others_served = served.gateway.renderer, threading.Event(), threading.Event()
    tokens = renderer.tokens

    def slow(text: str, **options: Any) -> list[int]:
        if len(text) > INLINE_BYTES:
            tokenising.set()
            assert others_served.wait(20)
        return tokens(text, **options)

    monkeypatch.setattr(renderer, "tokens", slow)
    path, body = requests_with(LONG)[route]
    (key,) = served.open()
    async with connected(served, key) as client:
        long = asyncio.create_task(client.post(path, json=body))
        assert await asyncio.to_thread(tokenising.wait, 20)
        try:
            assert (await ask(served.client("hello"))).choices[0].message.content == "hello"
        finally:
            others_served.set()
        await long


@pytest.mark.parametrize("route", requests_with(""))
async def test_texts_that_cannot_fit_are_not_tokenised(
    served: Served, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = requests_with(TOO_LONG)[route]
    (key,) = served.open()
    monkeypatch.setattr(served.gateway.renderer, "_tokenizer", Refusing(TOKENIZER))
    async with connected(served, key) as client:
        answer = await client.post(path, json=body)
    if isinstance(served, Standalone) or path == "/tokenize":
        assert (answer.status_code, "tokens; the model takes" in answer.text) == (400, True)
    else:
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert served.gateway.find(key).session.end == "context"
    assert not served.engine.says


class Refusing:
    """A tokenizer that must not be asked for the tokens of a long text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        assert len(text) < INLINE_BYTES
        return self._tokenizer(text, **options)


async def test_threads_may_encode_and_decode_at_once(sessions: Served) -> None:
    renderer = sessions.gateway.renderer
    ids = renderer.tokens(LONG[:20_000])

    def encode(number: int) -> bool:
        return renderer.tokens(LONG[:20_000]) == ids and TOKENIZER.decode(ids) == LONG[:20_000]

    assert all(await asyncio.gather(*(asyncio.to_thread(encode, number) for number in range(16))))


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/chat/completions", "context"),
        ("/v1/completions", "context"),
        ("/inference/v1/generate", "context"),
        ("/tokenize", None),
    ],
)
async def test_a_call_too_large_for_any_conversation_ends_the_episode(
    sessions: Served, path: str, end: str | None
) -> None:
    client = sessions.client()
    async with connected(sessions, client.api_key) as raw:
        answer = await raw.post(path, content=b" " * (bodies.most_bytes(2000) + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert sessions.session(client).end == end


class Pieces:
    """A request whose body comes in pieces."""

    def __init__(self, *pieces: Any) -> None:
        self._pieces = list(pieces)

    async def receive(self) -> Any:
        piece = self._pieces.pop(0) if self._pieces else None
        if piece is None:
            await asyncio.Event().wait()
        return piece


def read(*pieces: Any) -> Any:
    request: Any = Pieces(*pieces)
    made: Request = request
    return bodies.read_body(made, 100)


async def test_bodies_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(bodies, "_PIECE_SECONDS", 0.01)
    begun = {"type": "http.request", "body": b'{"a":', "more_body": True}
    with pytest.raises(BadRequest, match=r"did not arrive within 0\.05 s"):
        await read(begun)
    with pytest.raises(BadRequest, match="the client closed its connection"):
        await read(begun, {"type": "http.disconnect"})


async def test_time_in_which_the_server_did_not_read_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 1.0)
    monkeypatch.setattr(bodies, "_PIECE_SECONDS", 0.1)
    arrived = asyncio.Event()

    class Late:
        async def receive(self) -> Any:
            await arrived.wait()
            return {"type": "http.request", "body": b'{"a": 1}'}

    late: Any = Late()
    reading = asyncio.create_task(bodies.read_body(late, 100))
    await asyncio.sleep(0)
    threading.Event().wait(1.5)  # the event loop is held up
    await asyncio.sleep(0.05)
    arrived.set()
    assert (await reading).fields == {"a": 1}


def nested(depth: int, kind: str) -> Any:
    value: Any = "end"
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


SURROGATES = ["\ud800", "a\udfffb", "\ude00\ud83d"]
STRANGE = [
    *(pytest.param(nested(depth, kind), id=f"{kind}-{depth}") for depth in (101, 900) for kind in ("list", "object")),
    *(pytest.param(text, id=ascii(text)) for text in SURROGATES),
    *(pytest.param({text: 1}, id=ascii({text: 1})) for text in SURROGATES),
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
REPLY = {"role": "assistant", "content": "4"}
CALL = {"id": "c00000000", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def places(value: Any) -> dict[str, Any]:
    """Requests with ``value`` in every kind of place."""
    function = {**TOOL["function"], "description": value}  # type: ignore[dict-item]
    return {
        "message": {"messages": [{**USER, "more": value}]},
        "part": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "more": value}]}]},
        "tool": {"messages": [USER], "tools": [{**TOOL, "function": function}]},
        "option": {"messages": [USER], "chat_template_kwargs": {"mood": value}},
        "call": {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "more": value}]}]},
        "field": {"messages": [USER], "metadata": value},
        "prompt": {"prompt": "a", "metadata": value},
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/inference/v1/generate"])
@pytest.mark.parametrize("value", STRANGE)
async def test_strange_values_anywhere_are_refused_and_the_connection_goes_on(
    sessions: Served, path: str, value: Any
) -> None:
    client = sessions.client()
    async with connected(sessions, client.api_key) as raw:
        for place, body in places(value).items():
            answer = await raw.post(path, content=json.dumps(body))
            assert (answer.status_code, "not usable JSON" in answer.text) == (400, True), place
            assert (await raw.get("/v1/models")).status_code == 200
    assert sessions.session(client).calls == 0


@pytest.mark.parametrize("value", STRANGE)
async def test_strange_arguments_of_a_tool_call_are_text(sessions: Served, value: Any) -> None:
    client = sessions.client("fine", context=20_000)
    call = {**CALL, "function": {"name": "add", "arguments": json.dumps({"a": value})}}
    answer = await ask(client, USER, {"role": "assistant", "tool_calls": [call]}, USER)
    assert answer.choices[0].message.content == "fine"


@pytest.mark.parametrize("depth", [1, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 100_000])
@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}")])
async def test_depth_is_bounded(depth: int, opens: str, closes: str) -> None:
    text = opens * depth + "1" + closes * depth
    if depth <= MAX_DEPTH:
        assert json.dumps(parse_json(text), separators=(",", ":")) == text
    else:
        with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} deep"):
            parse_json(text)


async def test_whole_pairs_and_other_languages_are_texts() -> None:
    for text in ("🙂", "你好", "é\u0000", ""):
        for escaped in (True, False):
            assert parse_json(json.dumps({text: [text]}, ensure_ascii=escaped)) == {text: [text]}


@pytest.mark.parametrize("failure", [RuntimeError("a\nb"), KeyError("k"), RecursionError(), AssertionError()])
async def test_what_nobody_expected_is_answered_in_the_apis_form(
    served: Served, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    client = served.client(failure, failure, "fine")
    async with connected(served, client.api_key) as raw:
        body = {"messages": [USER]}
        answer = await raw.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (500, "server_error")
        assert type(failure).__name__ in error["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert "Traceback" in caplog.text
        streamed = await raw.post("/v1/chat/completions", json={**body, "stream": True})
        assert "error" in streamed.text
        assert (await raw.post("/v1/chat/completions", json=body)).status_code == 200


async def said(client: openai.AsyncOpenAI, *messages: Any, stream: bool) -> tuple[str, str]:
    """The text of an answer, and how it ended."""
    reply = await ask(client, *messages, stream=stream)
    if not stream:
        return reply.choices[0].message.content, reply.choices[0].finish_reason
    choices = [choice async for chunk in reply for choice in chunk.choices]
    return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_a_stream_has_the_id_of_its_call_in_every_piece(served: Served, route: str) -> None:
    client = served.client("4", "5")
    path, body = requests_with("a")[route]
    calls = [body, {**body, "messages": [*body["messages"], REPLY, USER]} if "messages" in body else {"prompt": "a4b"}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with connected(served, client.api_key) as raw:
        streams = [(await raw.post(path, json={**call, **options})).text for call in calls]
    events = [[json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")] for text in streams]
    first, second = ([chunk["id"] for chunk in chunks] for chunks in events)
    assert (len(set(first)), len(set(second))) == (1, 1)
    assert first[0] != second[0]
    assert len(first) >= 3, "text, end and usage"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", ["calls", "tokens", "context"])
async def test_calls_after_a_limit_are_answered_as_the_first_until_there_are_too_many(
    sessions: Served, limit: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MOST_EMPTY", 5)
    limits = {"calls": {"calls": 1}, "tokens": {"tokens": 3}, "context": {"context": 40}}[limit]
    client = sessions.client("abcdefghijklmnopqrstuvwxyz", **limits)
    text, _ = await said(client, USER, stream=stream)
    messages = [USER, {"role": "assistant", "content": text}, USER]
    for _ in range(5):
        assert await said(client, *messages, stream=stream) == ("", "length")
        messages = [*messages[-3:], {"role": "assistant", "content": ""}, USER]
    with contextlib.suppress(openai.BadRequestError):  # where the first call did not reach the limit, one more is empty
        await said(client, *messages, stream=stream)
    with pytest.raises(openai.BadRequestError, match=f"the model ran out of {limit}") as refused:
        await ask(client, *messages)
    assert refused.value.code == f"out_of_{limit}"
    assert (await client.models.list()).data
    group, reports = await sessions.gateway.close_sessions([client.api_key], group_id=1, prompt_id="p", actor="a")
    assert (reports[0].end, reports[0].calls, group.stopped_n.tolist()) == (limit, 1, [False])
    with pytest.raises(openai.AuthenticationError, match="episode is over"):
        await ask(client, *messages)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/responses", "/v1/v1/chat/completions", "/"])
async def test_routes_that_are_not_there_name_those_that_are(served: Served, path: str) -> None:
    async with connected(served, "any") as client:
        error = (answer := await client.post(path, json={})).json()["error"]
        assert (answer.status_code, error["code"]) == (404, "unknown_route")
        assert f"no POST {path}, only POST /v1/chat/completions, POST /v1/completions" in error["message"]
        assert "client.chat.completions.create" in error["message"]
        wrong = await client.get("/v1/chat/completions")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "unknown_route")
    with pytest.raises(openai.NotFoundError, match="use chat completions"):
        await served.client().responses.create(model="m", input="a")


@pytest.mark.parametrize("rule", ["strict", "override"])
@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"n": 0}, {"best_of": 3}, {"echo": True}, {"suffix": "x"}, {"logprobs": 5}, {"top_logprobs": 3}],
)
async def test_another_form_of_answer_is_refused_under_either_rule(
    sessions: Served, fields: dict[str, Any], rule: str
) -> None:
    client = sessions.client(rule=rule)
    for path, body in (requests_with("a")["chat"], requests_with("a")["completions"]):
        async with connected(sessions, client.api_key) as raw:
            answer = await raw.post(path, json={**body, **fields})
        (name,) = fields
        message = answer.json()["error"]["message"]
        assert (answer.status_code, message.startswith(f"{name} is not supported")) == (400, True)
        assert "override" not in message
