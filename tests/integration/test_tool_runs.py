"""Whole runs in which a model that has learned its calls by heart uses tools; one job is that of docs/agents.md."""

import contextlib
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from environments.tools.functions import load_function
from environments.tools.python import schema_of
from services.runs.episode_trial import try_program
from services.runs.run import Result
from services.stack.ephemeral import Stack
from tests.integration.jobs import run_job
from tests.pages import ROOT, blocks
from tests.taught import taught
from volley.job import JOB, EvalJob
from volley.records import Prompt
from volley.rollout import FunctionTool, PythonTool

pytestmark = pytest.mark.integration

SAID = {  # what the model has learned: its call, what the tool answers, and its own answer
    "what is 3 * 4?": (("python", {"code": "print(3 * 4)"}), "12", "12"),
    "what is 17 * 23?": (("python", {"code": "print(17 * 23)"}), "391", "391"),
    "what colour is an apple?": (("colour", {"thing": "apple"}), "red", "red"),
    "what colour is a brick?": (("colour", {"thing": "brick"}), "error: KeyError: 'brick'", "unknown"),
    "what colour is a ghost?": (("colour", {"thing": "ghost"}), "", ""),
}
PYTHON = PythonTool(state="episode", slots=16)
RUN: dict[str, Any] = {
    "actors": {"max_num_seqs": 32, "kv_cache_gb": 0.1},
    "environment_workers": {"count": 1, "episodes": 16},
}


def conversation(prompt: str) -> list[dict[str, Any]]:
    (name, arguments), answer, last = SAID[prompt]
    call = {"id": "c00000000", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c00000000", "content": answer},
        {"role": "assistant", "content": last},
    ]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    colour = load_function(FunctionTool(target="tests.integration.tool_functions:colour"))
    schemas: list[Mapping[str, Any]] = [schema_of(PYTHON), colour.schema]
    taught(folder / "model", [conversation(prompt) for prompt in SAID], schemas)
    rows = [{"prompt": prompt, "answer": last} for prompt, (_, _, last) in SAID.items()]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
async def trained(stack: Stack, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    job = {
        "kind": "rl",
        "name": "tools",
        "model": {"path": str(inputs / "model")},
        "data": {"path": str(inputs / "train.jsonl")},
        "rollout": {
            "kind": "tools",
            "tools": [
                PYTHON.model_dump(mode="json"),
                {"kind": "function", "target": "tests.integration.tool_functions:colour"},
            ],
            "max_calls": 4,
            "timeout_s": 60,
        },
        "gateway": {"tool_parser": "hermes"},
        "scorer": {"kind": "exact"},
        "objective": {"kind": "mean"},
        "steps": 2,
        "prompts_per_step": 5,
        "max_lag": 0,
        "sampling": {"n": 4, "max_tokens": 200},
        "optimizer": {"lr": 1e-5},
        "infra_errors": {"max_share": 0.9},
        "samples_kept": 1000,
        **RUN,
    }
    return await run_job(stack, tmp_path_factory.mktemp("tools"), job)


def contexts(row: dict[str, Any]) -> str:
    """What the model was sent in all calls of an episode."""
    return "".join(call["context"] for call in row["calls"])


async def test_the_tools_answer_the_model(trained: Result) -> None:
    rows = trained.folder.read("samples")
    by_prompt = {prompt: [row for row in rows if row["prompt"] == prompt] for prompt in SAID}
    for prompt, answer in ((prompt, said[1]) for prompt, said in SAID.items() if said[1]):
        seen = [row for row in by_prompt[prompt] if f"<|im_start|>tool\n{answer}<|im_end|>" in contexts(row)]
        assert seen, prompt
        assert any(row["status"] == "passed" for row in seen), prompt


def asked(row: dict[str, Any]) -> bool:
    """Whether the sample calls the tool with the ghost, in a form that a parser takes for a call."""
    for body in re.findall(r"<tool_call>(.*?)</tool_call>", row["sample"], re.DOTALL):
        with contextlib.suppress(ValueError):
            call = json.loads(body)
            if isinstance(call, dict) and (call.get("name"), call.get("arguments")) == ("colour", {"thing": "ghost"}):
                return True
    return False


async def test_a_tool_that_is_unavailable_is_no_reward_of_zero(trained: Result) -> None:
    """Groups of which too few samples are left are dropped; in the others, the lost ones have no reward."""
    dropped = [row["end"] for row in trained.folder.read("ledger") if row["end"] != "trained"]
    ghosts = [row for row in trained.folder.read("samples") if row["prompt"] == "what colour is a ghost?"]
    lost = [row for row in ghosts if row["status"] == "infra_error"]
    assert dropped or lost
    assert all("of 4 samples could be scored" in end for end in dropped)
    for row in lost:
        assert row["reward"] is None
        assert "the catalogue is down" in row["detail"]
    scored = [row for row in ghosts if row["status"] != "infra_error"]
    assert not any(asked(row) for row in scored), "the tool was called, and its failure became a reward"


async def test_log_probs_across_calls_are_the_learners(trained: Result) -> None:
    rows = trained.folder.read("metrics")
    assert len(rows) == 2
    for row in rows:
        assert row["logprob_mismatch_max"] < 1e-4
        assert row["turns_mean"] > 1.2, "many episodes have several calls"
        assert 0 < row["tool_errors_mean"] < 1, "the brick has no colour"
    ends = [row["end"] for row in trained.folder.read("ledger")]
    assert ends.count("trained") == 10
    assert {end.partition(":")[0] for end in ends} <= {"trained", "dropped"}  # of the unavailable tool too few are left


def test_check_makes_the_call_of_an_answer(inputs: Path) -> None:
    """The stub repeats its call until the episode has no calls left; its own sentence has none."""
    job = JOB.validate_python(
        {
            **{"kind": "eval", "name": "check", "ks": [1], "sampling": {"n": 1, "max_tokens": 500}},
            **{"model": {"path": str(inputs / "model")}, "data": {"path": str(inputs / "train.jsonl")}},
            "rollout": {
                **{"kind": "tools", "max_calls": 2},
                "tools": [{"kind": "function", "target": "tests.integration.tool_functions:colour"}],
            },
            **{"gateway": {"tool_parser": "hermes"}, "scorer": {"kind": "exact"}},
        }
    )
    assert isinstance(job, EvalJob)
    assert job.rollout is not None
    prompt = Prompt("p", "what colour is an apple?")
    call = '<tool_call>\n{"name": "colour", "arguments": {"thing": "apple"}}\n</tool_call>'
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's import warns of many things
        made = try_program(job, job.rollout, prompt, length=900, says=call)
    assert (made.status, len(made.calls)) == ("no_answer", 2)
    assert "<|im_start|>tool\nred<|im_end|>" in made.calls[1].context
    assert len(try_program(job, job.rollout, prompt, length=900).calls) == 1


async def test_the_job_of_the_page(stack: Stack, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools of agents.md load and run, with a smaller model."""
    functions, part = (
        block for block in blocks(ROOT / "docs" / "agents.md") if Path(block.what).name == Path(__file__).name
    )
    (tmp_path / "my_tools.py").write_text(functions.text)
    monkeypatch.syspath_prepend(tmp_path)
    job = {
        "kind": "eval",
        "name": "page",
        "model": {"path": str(inputs / "model")},
        "data": {"path": str(inputs / "train.jsonl")},
        "sampling": {"n": 2, "max_tokens": 100},
        "ks": [1, 2],
        **RUN,
        **yaml.safe_load(part.text),
    }
    done = await run_job(stack, tmp_path, job)
    assert len(done.folder.read("samples")) == 10
