"""Whole runs on the real stack: Ray, vLLM, DeepSpeed and Redis."""

import json
from pathlib import Path

import numpy as np
import pytest

from services.runs.run import Result
from services.stack.ephemeral import Stack
from tests.integration.jobs import rl_job, run_job, write_inputs
from tests.models import tiny_llama

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
async def synchronous(stack: Stack, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return await run_job(stack, tmp_path_factory.mktemp("synchronous"), rl_job(inputs))


async def test_reward_rises(synchronous: Result) -> None:
    rows = synchronous.folder.read("metrics")
    assert len(rows) == 16
    assert np.mean([row["reward_mean"] for row in rows[-3:]]) > np.mean([row["reward_mean"] for row in rows[:3]]) + 0.15
    before, after = synchronous.folder.read("evaluations")
    assert (before["version"], after["version"]) == (0, 16)
    assert after["estimates"][0]["mean"] > before["estimates"][0]["mean"] + 0.15


async def test_without_lag_every_update_is_on_policy(synchronous: Result) -> None:
    for row in synchronous.folder.read("metrics"):
        assert row["lag_histogram"] == {"0": row["lag_histogram"]["0"]}
        assert row["logprob_mismatch_max"] < 1e-4
        assert row["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert row["correction_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["clip_fraction"] == 0.0


async def test_the_ledger_is_exact(synchronous: Result) -> None:
    last = synchronous.folder.read("metrics")[-1]
    counts = {name: last[f"groups_{name}"] for name in ("admitted", "trained", "dropped", "in_flight")}
    assert counts == {"admitted": 128, "trained": 128, "dropped": 0, "in_flight": 0}


async def test_the_run_folder_is_complete(synchronous: Result) -> None:
    folder = synchronous.folder
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["state"] == "done"
    took = summary["start_seconds"]
    assert took.keys() == {"actors", "reward_workers", "learner"}
    assert all(0 < seconds < summary["seconds"] for seconds in took.values())
    assert (folder.plots / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in folder.logs.iterdir()} >= {"actor-0.log", "learner-0.log", "reward-0.log"}
    assert list(folder.checkpoints.iterdir())
    sample = folder.read("samples")[0]
    assert {"prompt", "sample", "status", "reward", "advantage", "versions"} <= sample.keys()


async def test_the_exported_model_is_the_evaluated_one(synchronous: Result, inputs: Path) -> None:
    """Plain transformers loads it, and its samples have as many sevens as those of the last evaluation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(synchronous.folder.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(synchronous.folder.model)
    torch.manual_seed(0)
    ids = tokenizer("3 4=", return_tensors="pt").input_ids.repeat(512, 1)
    out = model.generate(ids, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=8, pad_token_id=0)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    share = np.mean([text.count("7") / 8 for text in texts])
    last = synchronous.folder.read("evaluations")[-1]["estimates"][0]["mean"]
    assert share == pytest.approx(last, abs=0.1)


@pytest.mark.parametrize("transport", ["object_store", "shared_memory"])
async def test_the_same_seed_without_lag_gives_the_same_run_also_if_the_roles_take_turns(
    stack: Stack, inputs: Path, synchronous: Result, tmp_path: Path, transport: str
) -> None:
    changes = {
        "steps": 4,
        "evaluation": None,
        "placement": "colocated",
        "broadcast": {"transport": transport},
        "checkpoint": {"every": 2},
    }
    again = await run_job(stack, tmp_path, {**rl_job(inputs), **changes})
    assert all(row["seconds_hand_over"] > 0 for row in again.folder.read("metrics"))
    first = [row["reward_mean"] for row in synchronous.folder.read("metrics")[:4]]
    assert [row["reward_mean"] for row in again.folder.read("metrics")] == pytest.approx(first, abs=1e-9)


async def test_two_processes_per_role_with_lag(stack: Stack, inputs: Path, tmp_path: Path) -> None:
    job = rl_job(
        inputs,
        max_lag=2,
        actors={"count": 2, "max_num_seqs": 64},
        reward_workers={"count": 2},
        learner={"ranks": 2, "verify_weights": True},
        sampling={"n": 8, "max_tokens": 8},
        evaluation=None,
    )
    rows = (await run_job(stack, tmp_path, job)).folder.read("metrics")
    lags = {int(lag) for row in rows for lag in row["lag_histogram"]}
    assert max(lags) <= 2
    assert max(lags) > 0
    assert rows[-1]["groups_trained"] == 128
    assert rows[-1]["reward_mean"] > rows[0]["reward_mean"]


async def test_failed_samples_continue_after_their_observation(stack: Stack, inputs: Path, tmp_path: Path) -> None:
    """The learner's log-probs of every turn equal the engine's, so both have exactly the same context."""
    job = rl_job(
        inputs,
        steps=3,
        turns={"max_count": 3, "observation": "no {{ turn }}: {{ verdict.status }}, try again:"},
        sampling={"n": 8, "max_tokens": 24},  # long enough that some samples end
        samples_kept=64,
    )
    job["model"] = {"path": str(tiny_llama(tmp_path / "model", max_position_embeddings=2048))}
    job["evaluation"] = {**job["evaluation"], "sampling": {"n": 8, "max_tokens": 24}}
    folder = (await run_job(stack, tmp_path, job)).folder
    rows = folder.read("metrics")
    assert [row["groups_trained"] for row in rows] == [8, 16, 24]
    for row in rows:
        assert row["turns_mean"] > 1
        assert row["logprob_mismatch_max"] < 1e-4
    went_on = [sample for sample in folder.read("samples") if sample.get("earlier")]
    assert went_on
    for sample in went_on:
        assert "no 1: wrong_answer, try again:" in sample["earlier"]
        assert "7" not in sample["earlier"]  # a seven would have passed
