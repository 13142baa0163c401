"""A whole rft run on the real stack, and one that resumes after an interruption."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.recording.display import Display
from services.runs.run import Result, prepare, run_alone
from services.store.folder import RunFolder
from tests.integration.jobs import rl_job, write_inputs
from volley.job import JOB

pytestmark = pytest.mark.integration

GOOD = 0.25  # two sevens in eight characters, which an untrained model sometimes writes


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    shared = ("name", "seed", "model", "data", "scorer", "actors", "optimizer")
    return {
        **{key: value for key, value in rl_job(folder).items() if key in shared},
        "kind": "rft",
        "sampling": {"n": 32, "max_tokens": 8, "seeded": True},
        "keep": 3,
        "correct_from": GOOD,
        "steps": 20,
        "rows_per_step": 32,
        "checkpoint": {"every": 10},
    }


@pytest.fixture(scope="module")
async def done(tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Result:
    job = JOB.validate_python(tree)
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), job)
    return await run_alone(prepare(job), folder, Display(quiet=True))


def share_of_sevens(model_folder: Path) -> float:
    """The mean share of sevens in samples drawn with plain transformers, over several prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    torch.manual_seed(0)
    ids = tokenizer(["3 4=", "1 2=", "8 1=", "5 3="], return_tensors="pt").input_ids.repeat(128, 1)
    out = model.generate(ids, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=8, pad_token_id=0)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return float(np.mean([text.count("7") / 8 for text in texts]))


async def test_the_trained_model_gets_more_reward(done: Result, tree: dict[str, Any]) -> None:
    assert done.model is not None
    assert share_of_sevens(done.model) > share_of_sevens(Path(tree["model"]["path"])) + 0.1
    losses = [row["loss"] for row in done.folder.read("metrics")]
    assert len(losses) == 20
    assert losses[-1] < losses[0]


async def test_kept_samples_are_correct_distinct_and_counted(done: Result) -> None:
    samples, kept = done.folder.read("samples"), done.folder.read("kept")
    assert len(samples) == 32 * 32
    expected: dict[str, dict[str, float]] = {}
    for row in samples:
        if row["reward"] >= GOOD:
            expected.setdefault(row["prompt_id"], {}).setdefault(row["sample"], row["reward"])
    for prompt, texts in expected.items():
        mine = {row["answer"]: row["reward"] for row in kept if row["prompt_id"] == prompt}
        assert mine == dict(list(texts.items())[:3])
    assert len(kept) == sum(min(3, len(texts)) for texts in expected.values())
    (event,) = (row for row in done.folder.read("events") if row["kind"] == "kept")
    told = json.loads((done.folder.path / "summary.json").read_text())["kept"]
    assert told["samples_kept"] == event["samples_kept"] == len(kept)
    assert told["prompts_kept"] == len(expected)


async def test_kept_token_ids_match_the_texts(done: Result) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(done.folder.model)
    for row in done.folder.read("samples"):
        assert len(row["token_ids"]) == row["tokens"]
        assert tokenizer.decode(row["token_ids"], skip_special_tokens=True) == row["sample"]
        assert (row["token_ids"][-1] == tokenizer.eos_token_id) == row["stopped"]


async def test_an_interrupted_run_continues_training_without_sampling_again(done: Result, tmp_path: Path) -> None:
    path = tmp_path / done.folder.path.name
    shutil.copytree(done.folder.path, path)
    folder, job = RunFolder.open(path)
    shutil.rmtree(folder.checkpoints / "step-20")
    shutil.rmtree(folder.model)
    (folder.logs / "actor-0.log").unlink()
    samples = (path / "samples.jsonl").read_bytes()
    again = await run_alone(prepare(job), folder, Display(quiet=True))
    assert not (folder.logs / "actor-0.log").exists()
    assert (path / "samples.jsonl").read_bytes() == samples
    first, second = ([row["loss"] for row in result.folder.read("metrics")] for result in (done, again))
    assert second == pytest.approx(first, rel=1e-3)
    assert share_of_sevens(folder.model) == pytest.approx(share_of_sevens(done.folder.model), abs=0.05)
