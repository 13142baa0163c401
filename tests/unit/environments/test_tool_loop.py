"""Episodes with tools: what the model is sent, when they end, and which failures are its own."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from environments.programs import Programs
from environments.records import Outcome
from environments.tools.base import Seen, ToolProblem, Use, described
from environments.tools.loop import GatewayRefused, ToolLoop
from volley.errors import ToolUnavailable
from volley.rollout import FunctionTool, ToolsRollout

ROW = {"prompt": "what is 6 * 7?", "answer": "42"}
URL = "http://gateway/v1"


class Gateway:
    """Answers each request with the next of ``replies``."""

    def __init__(self, *replies: dict[str, Any] | httpx.Response) -> None:
        self.replies = list(replies)
        self.requests: list[dict[str, Any]] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        assert (str(request.url), request.headers["authorization"]) == (f"{URL}/chat/completions", "Bearer key")
        self.requests.append(json.loads(request.content))
        reply = self.replies.pop(0)
        if isinstance(reply, httpx.Response):
            return reply
        return httpx.Response(200, json={"choices": [{"message": reply, "finish_reason": "stop"}]})


class Echo:
    """A tool that repeats its arguments, and counts its open episodes."""

    name, schema, opened = "echo", described("echo", "Repeat.", {"type": "object"}), 0
    closed = 0

    @contextlib.asynccontextmanager
    async def episode(self) -> AsyncIterator[Use]:
        self.opened += 1
        try:
            yield self._call
        finally:
            self.opened -= 1

    async def _call(self, given: Mapping[str, Any]) -> Seen:
        match given.get("does"):
            case "fail":
                raise ToolProblem("bad luck " * 100)
            case "down":
                raise ToolUnavailable("the service is down")
            case "hang":
                await asyncio.sleep(30)
        return Seen(str(given["text"]), is_error=bool(given.get("broken")))

    def stuck(self) -> bool:
        return False

    def close(self) -> None:
        self.closed += 1


def calls(*arguments: dict[str, Any], name: str = "echo") -> dict[str, Any]:
    made = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(each)}}
        for number, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def run(gateway: Gateway, *, timeout: float = 10.0, **rollout: Any) -> tuple[Outcome, Echo]:
    echo = Echo()
    spec = ToolsRollout(tools=(FunctionTool(target="a:echo"),), max_output=100, **rollout)
    async with httpx.AsyncClient(transport=httpx.MockTransport(gateway.answer)) as client:
        ended = await Programs(ToolLoop(spec, [echo], client).solve, timeout).run(ROW, URL, "key")
    return ended.outcome, echo


async def test_the_model_calls_until_it_answers() -> None:
    first, second = calls({"text": "a"}, {"text": "b" * 300}), calls({"text": "c"})
    gateway = Gateway(first, second, says("42"))
    outcome, echo = await run(gateway, system="Use your tools.")
    assert outcome == Outcome()
    assert echo.opened == 0
    start = [{"role": "system", "content": "Use your tools."}, {"role": "user", "content": ROW["prompt"]}]
    answers = [
        {"role": "tool", "tool_call_id": "c0", "content": "a"},
        {"role": "tool", "tool_call_id": "c1", "content": f"{'b' * 50}\n... 200 characters left out ...\n{'b' * 50}"},
    ]
    last = {"role": "tool", "tool_call_id": "c0", "content": "c"}
    histories = [start, [*start, first, *answers], [*start, first, *answers, second, last]]
    assert [request["messages"] for request in gateway.requests] == histories
    assert all(request["tools"] == [echo.schema] for request in gateway.requests)


async def test_failures_of_calls_are_answers() -> None:
    gateway = Gateway(calls({"does": "fail"}), calls({"text": "x"}, name="sing"), says("I give up"))
    outcome, _ = await run(gateway)
    assert outcome == Outcome()
    contents = [request["messages"][-1]["content"] for request in gateway.requests[1:]]
    assert contents[0].startswith("error: bad luck")
    assert len(contents[0]) < 140
    assert contents[1] == "error: there is no tool 'sing'; the tools are echo"


@pytest.mark.parametrize("arguments", ["[1]", "{", "9" * 5000, "[" * 10_000])
async def test_arguments_that_are_no_object(arguments: str) -> None:
    call = calls({})
    call["tool_calls"][0]["function"]["arguments"] = arguments
    gateway = Gateway(call, says("42"))
    outcome, _ = await run(gateway)
    assert outcome == Outcome()
    assert gateway.requests[1]["messages"][-1]["content"].startswith("error: the arguments")


async def test_calls_beyond_the_limit_are_refused_but_answered() -> None:
    gateway = Gateway(calls({"text": "a"}, {"text": "b"}, {"text": "c"}), says("42"))
    outcome, _ = await run(gateway, max_tool_calls=2)
    assert outcome == Outcome()
    contents = [message["content"] for message in gateway.requests[1]["messages"][2:]]
    assert contents == ["a", "b", "error: no tool calls are left: answer now"]


async def test_errors_of_an_episode_are_counted_however_it_ends() -> None:
    spec = ToolsRollout(tools=(FunctionTool(target="a:echo"),), max_tool_calls=4)
    seen = calls({"does": "fail"}, {"text": "a"}, {"text": "error: not one"}, {"text": "b", "broken": 1}, {"text": "c"})
    for last, failure in ((says("42"), ""), (calls({"does": "down"}), ""), (httpx.Response(410), "GatewayRefused")):
        gateway = Gateway(seen, last, says("42"))
        async with httpx.AsyncClient(transport=httpx.MockTransport(gateway.answer)) as client:
            loop = ToolLoop(spec, [Echo()], client)
            ended = await Programs(loop.solve, 10.0).run(ROW, URL, "key")
        assert failure in ended.outcome.failure
        refused = last == calls({"does": "down"})  # beyond max_tool_calls
        assert (loop.take_errors("other"), loop.take_errors("key"), loop.take_errors("key")) == (0, 3 + refused, 0)


async def test_a_tool_that_cannot_work_fails_the_episode() -> None:
    outcome, echo = await run(Gateway(calls({"does": "down"})))
    assert outcome.failure == "the program raised ToolUnavailable: the service is down"
    assert echo.opened == 0


async def test_an_episode_that_takes_too_long_fails_and_closes_its_tools() -> None:
    outcome, echo = await run(Gateway(calls({"does": "hang"})), timeout=0.2)
    assert "longer than" in outcome.failure
    await asyncio.sleep(0)
    assert echo.opened == 0


async def test_tools_and_connections_are_closed_with_the_worker() -> None:
    client, echo = httpx.AsyncClient(transport=httpx.MockTransport(Gateway(says("42")).answer)), Echo()
    loop = ToolLoop(ToolsRollout(tools=(FunctionTool(target="a:echo"),)), [echo], client)
    programs = Programs(loop.solve, 10.0, owner=loop)
    assert (await programs.run(ROW, URL, "key")).outcome == Outcome()
    assert not client.is_closed
    await programs.close()
    assert (client.is_closed, echo.closed) == (True, 1)


async def test_a_gateway_that_refuses_fails_the_episode() -> None:
    outcome, _ = await run(Gateway(httpx.Response(410, json={"error": {"message": "actor-0 died"}})))
    assert GatewayRefused.__name__ in outcome.failure
    assert "actor-0 died" in outcome.failure


@pytest.mark.parametrize("kinds", [["python", "python"], ["a:f", "b:f"], ["a:python", "python"]])
def test_names_of_tools_differ(kinds: list[str]) -> None:
    tools = [{"kind": "function", "target": kind} if ":" in kind else {"kind": kind} for kind in kinds]
    with pytest.raises(ValueError, match="two tools have the name"):
        ToolsRollout.model_validate({"tools": tools})
