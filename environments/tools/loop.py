"""One episode with tools: the model answers or calls tools, until it answers without a call.

prompt ─> model ─> tool calls? ─ no ─> the last answer, which the scorer judges
            ^           │ yes
            └─ answers of the tools
"""

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from environments.tools.base import Seen, Tool, ToolProblem, Use, shortened
from environments.tools.functions import Function, load_function
from environments.tools.python import Python
from volley.rollout import FunctionTool, PythonTool, ToolsRollout


def open_loop(rollout: ToolsRollout) -> "ToolLoop":
    """The loop of a job, with its tools ready to be called.

    Raises:
        JobError: a function cannot become a tool.
        HostError: this host cannot isolate the model's code as the job asks.
    """
    functions = load_functions(rollout)
    tools: list[Tool] = [Python(spec) if isinstance(spec, PythonTool) else functions[spec] for spec in rollout.tools]
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False)
    return ToolLoop(rollout, tools, client)


def load_functions(rollout: ToolsRollout) -> dict[FunctionTool, Function]:
    """The functions of a job as tools. Raises `JobError` if one cannot become a tool."""
    return {spec: load_function(spec) for spec in rollout.tools if isinstance(spec, FunctionTool)}


class ToolLoop:
    """Runs episodes, any number at once; each ends within ``rollout.timeout_s``, which the caller enforces."""

    def __init__(self, rollout: ToolsRollout, tools: Sequence[Tool], client: httpx.AsyncClient) -> None:
        self._rollout, self._tools, self._client = rollout, tools, client
        self._schemas = [tool.schema for tool in tools]
        self._errors: Counter[str] = Counter()  # by API key

    def stuck(self) -> bool:
        """Whether a tool has calls that timed out and still run."""
        return any(tool.stuck() for tool in self._tools)

    def take_errors(self, api_key: str) -> int:
        """How many calls the model saw as errors in the episode with this key, however it ended. Forgets them."""
        return self._errors.pop(api_key, 0)

    async def close(self) -> None:
        """End the tools' processes, and close the connections to the gateway. Episodes that still run fail."""
        for tool in self._tools:
            tool.close()
        await self._client.aclose()

    async def solve(self, row: Mapping[str, Any], base_url: str, api_key: str) -> None:
        """Run one episode on ``row["prompt"]``. Returns nothing, so that the scorer judges the last answer.

        Raises:
            ToolUnavailable: a tool failed for reasons that are not the model's.
            GatewayRefused: the gateway did not answer a call.
        """
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": row["prompt"]}]
        if self._rollout.system is not None:
            messages.insert(0, {"role": "system", "content": self._rollout.system})
        left = self._rollout.max_tool_calls
        async with contextlib.AsyncExitStack() as stack:
            uses = {tool.name: await stack.enter_async_context(tool.episode()) for tool in self._tools}
            while calls := await self._next_calls(messages, base_url, api_key):
                for call in calls:
                    text, is_error = await self._answer(call, uses, left)
                    self._errors[api_key] += is_error
                    content = shortened(text, self._rollout.max_output)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
                    left -= 1

    async def _next_calls(
        self, messages: list[Mapping[str, Any]], base_url: str, api_key: str
    ) -> Sequence[Mapping[str, Any]]:
        """The tool calls of the model's next reply, which is put behind ``messages``."""
        answer = await self._client.post(
            f"{base_url}/chat/completions",
            headers={"Authorization": f"Bearer {api_key}"},
            json={"model": "volley", "messages": messages, "tools": self._schemas},
        )
        if answer.status_code != httpx.codes.OK:
            raise GatewayRefused(f"status {answer.status_code}: {answer.text[:500]}")
        (choice,) = answer.json()["choices"]
        messages.append(choice["message"])
        calls: Sequence[Mapping[str, Any]] = choice["message"].get("tool_calls") or ()
        return calls

    async def _answer(self, call: Mapping[str, Any], uses: Mapping[str, Use], left: int) -> Seen:
        """What the model gets to see of one call, before it is shortened."""
        name = call["function"]["name"]
        try:
            if left <= 0:
                raise ToolProblem("no tool calls are left: answer now")
            if name not in uses:
                raise ToolProblem(f"there is no tool {name!r:.60}; the tools are {', '.join(uses)}")
            return await uses[name](_arguments(call))
        except ToolProblem as problem:
            return Seen(f"error: {problem}", is_error=True)


class GatewayRefused(Exception):
    """The gateway answered a call with an error."""


def _arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The call's arguments, which the gateway has found to be a JSON object. Raises `ToolProblem` if they are not."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError) as problem:
        raise ToolProblem(f"the arguments are not JSON: {problem}") from None
    if not isinstance(arguments, dict):
        raise ToolProblem("the arguments must be an object")
    return arguments
