"""verifiers as it comes from the package index, in an environment of its own: docs/environments.md in practice."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from environments.outside.interpreter import outside_of, rows_of
from environments.outside.programs import OutsidePrograms
from environments.records import Outcome
from services.runs.run import Result
from services.stack.ephemeral import Stack
from tests.chat_models import chat_tokenizer
from tests.integration.jobs import run_job
from tests.models import tiny_llama
from tests.pages import ROOT, Block, blocks
from volley.rollout import VerifiersRollout

pytestmark = pytest.mark.integration

VOLLEY = str(Path(sys.executable).parent / "volley")


@pytest.fixture(scope="module")
def page() -> list[Block]:
    """The blocks of the section on verifiers: a taskset, a job, commands."""
    return list(blocks(ROOT / "docs" / "environments.md"))[:3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, page: list[Block]) -> Path:
    """The page's job with a tiny model and two steps, in the page's environment, beside the page's taskset."""
    made = tmp_path_factory.mktemp("verifiers")
    tiny_llama(made / "model", tokenizer=chat_tokenizer())
    taskset, job, commands = page
    (made / "letters.py").write_text(taskset.text)
    create = next(line for line in commands.text.splitlines() if line.startswith("volley env create"))
    volley(made, create.partition("#")[0])
    tree: dict[str, Any] = yaml.safe_load(job.text)
    tree["rollout"]["python"] = tree["rollout"]["python"].replace("~/.volley", str(made / "home"))
    tree |= {"model": {"path": str(made / "model")}, "data": {"path": str(made / "letters.jsonl")}}
    tree |= {"steps": 2, "prompts_per_step": 2, "max_lag": 0, "sampling": {"n": 4, "max_tokens": 200}}
    tree |= {"actors": {"max_num_seqs": 32, "kv_cache_gb": 0.1}, "samples_kept": 100}
    tree["environment_workers"] = {"episodes": 16, "start_deadline_s": 300}
    (made / "job.yaml").write_text(yaml.safe_dump(tree))
    volley(made, "volley env data job.yaml")
    return made


def volley(folder: Path, command: str) -> str:
    """Run a command of the page."""
    words = [VOLLEY, *command.replace('"', "").split()[1:]]
    home = {"VOLLEY_HOME": str(folder / "home"), "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run(words, cwd=folder, env={**os.environ, **home}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
async def trained(stack: Stack, folder: Path) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return await run_job(stack, folder, yaml.safe_load((folder / "job.yaml").read_text()))


def test_the_taskset_becomes_data(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "letters.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["Say apple.", "Say eel.", "Say igloo.", "Say oak."]
    assert [row["task"]["word"] for row in rows] == ["apple", "eel", "igloo", "oak"]


async def test_check_accepts_the_job(folder: Path, page: list[Block]) -> None:
    assert [line.split()[1] for line in page[2].text.splitlines()] == ["env", "env", "check", "run"]
    assert "letters" in await asyncio.to_thread(volley, folder, "volley check job.yaml")


async def test_rewards_are_the_rubrics_and_log_probs_the_learners(trained: Result) -> None:
    last = trained.folder.read("metrics")[-1]
    assert (last["groups_trained"], last["groups_dropped"]) == (4, 0)
    assert all(row["logprob_mismatch_max"] < 1e-4 for row in trained.folder.read("metrics"))
    rows = trained.folder.read("samples")
    ended = [row for row in rows if row["status"] != "no_answer"]
    assert ended
    for row in ended:
        word, said = row["prompt"].removeprefix("Say "), row["sample"].removesuffix("<|im_end|>")
        assert row["reward"] == float(word[0] in said)
        assert row["detail"] == f"first_letter {row['reward']:g}"
    assert all(row["reward"] == 0.0 for row in rows if row not in ended)


async def test_a_shared_tool_is_called_and_its_answer_sent_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stub of the gateway that calls the tool once and then answers."""
    (folder / "sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(folder)
    python = yaml.safe_load((folder / "job.yaml").read_text())["rollout"]["python"]
    outside = outside_of(VerifiersRollout(python=python, taskset={"id": "sums"}))
    assert outside is not None
    rows = await asyncio.to_thread(rows_of, outside, 10, 300.0)
    programs = OutsidePrograms(outside, 300.0, 300.0, 1)
    await programs.start()
    with stub() as (url, asked):
        ended = await asyncio.gather(*(programs.run(row, url, f"key-{number}") for number, row in enumerate(rows)))
    await programs.close()
    assert [each.outcome for each in ended] == [Outcome(1.0, detail="doubled 1")] * 2
    for number in range(2):
        first, second = (body for key, body in asked if key == f"Bearer key-{number}")
        assert second["messages"][0] == first["messages"][0]
        assert second["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "4"}
        assert "temperature" not in first


SUMS = """
import verifiers.v1 as vf

class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def double(self, x: int) -> str:
        '''Double a number.'''
        return str(2 * x)

class SumsTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def doubled(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "it is 4")

class Sums(vf.Taskset[SumsTask]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.SharedToolsetConfig())]

    def load(self):
        for number in range(2):
            yield SumsTask(vf.TaskData(prompt=f"{number}: double 2"), self.config.task)

__all__ = ["Sums"]
if __name__ == "__main__":
    Calculator.run()
"""


@contextlib.contextmanager
def stub() -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """A server's URL, and the keys and bodies of the calls it got."""
    asked: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.headers["authorization"], body))
            message: dict[str, Any] = {"role": "assistant", "content": f"it is {body['messages'][-1]['content']}"}
            if body["messages"][-1]["role"] == "user":
                function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"x": 2}'}
                call = {"id": "c1", "type": "function", "function": function}
                message = {"role": "assistant", "content": "", "tool_calls": [call]}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            head = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
            answer = json.dumps({**head, "choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()
