"""OpenEnv 0.10: its servers as environments, and their tasks as data. Runs under the job's interpreter.

    program ──> server of the environment (`app` in a process of its own, or `url`)
      solve ──> Session ── WebSocket: reset, step ──> an environment of the server
            ──> the gateway: what the environment shows becomes messages, what the model does becomes actions

OpenEnv's own client says the same over the WebSocket; to import it takes ten seconds.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, omit
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

STEP = "step"  # the tool of environments without tools
HTTP_SECONDS = 30.0
START_SECONDS = 300.0  # until a server first answers
LARGEST = 100 << 20  # bytes of a message
SERVE = """
import sys
sys.path = [place for place in sys.path if place]  # without the current folder
import uvicorn
uvicorn.run(sys.argv[1], fd=int(sys.argv[2]), log_level="warning")
"""
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def program(settings: Mapping[str, Any]) -> Callable[..., Awaitable[dict[str, Any] | None]]:
    """The program that plays an episode; starts the environment's server."""
    url = settings["url"] or started(settings["app"])
    schema = schema_of(url)
    check_field(schema["action"], "action", settings["action"])
    check_field(schema["observation"], "observation", settings["observation"])

    async def solve(row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any] | None:
        env, first = await opened(url, {**settings["reset"], **row.get("reset", {})})
        try:
            async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                episode = Episode(settings, env, client)
                goes_on = await episode.begin(first, str(row.get("prompt") or ""), schema["action"])
                while goes_on:
                    goes_on = await episode.call()
                return episode.ended()
        finally:
            await env.close()

    return solve


def rows(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each task of the server or, without tasks, for each seed: what its reset shows, and its arguments."""
    url = settings["url"] or started(settings["app"])
    loop = asyncio.new_event_loop()
    for arguments in tasks(url, settings["reset"].get("split")):
        text = loop.run_until_complete(first_sight(url, {**settings["reset"], **arguments}, settings["observation"]))
        if not text:
            raise ValueError("its reset shows nothing to make prompts of: write the data by hand, a prompt per row")
        yield {"prompt": text, "reset": arguments}


async def first_sight(url: str, arguments: Mapping[str, Any], field: str | None) -> str:
    """What a reset shows."""
    env, first = await opened(url, arguments)
    await env.close()
    return shown(first.observation, field)


class Full(Exception):
    """The server has as many sessions as it takes."""


class Rejected(Exception):
    """The environment does not accept an action; the text says why."""


@dataclass
class Seen:
    """What came of a reset or a step."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class Session:
    """An environment of the server, for one episode."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def reset(self, arguments: Mapping[str, Any]) -> Seen:
        """Begin. Raises `Full`, or as `step`."""
        return await self._ask("reset", arguments)

    async def step(self, action: Mapping[str, Any]) -> Seen:
        """Act.

        Raises:
            Rejected: the action does not fit the schema.
            RuntimeError: the environment raised.
            ConnectionClosed: the server ended the session.
        """
        return await self._ask("step", action)

    async def close(self) -> None:
        await self._connection.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Seen:
        with contextlib.suppress(ConnectionClosed):  # a server without room has said so before
            await self._connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._connection.recv())
        told = answer["data"]
        if answer["type"] != "error":
            return Seen(told["observation"], told.get("reward"), bool(told.get("done")))
        match told.get("code"):
            case "CAPACITY_REACHED":
                raise Full
            case "VALIDATION_ERROR":
                raise Rejected("; ".join(map(described, told.get("errors") or ())) or str(told.get("message")))
            case _:
                raise RuntimeError(f"the environment failed: {told.get('message')}")


def described(error: Mapping[str, Any]) -> str:
    """One finding of pydantic."""
    return f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}"


class Episode:
    """One conversation between the model and a session of the environment."""

    def __init__(self, settings: Mapping[str, Any], env: Session, client: AsyncOpenAI) -> None:
        self._settings, self._env, self._client = settings, env, client
        self._messages: list[Any] = []
        self._tools: list[Any] = []
        self._own_tools = False  # of the environment
        self._rewards: list[float] = []
        self._steps, self._done = 0, False

    async def begin(self, first: Seen, prompt: str, action: Mapping[str, Any]) -> bool:
        """Take what the reset showed, and learn which tools there are; returns whether the model is to act."""
        self._done = first.done
        if self._settings["system"]:
            self._messages.append({"role": "system", "content": self._settings["system"]})
        parts = dict.fromkeys([prompt, shown(first.observation, self._settings["observation"])])
        self._messages.append({"role": "user", "content": "\n\n".join(filter(None, parts))})
        if self._settings["action"] is None:
            own = await tools_of(self._env)
            self._own_tools = bool(own)
            self._tools = own or [tool(STEP, "Act in the environment.", without_metadata(action))]
        return not self._done

    async def call(self) -> bool:
        """Let the model act once; returns whether the episode goes on."""
        reply = await self._client.chat.completions.create(
            model="policy", messages=self._messages, tools=self._tools or omit
        )
        choice = reply.choices[0]
        self._messages.append(choice.message.model_dump(exclude_none=True))
        if choice.finish_reason == "length":
            return False
        if self._settings["action"] is not None:
            answer = await self._step({self._settings["action"]: choice.message.content or ""})
            self._messages.append({"role": "user", "content": answer})
            return not self._done
        for called in choice.message.tool_calls or ():
            if called.type != "function":
                raise ValueError(f"the model called a tool of type {called.type!r}")
            answer = await self._call_tool(called.function.name, called.function.arguments)
            self._messages.append({"role": "tool", "tool_call_id": called.id, "content": answer})
            if self._done:
                return False
        return bool(choice.message.tool_calls)

    def ended(self) -> dict[str, Any] | None:
        """What the episode earned; None if the scorer is to judge it.

        Raises:
            RuntimeError: the environment ended it, and gave no reward.
        """
        if self._settings["reward"] == "none":
            return None
        if self._done and not self._rewards:
            raise RuntimeError("the environment gave no reward; write rollout.reward: none, and a scorer that judges")
        rewards = self._rewards if self._settings["reward"] == "sum" else self._rewards[-1:]
        detail = f"{self._steps} step{'s' if self._steps != 1 else ''}{'' if self._done else ', not done'}"
        return {"reward": float(sum(rewards)), "detail": detail}

    async def _call_tool(self, name: str, written: str) -> str:
        """The environment's answer to a tool call. The model sees what was wrong with it."""
        known = [each["function"]["name"] for each in self._tools]
        if name not in known:
            return f"error: there is no tool {name!r}; there is {', '.join(known)}"
        try:
            arguments = json.loads(written or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("they must be an object")
        except ValueError as problem:
            return f"error: the arguments are not JSON: {problem}"
        if not self._own_tools:
            return await self._step(arguments)
        return await self._step({"type": "call_tool", "tool_name": name, "arguments": arguments})

    async def _step(self, action: dict[str, Any]) -> str:
        """What the environment shows after an action. Actions that it rejects change nothing."""
        try:
            result = await self._env.step(action)
        except Rejected as problem:
            return f"error: the environment does not accept this action: {problem}"
        self._steps, self._done = self._steps + 1, result.done
        if result.reward is not None:
            self._rewards.append(float(result.reward))
        if self._own_tools:
            return answered(result.observation)
        return shown(result.observation, self._settings["observation"])


def shown(observation: Mapping[str, Any], field: str | None) -> str:
    """What the model sees of an observation; "" if it holds nothing."""
    if field is not None:
        value = observation.get(field)
        return value if isinstance(value, str) else "" if value is None else json.dumps(value)
    kept = {name: value for name, value in observation.items() if name != "metadata"}
    return json.dumps(kept) if kept else ""


def answered(observation: Mapping[str, Any]) -> str:
    """What a tool of the environment answered, or the error in its place."""
    if (error := observation.get("error")) is not None:
        return f"error: {error['message'] if isinstance(error, dict) and 'message' in error else error}"
    result = observation.get("result")
    if isinstance(result, dict) and "data" in result:
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result)


async def tools_of(env: Session) -> list[Any]:
    """The environment's own tools, as OpenAI's API describes them; [] if it has none."""
    try:
        listed = (await env.step({"type": "list_tools"})).observation.get("tools") or []
    except Rejected:
        return []
    return [tool(each["name"], each.get("description") or "", each.get("input_schema") or {}) for each in listed]


def tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI's API describes it."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def without_metadata(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an action, without the field that all actions have."""
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    return {**schema, "properties": fields}


def check_field(schema: Mapping[str, Any], what: str, field: str | None) -> None:
    """Raise `ValueError` unless actions or observations have the field that the job names."""
    names = [name for name in schema.get("properties", {}) if name not in ("metadata", "done", "reward")]
    if field is not None and field not in names:
        raise ValueError(f"rollout.{what}: its {what}s have no field {field!r}; they have {', '.join(names) or 'none'}")
    missing = [name for name in schema.get("required", []) if name != field]
    if what == "action" and field is not None and missing:
        raise ValueError(
            f"rollout.action: its actions need {', '.join(missing)} too: remove action, and the model fills all fields "
            "through a tool"
        )


async def opened(url: str, arguments: Mapping[str, Any]) -> tuple[Session, Seen]:
    """Return a session and what its reset showed.

    Waits while the server is full; in a run, the time limit of the episode bounds this.
    """
    address = f"ws{url.removeprefix('http').removeprefix('ws').rstrip('/')}/ws"
    for pause in itertools.chain((0.05, 0.1, 0.2, 0.5), itertools.repeat(1.0)):
        env = Session(await connect(address, open_timeout=HTTP_SECONDS, max_size=LARGEST, proxy=None))
        try:
            return env, await env.reset(arguments)
        except Full:
            await env.close()
        except BaseException:
            await env.close()
            raise
        await asyncio.sleep(pause)
    raise AssertionError("the pauses never end")


def tasks(url: str, split: str | None) -> Iterator[dict[str, Any]]:
    """Arguments of `reset`: one set per task of ``split``, by default the first; without tasks, seeds without end."""
    try:
        name = fetched(url, "list_environments")[0]
        split = split or fetched(url, f"{name}/splits")[0]["name"]
        count = fetched(url, f"{name}/num_tasks", {"split": split})["num_tasks"]
    except urllib.error.HTTPError:  # 501: the environment has no tasks; 404: nor has the server
        yield from ({"seed": seed} for seed in itertools.count())
        return
    yield from ({"split": split, "index": index} for index in range(count))


def schema_of(url: str) -> Any:
    """The schemas of actions and observations. Raises `ValueError` if ``url`` is not a server of OpenEnv."""
    try:
        schema = fetched(url, "schema")
        return {what: dict(schema[what]) for what in ("action", "observation")}
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise ValueError(f"rollout.url: {url} does not answer as a server of OpenEnv: {problem}") from problem


def fetched(url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """What the server answers to a request. Raises `OSError`."""
    address = f"http{url.removeprefix('http').removeprefix('ws').rstrip('/')}"
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"{address}/{path}", data, {"content-type": "application/json"})
    with DIRECTLY.open(asked, timeout=HTTP_SECONDS) as answer:
        return json.load(answer)


def started(app: str) -> str:
    """Start the server ``app`` on the loopback interface; returns its URL once it answers.

    The server ends with this process, and this process with the server.

    Raises:
        RuntimeError: the server ended, or did not answer within `START_SECONDS`.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, app, str(listening.fileno())],
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    atexit.register(process.kill)
    printed = threading.Thread(target=copy_lines, args=(process, said := [""]), daemon=True)
    printed.start()
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"the server {app} did not answer within {START_SECONDS:g} s")
        try:
            fetched(url, "health")
        except urllib.error.HTTPError:
            pass  # it answers
        except OSError:
            time.sleep(0.1)
            continue
        threading.Thread(target=end_with, args=(process,), daemon=True).start()
        return url
    printed.join(1.0)
    raise RuntimeError(f"the server {app} ended with exit code {process.returncode}: {said[0]}")


def copy_lines(process: subprocess.Popen[bytes], said: list[str]) -> None:
    """Pass on what the server prints, and keep its last line in ``said``."""
    for line in process.stderr or ():
        os.write(2, line)
        if line.strip():
            said[0] = line.decode(errors="replace").strip()


def end_with(process: subprocess.Popen[bytes]) -> None:
    """End this process when the server ends."""
    code = process.wait()
    os.write(2, f"the environment's server ended ({code})\n".encode())
    os._exit(1)
