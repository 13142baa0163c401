"""Adapters on the real stack: a run that learns and survives its learner, and an engine that gets them in flight."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
import yaml
from safetensors.torch import load, save

from actors.config import ActorConfig, GenerateRequest
from actors.pool import ActorPool
from learner.lora import published, split
from learner.policy import load_trained
from services.jobs.job_file import load_job
from services.recording.display import Display
from services.runs.export import export_checkpoint
from services.runs.run import Result, prepare, run_on
from services.stack.ephemeral import Stack
from services.store.folder import RunFolder
from tests.integration.jobs import rl_job, write_inputs
from tests.integration.oracle import Oracle, version_changes
from tests.models import character_tokenizer, tiny_llama
from volley.job import ActorsSpec
from volley.model import ModelSpec
from volley.records import Group, WeightBucket, WeightUpdate

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    job = rl_job(folder, steps=10, optimizer={"lr": 1e-2}, checkpoint={"every": 4}, evaluation=None)
    job["model"]["lora"] = {"rank": 8, "alpha": 16}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def begin(stack: Stack, job_file: Path, parent: Path) -> tuple[RunFolder, "asyncio.Task[Result]"]:
    job = load_job(job_file)
    folder = RunFolder.create(parent, job)
    return folder, asyncio.create_task(run_on(stack, prepare(job), folder, Display(quiet=True)))


@pytest.fixture(scope="module")
async def done(stack: Stack, job_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return await begin(stack, job_file, tmp_path_factory.mktemp("runs"))[1]


async def test_the_adapters_learn_and_the_actors_serve_what_the_learner_has(done: Result) -> None:
    rows = done.folder.read("metrics")
    assert len(rows) == 10
    assert np.mean([row["reward_mean"] for row in rows[-3:]]) > np.mean([row["reward_mean"] for row in rows[:3]]) + 0.1
    for row in rows:
        assert row["lag_histogram"].keys() == {"0"}
        assert row["logprob_mismatch_max"] < 1e-4
        assert row["clip_fraction"] == 0.0
    assert rows[0]["kl_k3"] == pytest.approx(0.0, abs=1e-6)
    assert rows[-1]["kl_k3"] > 0.01


async def test_only_adapters_are_sent_and_checkpointed(done: Result, job_file: Path) -> None:
    whole = (job_file.parent / "model" / "model.safetensors").stat().st_size
    assert (
        0 < done.folder.read("metrics")[-1]["weight_bytes"] < whole / 4
    )  # for a model of width 64; the documentation has other sizes
    checkpoint = done.folder.checkpoints / "step-10"
    assert sum(file.stat().st_size for file in checkpoint.glob("policy*")) < whole


async def test_weights_without_adapters_equal_the_base(done: Result, job_file: Path, tmp_path: Path) -> None:
    """The export of the last checkpoint equals the run's own export, including adapters."""
    base = load((job_file.parent / "model" / "model.safetensors").read_bytes())
    whole = load((done.folder.model / "model.safetensors").read_bytes())
    assert whole.keys() == base.keys()
    assert {name.split(".")[-2] for name in whole if not torch.equal(whole[name], base[name])} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    export_checkpoint(done.folder, 10, tmp_path / "out")
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        mine, theirs = (load((each / file).read_bytes()) for each in (tmp_path / "out", done.folder.model))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


async def test_a_killed_learner_resumes_exactly_from_its_checkpoint(
    stack: Stack, job_file: Path, done: Result, tmp_path: Path
) -> None:
    folder, running = begin(stack, job_file, tmp_path)
    async with asyncio.timeout(120):
        while len(folder.read("metrics")) < 6 and not running.done():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
    actors = [each for each in ray._private.state.actors().values() if each["State"] == "ALIVE"]
    (rank,) = [each for each in actors if each["Name"].startswith(f"{folder.run_id}-learner")]
    os.kill(rank["Pid"], signal.SIGKILL)
    again = await asyncio.wait_for(running, 300)
    assert "learner_restarted" in {event["kind"] for event in folder.read("events")}
    first, second = ([row["reward_mean"] for row in each.folder.read("metrics")] for each in (done, again))
    assert second == pytest.approx(first, abs=1e-9)


def version_of(spec: ModelSpec, version: int) -> tuple[dict[str, torch.Tensor], WeightUpdate]:
    """The full weights of a version and its update: the adapters, split in two as a learner's buckets may be."""
    lm = load_trained(spec, seed=0)
    torch.manual_seed(version)
    with torch.no_grad():
        for _, parameter in published(lm):
            parameter.normal_(std=0.2)
    whole, adapters = split({name: each.detach() for name, each in lm.named_parameters()}, spec.lora)  # type: ignore[arg-type]
    names = list(adapters)
    files = [
        np.frombuffer(save({name: adapters[name] for name in part}), np.uint8)
        for part in (names[::3], names[1::3] + names[2::3])
    ]
    return whole, WeightUpdate(version, tuple(WeightBucket(ray.put((file,)), file.nbytes) for file in files), None, 0.0)


async def test_adapters_change_in_the_middle_of_samples(ray_local: None, tmp_path: Path) -> None:
    """Every token has the version of its span; matrices packed together with adapted ones do not change."""
    model = tiny_llama(tmp_path / "model", tie_word_embeddings=True, attention_bias=True)
    spec = ModelSpec.model_validate({"path": model, "lora": {"rank": 4, "target_modules": ["v_proj", "up_proj"]}})
    actors = ActorsSpec.model_validate({"cpus": 0.1, "max_num_seqs": 128, "kv_cache_gb": 0.1})
    pool = await ActorPool.start(ActorConfig(spec, actors, 256, 0, tmp_path / "logs", verify=True))
    oracle, updates = Oracle(model), []
    for version in (1, 2):
        oracle.weights[version], update = version_of(spec, version)
        updates.append(update)
    updated = asyncio.Event()

    async def stream() -> list[Group]:
        """Groups one after the other until both updates are there, so that each meets samples half drawn."""
        groups = []
        while not updated.is_set():
            ref, _ = await pool.generate(request)
            groups.append(await ref)
        return groups

    try:
        prompt_p = np.array(character_tokenizer()("12+34=")["input_ids"], dtype=np.int32)
        request = GenerateRequest(1, "p", prompt_p, 64, 1.0, 1.0, 240)
        streams = [asyncio.create_task(stream()) for _ in range(2)]
        for update in updates:
            await asyncio.sleep(0.15)
            await pool.broadcast(update)
        updated.set()
        groups = [group for groups in await asyncio.gather(*streams) for group in groups]
        assert {(0, 1), (1, 2)} <= {step for group in groups for step in version_changes(group)}
        for group in groups:
            np.testing.assert_allclose(group.logprobs_T, oracle.logprobs(group), atol=1e-4)
        (file,) = (await pool.served_weights()).values()
        served = load(file.tobytes())
        for name, tensor in oracle.weights[2].items():
            assert torch.equal(served[name], tensor), name
    finally:
        await pool.stop()
