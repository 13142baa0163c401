"""A session ends with its own episode: what its program left behind changes nothing of what was recorded."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from environments.session_end import end_session
from tests.gateway_server import USER, Served, ask
from volley.gateway import GatewaySpec

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    made = Served(GatewaySpec())
    yield made
    await made.close()


async def reports_of(served: Served, *clients: openai.AsyncOpenAI) -> tuple[list[int], list[tuple[Any, int]]]:
    """The tokens of each sample of the group, and how each session ended, with its calls."""
    keys = [client.api_key for client in clients]
    group, reports = await served.gateway.close_sessions(keys, group_id=1, prompt_id="p", actor="a")
    return group.lengths_n.tolist(), [(report.end, report.calls) for report in reports]


async def test_later_calls_are_refused_and_those_of_the_others_answered(served: Served) -> None:
    over, other = served.client("abc", calls=1), served.client("de", calls=1)
    await ask(over)
    await end_session(served.server.url, over.api_key)
    for stream in (False, True):
        with pytest.raises(openai.AuthenticationError, match="episode is over"):
            await ask(over, stream=stream)
    await ask(other)
    assert await reports_of(served, over, other) == ([4, 3], [(None, 1), (None, 1)])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_runs_is_dropped(served: Served, stream: bool) -> None:
    client = served.client("abc", None)
    reply = await ask(client)
    said = {"role": "assistant", "content": reply.choices[0].message.content}
    served.engine.hanging.clear()

    async def whole() -> None:
        answer = await ask(client, USER, said, USER, stream=stream)
        async for _ in answer:
            pass

    running = asyncio.create_task(whole())
    await served.engine.hanging.wait()
    await end_session(served.server.url, client.api_key)
    with pytest.raises(openai.APIError, match="episode is over"):
        await running
    assert await reports_of(served, client) == ([4], [(None, 1)])


async def test_a_limit_that_was_reached_before_stays(served: Served) -> None:
    client = served.client("abc", calls=1)
    said = (await ask(client)).choices[0].message
    messages = [USER, {"role": "assistant", "content": said.content}, USER]
    assert (await ask(client, *messages)).choices[0].finish_reason == "length"
    await end_session(served.server.url, client.api_key)
    assert await reports_of(served, client) == ([4], [("calls", 1)])


async def test_a_body_too_large_that_arrives_late_is_no_limit(served: Served) -> None:
    client = served.client("abc")
    found = served.gateway.find(client.api_key)
    await ask(client)
    arriving = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"messages": [{"role": "user", "content": "'
        await arriving.wait()
        for _ in range(64):
            yield b"a" * (1 << 20)

    posting = asyncio.create_task(_post(served, client.api_key, body()))
    await asyncio.sleep(0.2)
    await end_session(served.server.url, client.api_key)
    arriving.set()
    assert await posting in (401, 413)
    assert found.session.end is None
    assert await reports_of(served, client) == ([4], [(None, 1)])


async def _post(served: Served, key: str, body: AsyncIterator[bytes]) -> int:
    async with openai.DefaultAsyncHttpxClient() as http:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        answer = await http.post(f"{served.server.url}/chat/completions", content=body, headers=headers)
        return answer.status_code


async def test_a_session_or_an_actor_that_is_gone_has_none_to_end(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    client = served.client()
    await reports_of(served, client)
    await end_session(served.server.url, client.api_key)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        await end_session("http://127.0.0.1:9/v1", "key")
        await end_session(f"{served.server.url}/nowhere", "key")
    refused, unknown = caplog.messages
    assert "could not be ended: " in refused
    assert "Not Found" in unknown
