"""Whole runs whose samples are made by programs, on the real stack; one of them is the example of docs/agents.md."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.recording.display import Display
from services.runs.run import Result, prepare, run_on
from services.stack.ephemeral import Stack
from services.store.desired import change_in_folder
from services.store.folder import RunFolder
from services.store.redis import Store
from tests.chat_models import chat_tokenizer
from tests.integration.jobs import run_job
from tests.models import tiny_llama
from tests.pages import ROOT, blocks
from volley.job import JOB
from volley.state import Observed

pytestmark = pytest.mark.integration

VOLLEY = str(Path(sys.executable).parent / "volley")
TROUBLES = ("early", "raise", "hang", "kill", "rewrite", "defer", "linger")
GROUPS = 24  # every prompt twice


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_llama(folder / "model", tokenizer=chat_tokenizer())
    (folder / "flags").mkdir()
    rows: list[dict[str, Any]] = [
        {"prompt": f"say {word}", "answer": "x"} for word in ("one", "two", "three", "four", "five")
    ]
    rows += [{"prompt": f"then {does}", "answer": "x", "does": does} for does in TROUBLES]
    fails = {"prompt": "say nothing", "answer": "x", "does": "fail"}
    for name, chosen in (("train", rows), ("heldout", [*rows[:3], fails])):
        lines = [json.dumps({**row, "flags": str(folder / "flags")}) + "\n" for row in chosen]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
async def trained(stack: Stack, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    job = {
        "kind": "rl",
        "name": "vowels",
        "model": {"path": str(inputs / "model")},
        "data": {"path": str(inputs / "train.jsonl")},
        "rollout": {"kind": "program", "target": "tests.integration.agents:two_calls", "timeout_s": 10, "max_calls": 4},
        "scorer": {"kind": "exact"},
        "objective": {"kind": "mean"},
        "steps": 4,
        "prompts_per_step": GROUPS // 4,
        "max_lag": 0,
        "sampling": {"n": 4, "max_tokens": 40},
        "optimizer": {"lr": 1e-4},
        "actors": {"max_num_seqs": 32, "kv_cache_gb": 0.1},
        "environment_workers": {"count": 2, "episodes": 16},
        "evaluation": {
            "data": {"path": str(inputs / "heldout.jsonl")},
            "sampling": {"n": 4, "max_tokens": 40},
            "ks": [1, 4],
        },
        "samples_kept": 1000,
    }
    return await run_job(stack, tmp_path_factory.mktemp("vowels"), job)


async def test_log_probs_of_all_calls_are_the_learners(trained: Result) -> None:
    rows = trained.folder.read("metrics")
    assert len(rows) == 4
    for row in rows:
        assert row["logprob_mismatch_max"] < 1e-4
        assert row["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert row["lag_histogram"] == {"0": row["lag_histogram"]["0"]}
        assert 1.8 <= row["turns_mean"] <= 2.0


async def test_episodes_have_metrics_and_a_lane(trained: Result) -> None:
    rows = trained.folder.read("metrics")
    for row in rows:
        assert 0 < row["environment_busy_share"] <= 1
        assert 0 <= row["seconds_environment_mean"] <= row["seconds_episode_mean"]
        assert 1 <= row["calls_mean"] <= 2
    count = sum(row["episodes_per_second"] * row["seconds_step"] for row in rows)
    assert count >= 4 * GROUPS, "groups of 4, and the first evaluation"
    for end in ("raised", "timeout", "rewritten"):
        assert any(row.get(f"episodes_{end}", 0) > 0 for row in rows)
    assert not any("episodes_lost" in row for row in rows), "the killed worker's episodes were repeated"


async def test_every_group_ends_once(trained: Result) -> None:
    last = trained.folder.read("metrics")[-1]
    counts = {name: last[f"groups_{name}"] for name in ("admitted", "trained", "dropped", "in_flight")}
    assert counts == {"admitted": GROUPS, "trained": GROUPS, "dropped": 0, "in_flight": 0}
    assert [row["end"] for row in trained.folder.read("ledger")] == ["trained"] * GROUPS


async def test_what_fails_leaves_its_group_and_nothing_else(trained: Result, inputs: Path) -> None:
    """Four episodes were lost to two raises, a hang and a rewritten history; the killed worker's were repeated.

    What another did after it had returned counts for nothing.
    """
    assert (inputs / "flags" / "lingered").read_text() == "401"
    unscored = sum(row.get("verdict_infra_error", 0.0) * GROUPS for row in trained.folder.read("metrics"))
    assert unscored == pytest.approx(4)
    deaths = [row for row in trained.folder.read("events") if row["kind"] == "environment_worker_died"]
    assert len(deaths) == 1
    assert "environment-" in deaths[0]["problem"]
    (troubles,) = [row for row in trained.folder.read("events") if row["kind"] == "episode_troubles"]
    assert troubles["rewrites"] == 1
    assert troubles["first_rewrite"].startswith("message 1 was assistant")
    assert "something else" in troubles["first_rewrite"]


async def test_samples_show_their_calls(trained: Result) -> None:
    rows = trained.folder.read("samples")
    assert rows
    for row in rows:
        if row["status"] == "infra_error":
            assert row["reward"] is None
            assert any(each in row["detail"] for each in ("luck", "timeout_s", "rewritten"))
        else:
            first, second = row["calls"]
            assert "<|im_start|>user\n" + row["prompt"] in first["context"]
            assert "<|im_start|>user\n" + row["prompt"] + " again" in second["context"]
            assert (second["answer"], first["tokens"] + second["tokens"]) == (row["sample"], row["tokens"])
    assert {row["status"] for row in rows} <= {"infra_error", "wrong_answer", "passed"}


async def test_evaluations_run_the_program_too(trained: Result) -> None:
    before, after = trained.folder.read("evaluations")
    assert (before["version"], after["version"]) == (0, 4)
    for row in (before, after):
        assert (row["prompts"], row["unscored"]) == (4, 4)
        assert [(each["k"], each["left_out"]) for each in row["estimates"]] == [(1, 1), (4, 1)]
    problems = [row["problem"] for row in trained.folder.read("events") if row["kind"] == "trouble"]
    assert [
        each for each in problems if "evaluation of version 4: 4 of 16 samples" in each and "never any luck" in each
    ]


async def test_a_plain_function_in_an_eval_job_without_a_scorer(stack: Stack, inputs: Path, tmp_path: Path) -> None:
    job = {
        "kind": "eval",
        "name": "letters",
        "model": {"path": str(inputs / "model")},
        "data": {"path": str(inputs / "heldout.jsonl")},
        "rollout": {"kind": "program", "target": "tests.integration.agents:one_call", "timeout_s": 60},
        "sampling": {"n": 8, "max_tokens": 40},
        "ks": [1, 8],
        "actors": {"max_num_seqs": 32, "kv_cache_gb": 0.1},
    }
    done = await run_job(stack, tmp_path, job)
    rows = done.folder.read("samples")
    rewards = [row["reward"] for row in rows if row["prompt"] != "say nothing"]
    assert (len(rows), len(rewards)) == (32, 24)
    assert all(row["reward"] == float("e" in row["sample"]) for row in rows if row["reward"] is not None)
    (evaluation,) = done.folder.read("evaluations")
    assert evaluation["unscored"] == 8
    assert evaluation["estimates"][0]["mean"] == pytest.approx(sum(rewards) / 24)
    assert evaluation["calls_mean"] == sum(len(row["calls"]) for row in rows) / 32


async def test_rejection_sampling_trains_on_episodes_as_they_were_recorded(
    stack: Stack, inputs: Path, tmp_path: Path
) -> None:
    job = {
        "kind": "rft",
        "name": "kept-vowels",
        "model": {"path": str(inputs / "model")},
        "data": {"path": str(inputs / "heldout.jsonl")},
        "rollout": {"kind": "program", "target": "tests.integration.agents:Caller", "timeout_s": 30, "max_calls": 4},
        "sampling": {"n": 8, "max_tokens": 40},
        "correct_from": 0.05,
        "steps": 3,
        "rows_per_step": 4,
        "actors": {"max_num_seqs": 32, "kv_cache_gb": 0.1},
    }
    done = await run_job(stack, tmp_path, job)
    rows, kept = done.folder.read("samples"), done.folder.read("kept")
    assert sum(row["reward"] is None for row in rows) == 8, "the prompt whose program always fails"
    assert kept
    assert all(row["reward"] >= 0.05 for row in kept)
    assert {len(row["calls"]) for row in kept} == {2}
    sampled = {tuple(call["tokens"] for call in row["calls"]): row for row in rows if row["reward"] is not None}
    for row in sampled.values():
        assert len(row["token_ids"]) == sum(call["tokens"] for call in row["calls"])
        assert len(row["prompt_ids"]) + len(row["observed_ids"]) == sum(call["observed"] for call in row["calls"])
    assert len(done.folder.read("metrics")) == 3


async def test_environment_workers_of_a_live_run_are_scaled_and_survive(
    stack: Stack, inputs: Path, tmp_path: Path
) -> None:
    tree = {
        "kind": "rl",
        "name": "scaled",
        "model": {"path": str(inputs / "model")},
        "data": {"path": str(inputs / "train.jsonl")},
        "rollout": {"kind": "program", "target": "tests.integration.agents:one_call", "timeout_s": 60},
        "objective": {"kind": "mean"},
        "steps": 5000,
        "prompts_per_step": 2,
        "sampling": {"n": 2, "max_tokens": 40},
        "optimizer": {"lr": 1e-6},
        "actors": {"max_num_seqs": 32, "kv_cache_gb": 0.1},
    }
    job = JOB.validate_python(tree)
    folder = RunFolder.create(tmp_path / "runs", job)
    running = asyncio.create_task(run_on(stack, prepare(job), folder, Display(quiet=True)))

    async def until(kind: str, **details: Any) -> None:
        while not any(details.items() <= row.items() for row in folder.read("events") if row["kind"] == kind):
            assert not running.done(), await running
            await asyncio.sleep(0.3)

    try:
        await until("started")
        change_in_folder(folder, job, {"environment_workers": 2})
        await until("scaled", role="environment_workers", count=2)
        async with Store(stack.redis_url) as store:

            async def both(without: int = 0) -> Observed:
                """The run's state once it has two workers, none of which is the process ``without``."""
                while (seen := await store.observed(folder.run_id)).environment_workers != 2 or without in {
                    each.pid for each in seen.workers
                }:
                    assert not running.done(), await running
                    await asyncio.sleep(0.3)
                return seen

            seen = await both()
            assert seen.environment_workers_wanted == 2
            workers = [each for each in seen.workers if each.role == "environment_worker"]
            assert [each.name for each in workers] == ["environment-0", "environment-1"]
            os.kill(workers[1].pid, signal.SIGKILL)
            await until("environment_worker_died")
            await both(without=workers[1].pid)
        change_in_folder(folder, job, {"stopped": True})
        assert (await running).state == "stopped"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_example_of_the_page(
    stack: Stack, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """agents.md with its own rows, a smaller model under the name of the page's, and two steps."""
    fetch, rows, program, job, commands, solver, *_ = blocks(ROOT / "docs" / "agents.md")
    tree = yaml.safe_load(job.text)
    assert fetch.text == f"volley model fetch {tree['model']['path']}\n"
    (tmp_path / tree["model"]["path"]).symlink_to(inputs / "model")
    (tmp_path / "agent.py").write_text(program.text + solver.text)
    (tmp_path / "train.jsonl").write_text(rows.text)
    monkeypatch.syspath_prepend(tmp_path)
    tree |= {"model": {"path": str(inputs / "model")}, "data": {"path": str(tmp_path / "train.jsonl")}}
    tree |= {"steps": 2, "sampling": {"n": 4, "max_tokens": 60}, "actors": {"max_num_seqs": 32, "kv_cache_gb": 0.1}}
    done = await run_job(stack, tmp_path, tree)
    last = done.folder.read("metrics")[-1]
    assert (last["groups_trained"], last["groups_dropped"]) == (6, 0)
    file = str(tmp_path / "as-written.yaml")
    (tmp_path / "as-written.yaml").write_text(job.text)
    assert commands.text.splitlines() == ["volley check job.yaml", "volley run job.yaml"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    checked = await asyncio.to_thread(subprocess.run, [VOLLEY, "check", file], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "3 calls of the model" in checked.stdout
    with_class = [VOLLEY, "check", file, "--set", "rollout.target=agent:Solver", "--answer", "it is Paris"]
    checked = await asyncio.to_thread(subprocess.run, with_class, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "1 call of the model" in checked.stdout
    assert "reward 1 (passed)" in checked.stdout
