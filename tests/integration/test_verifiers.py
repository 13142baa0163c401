"""verifiers as it comes from the package index, in an environment of its own: docs/environments.md in practice."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from environments.outside.interpreter import outside_of, rows_of
from environments.outside.programs import OutsidePrograms
from environments.records import Outcome
from services.runs.run import Result
from services.stack.ephemeral import Stack
from tests.integration.environment_pages import section, volley, write_small
from tests.integration.jobs import run_job
from tests.integration.openai_stub import calling, stub
from volley.rollout import VerifiersRollout

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's job, made small, in the page's environment, beside the page's taskset."""
    made = tmp_path_factory.mktemp("verifiers")
    write_small(made, "verifiers", 10)
    return made


@pytest.fixture(scope="module")
async def trained(stack: Stack, folder: Path) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return await run_job(stack, folder, yaml.safe_load((folder / "job.yaml").read_text()))


def test_the_taskset_becomes_data(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "letters.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["Say apple.", "Say eel.", "Say igloo.", "Say oak."]
    assert [row["task"]["word"] for row in rows] == ["apple", "eel", "igloo", "oak"]


async def test_check_accepts_the_job(folder: Path) -> None:
    assert [line.split()[1] for line in section("verifiers")[2].text.splitlines()] == ["env", "env", "check", "run"]
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
    with stub(doubling) as (url, asked):
        ended = await asyncio.gather(*(programs.run(row, url, f"key-{number}") for number, row in enumerate(rows)))
    await programs.close()
    assert [each.outcome for each in ended] == [Outcome(1.0, detail="doubled 1")] * 2
    for number in range(2):
        first, second = (body for key, body in asked if key == f"Bearer key-{number}")
        assert second["messages"][0] == first["messages"][0]
        assert second["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "4"}
        assert "temperature" not in first


def doubling(body: dict[str, Any]) -> dict[str, Any]:
    """Call the tool once, and say what it answered."""
    if body["messages"][-1]["role"] == "user":
        return calling(body["tools"][0]["function"]["name"], x=2)
    return {"content": f"it is {body['messages'][-1]['content']}"}


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
