"""verifiers 0.4: its tasksets as data, and its environments as programs. Runs under the job's interpreter.

verifiers serves an endpoint of its own to the harness and forwards each call to the gateway unchanged, so that the
history stays the one that was sampled. Its own chat harness installs packages for every episode; `Chat` does the same
within this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from openai import AsyncOpenAI, omit
from openai.types.chat.chat_completion_message_function_tool_call import Function
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.env import Env
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import MCPConnection, call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

__all__ = ["Chat"]

NAME = "volley_verifiers"  # this module's, under which verifiers finds the harness
_KEYS = itertools.count()


class ChatConfig(HarnessConfig):  # type: ignore[misc]
    """The configuration that all harnesses have."""


class Chat(Harness[ChatConfig]):  # type: ignore[misc]
    """Calls the model, and the task's tools as often as the model wants, until it answers without a call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(each) for each in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0))
            schemas, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            for name in self.config.disabled_tools or ():
                dispatch.pop(name, None)
            schemas = [each for each in schemas if each["function"]["name"] in dispatch]
            while True:
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=schemas or omit)
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls or reply.choices[0].finish_reason == "length":
                    break
                for call in message.tool_calls:
                    if call.type != "function":
                        raise ValueError(f"the model called a tool of type {call.type!r}")
                    answer = await _answer(call.function, dispatch, connected)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _answer(
    function: Function, dispatch: dict[str, tuple[str, str]], servers: dict[str, MCPConnection]
) -> str | list[dict[str, Any]]:
    """A tool's answer. The model sees what was wrong with its call."""
    if function.name not in dispatch:
        return f"there is no tool {function.name!r}; there is {', '.join(dispatch) or 'none'}"
    try:
        arguments = json.loads(function.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("they must be an object")
    except ValueError as problem:
        return f"the arguments are not JSON: {problem}"
    answer: str | list[dict[str, Any]] = await call_mcp(servers, dispatch, function.name, arguments)
    return answer


def environment(settings: Mapping[str, Any]) -> Env:
    """The environment that the job describes, with one agent."""
    sys.modules.setdefault(NAME, sys.modules[__name__])
    agent = {"harness": {"id": NAME}, "runtime": {"type": "subprocess"}, **settings["agent"]}
    return load_environment(resolve_env_config({"taskset": dict(settings["taskset"]), "agent": agent}))


def rows(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The taskset's tasks as rows of data."""
    for number, task in enumerate(environment(settings).taskset):
        text = task.data.prompt_text or task.data.name or f"task {number}"
        yield {"prompt": text, "task": task.data.model_dump(mode="json", exclude_defaults=True)}


def program(settings: Mapping[str, Any]) -> Callable[..., Awaitable[dict[str, Any]]]:
    """The program that plays a row's task."""
    env = environment(settings)
    kind, config = type(env.taskset).task_type(), env.config.taskset.task
    serving = _Serving(env)

    async def solve(row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        if not isinstance(row.get("task"), dict):
            raise ValueError("the row has no task: write the data with `volley env data JOB.yaml`")
        task = kind(kind.data_type().model_validate(row["task"]), config)
        await serving.begin()
        with _in_environment(api_key) as variable:
            endpoint = EvalClientConfig(base_url=base_url, api_key_var=variable)
            episode = await env.run_episode(task, ModelContext(model="policy", client=endpoint))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.ok:
            raise RuntimeError("; ".join(f"{each.type}: {each.message}" for each in errors) or "the episode is not ok")
        if len(episode.traces) != 1:
            raise RuntimeError(f"the environment played {len(episode.traces)} agents; Volley trains one")
        (trace,) = episode.traces
        return {"reward": trace.reward, "detail": ", ".join(f"{name} {value:g}" for name, value in scores(trace))}

    return solve


def scores(trace: Trace) -> Iterator[tuple[str, float]]:
    """The parts of a reward, by name."""
    for name, value in trace.rewards.items():
        yield name, float(getattr(value, "value", value) or 0.0)


@contextlib.contextmanager
def _in_environment(key: str) -> Iterator[str]:
    """A variable that holds the key: verifiers reads keys from nowhere else."""
    name = f"VOLLEY_EPISODE_KEY_{next(_KEYS)}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]


class _Serving:
    """What an environment shares between episodes, held open by a task of its own until the process ends."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._task: asyncio.Task[None] | None = None
        self._open: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        """Wait until it is open. Raises what it raises while opening; the next episode then tries again."""
        if self._task is None or self._task.done():
            self._open = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(self._open))
        assert self._open is not None
        await asyncio.shield(self._open)

    async def _hold(self, opened: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                opened.set_result(None)
                await asyncio.Event().wait()
        except Exception as problem:
            if opened.done():
                raise
            opened.set_exception(problem)
