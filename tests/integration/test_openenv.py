"""OpenEnv as it comes from the package index, in an environment of its own: docs/environments.md in practice."""

import asyncio
import json
import socket
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from environments.outside.interpreter import Outside, check_outside, outside_of, rows_of
from environments.outside.programs import OutsidePrograms
from environments.records import Outcome
from services.runs.run import Result
from services.stack.ephemeral import Stack
from tests.gateway_server import Served
from tests.integration.environment_pages import section, volley, write_small
from tests.integration.jobs import run_job
from tests.integration.openai_stub import calling, stub
from volley.errors import JobError
from volley.gateway import GatewaySpec
from volley.rollout import OpenEnvRollout

pytestmark = pytest.mark.integration

SECONDS = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's job, made small, in the page's environment, beside the page's server."""
    made = tmp_path_factory.mktemp("openenv")
    write_small(made, "openenv", 4)
    (made / "others.py").write_text(OTHERS)
    (made / "light.py").write_text(LIGHT)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(made)
        yield made


@pytest.fixture(scope="module")
async def trained(stack: Stack, folder: Path) -> Result:
    return await run_job(stack, folder, yaml.safe_load((folder / "job.yaml").read_text()))


def test_seeds_become_data(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "vowels.jsonl").read_text().splitlines()]
    assert rows == [
        {"prompt": f"Say a word with {vowel}.", "reset": {"seed": seed}} for seed, vowel in enumerate("aeio")
    ]


async def test_openenvs_own_probe_finds_what_training_needs(folder: Path) -> None:
    """It makes several conversations, and asks for temperatures and top log-probs of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's import warns of many things
        served = Served(GatewaySpec(tool_parser="hermes"))
    client = served.client("ok", BASH, "o", rule="override", on_rewrite="keep_longest")
    python = yaml.safe_load((folder / "job.yaml").read_text())["rollout"]["python"]
    command = [python, "-c", PROBE, served.server.url, client.api_key]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=SECONDS)
    await served.close()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["tokens", True, "ok", []]


BASH = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls /tmp"}}\n</tool_call>'
PROBE = """
import json, sys
from openenv.core.harness.capture.validate_llm import validate_llm

report = validate_llm(sys.argv[1], "tiny", api_key=sys.argv[2])
print(json.dumps([report.capture_level, report.ok, report.tool_support, report.findings]))
"""


async def test_check_runs_an_episode(folder: Path) -> None:
    assert [line.split()[1] for line in section("openenv")[2].text.splitlines()] == ["env", "env", "check", "run"]
    said = await asyncio.to_thread(volley, folder, "volley check job.yaml")
    assert "OpenEnv server vowels:app ran one episode" in said
    assert "reward 1 (passed), 1 step" in said


async def test_rewards_are_the_environments_and_log_probs_the_learners(trained: Result) -> None:
    last = trained.folder.read("metrics")[-1]
    assert (last["groups_trained"], last["groups_dropped"]) == (4, 0)
    assert all(row["logprob_mismatch_max"] < 1e-4 for row in trained.folder.read("metrics"))
    ended = [row for row in trained.folder.read("samples") if row["status"] != "no_answer"]
    assert ended
    for row in ended:
        vowel = row["prompt"].removesuffix(".")[-1]
        said = [call["answer"].removesuffix("<|im_end|>") for call in row["calls"]]
        assert row["reward"] == float(vowel in said[-1])
        assert not any(vowel in each for each in said[:-1])
        assert len(said) == 3 or row["reward"] == 1.0
        assert all("That has none. Again." in call["context"] for call in row["calls"][1:])


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """The URL of a server with two environments, `/tools` and `/sums`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        code = f"import uvicorn; uvicorn.run('others:app', fd={listening.fileno()}, log_level='warning')"
        process = subprocess.Popen([python_of(folder), "-c", code], cwd=folder, pass_fds=[listening.fileno()])
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        assert httpx.get(f"{url}/sums/health", timeout=SECONDS).status_code == 200
        yield url
    finally:
        process.kill()
        process.wait()


def python_of(folder: Path) -> str:
    return str(yaml.safe_load((folder / "job.yaml").read_text())["rollout"]["python"])


def outside(folder: Path, **fields: Any) -> Outside:
    made = outside_of(OpenEnvRollout.model_validate({"python": python_of(folder), **fields}))
    assert made is not None
    return made


async def play(folder: Path, says: Any, rows: list[dict[str, Any]], **fields: Any) -> tuple[list[Outcome], Any]:
    """The outcomes of an episode per row, against a stub of the gateway, and what this was asked."""
    programs = OutsidePrograms(outside(folder, **fields), SECONDS, SECONDS, 3)
    await programs.start()
    try:
        with stub(says) as (url, asked):
            ended = await asyncio.gather(*(programs.run(row, url, f"key-{at}") for at, row in enumerate(rows)))
    finally:
        await programs.close()
    return [each.outcome for each in ended], asked


async def test_the_environments_own_tools_are_called(folder: Path, server: str) -> None:
    """In a server for one session at a time, by three episodes at once."""

    def says(body: dict[str, Any]) -> dict[str, Any]:
        return calling("double", x=2) if body["messages"][-1]["role"] == "user" else {"content": "done"}

    rows = [{"prompt": f"{number}: double 2"} for number in range(3)]
    outcomes, asked = await play(folder, says, rows, url=f"{server}/tools")
    assert outcomes == [Outcome(0.5, detail="1 step, not done")] * 3
    for number in range(3):
        first, second = (body for key, body in asked if key == f"Bearer key-{number}")
        assert first["messages"] == [{"role": "user", "content": f"{number}: double 2"}]
        assert [each["function"]["name"] for each in first["tools"]] == ["double"]
        assert second["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "4"}


async def test_actions_with_several_fields_are_a_tool(folder: Path, server: str) -> None:
    """An action that does not fit the schema is the model's mistake, and the model is told so."""
    turns = iter([calling("step", x="many"), calling("other"), calling("step", x=3, y=4)])
    rows = [{"prompt": "Add up.", "reset": {"start": 10}}]
    outcomes, asked = await play(folder, lambda _: next(turns), rows, url=f"{server}/sums", reward="last")
    assert outcomes == [Outcome(17.0, detail="1 step")]
    told = [message["content"] for message in asked[-1][1]["messages"] if message["role"] == "tool"]
    assert told == [
        "error: the environment does not accept this action: x: Input should be a valid integer, unable to parse "
        "string as an integer; y: Field required",
        "error: there is no tool 'other'; there is step",
    ]
    assert asked[0][1]["messages"] == [{"role": "user", "content": 'Add up.\n\n{"total": 10}'}]


@pytest.mark.parametrize(("mood", "problem"), [("raise", "no luck"), ("unrewarded", "write rollout.reward: none")])
async def test_a_broken_environment_is_no_reward(folder: Path, server: str, mood: str, problem: str) -> None:
    rows = [{"prompt": "go", "reset": {"mood": mood}}]
    (outcome,), _ = await play(folder, lambda _: calling("step", x=1, y=1), rows, url=f"{server}/sums")
    assert outcome.reward is None
    assert problem in outcome.failure


async def test_another_server_takes_the_next_episodes(folder: Path) -> None:
    programs = OutsidePrograms(outside(folder, app="light:app", action="x"), SECONDS, SECONDS, 3)
    await programs.start()
    with stub(lambda body: {"content": body["messages"][0]["content"]}) as (url, _):
        ended = [(await programs.run({"prompt": says}, url, "key")).outcome for says in ("1", "die", "2", "2")]
    await programs.close()
    first, died, _, last = (each.reward for each in ended)  # the third may begin before the end is noticed
    assert (first, died, last) == (1.0, None, 2.0)
    assert ended[1].failure


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"app": "no_such_module:app"}, "ended with exit code 3: .*no_such_module"),
        ({"app": "light:nothing"}, "ended with exit code 3: .*nothing"),
        ({"url": "/sums", "action": "z"}, "no field 'z'; they have x, y"),
        ({"url": "/sums", "action": "x"}, "its actions need y too: remove action"),
        ({"url": "/sums", "observation": "z"}, "no field 'z'; they have total"),
        ({"url": "http://127.0.0.1:9"}, "rollout.url: .*refused"),
    ],
)
async def test_what_cannot_be_is_said_with_what_to_write(
    folder: Path, server: str, fields: dict[str, Any], problem: str
) -> None:
    if fields.get("url", "").startswith("/"):
        fields = {**fields, "url": server + fields["url"]}
    with pytest.raises(JobError, match=problem):
        await asyncio.to_thread(check_outside, outside(folder, **fields), SECONDS)


async def test_tasks_become_data(folder: Path, server: str) -> None:
    rows = await asyncio.to_thread(rows_of, outside(folder, url=f"{server}/sums"), 10, SECONDS)
    assert rows == [
        {"prompt": f'{{"total": {start}}}', "reset": {"split": "train", "index": at}}
        for at, start in enumerate((20, 30))
    ]
    with pytest.raises(JobError, match="write the data by hand"):
        await asyncio.to_thread(rows_of, outside(folder, url=f"{server}/tools"), 10, SECONDS)


OTHERS = """
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Tools(MCPEnvironment):
    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def double(x: int) -> str:
            "Double a number."
            return str(2 * x)

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()

    async def step_async(self, action, timeout_s=None, **kwargs):
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        seen.reward = 0.5 if isinstance(action, CallToolAction) else None
        return seen

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()


class Pair(Action):
    x: int
    y: int


class Total(Observation):
    total: int


class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, start=0, mood="", split="", index=0, **kwargs):
        self.total, self.mood = (20, 30)[index] if split else start, mood
        return Total(total=self.total)

    def step(self, action, timeout_s=None, **kwargs):
        if self.mood == "raise":
            raise ValueError("no luck")
        self.total += action.x + action.y
        return Total(total=self.total, done=True, reward=None if self.mood else self.total)

    def list_splits(self):
        return ["train", "test"]

    def num_tasks(self, split):
        return 2

    @property
    def state(self):
        return State()


tools = create_app(Tools, CallToolAction, CallToolObservation)
sums = create_app(Sums, Pair, Total, max_concurrent_envs=8)
app = FastAPI()
app.mount("/tools", tools)
app.mount("/sums", sums)
"""

LIGHT = """
# What this test needs of a server, without the seconds that OpenEnv takes to import.
import os

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute


async def schema(request):
    return JSONResponse({"action": {"properties": {"x": {}}}, "observation": {}})


async def play(socket):
    await socket.accept()
    while True:
        asked = await socket.receive_json()
        said = asked["data"].get("x")
        if said == "die":
            os._exit(3)
        seen = {"observation": {}, "reward": said and float(said), "done": bool(said)}
        await socket.send_json({"type": "observation", "data": seen})


app = Starlette(routes=[Route("/schema", schema), WebSocketRoute("/ws", play)])
"""
