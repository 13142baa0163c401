"""Adapters on real ZeRO-3 ranks: the update, the starting policy as reference, checkpoints for other rank counts."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.batch import Packer, rank_batch
from learner.lora import published
from learner.policy import Policy, StartingPolicy, load_trained
from learner.pool import LearnerPool
from learner.records import SFTRow
from learner.reinforce import Reinforcer
from tests.integration.learner.conftest import OBJECTIVE, OPTIMIZER, assert_near, batch, config, same, save, tensors_of
from tests.plain_engine import PlainEngine, process_group_of_one
from volley.lora import LoraSpec
from volley.model import ModelSpec
from volley.update import KLPenalty, PolicyUpdate

pytestmark = pytest.mark.integration
UPDATE = PolicyUpdate(entropy_bonus=0.001, kl=KLPenalty(coefficient=0.1))
LORA = LoraSpec(rank=4, alpha=8)


@pytest.fixture(scope="module")
async def learner(ray_local: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LearnerPool]:
    """Two ranks with every parameter really sharded, including frozen ones."""
    spec = ModelSpec(path=model, lora=LORA)
    started = await LearnerPool.start(config(model, tmp_path_factory.mktemp("two"), 2, model=spec, update=UPDATE))
    yield started
    await started.stop()


async def test_two_ranks_make_the_update_of_plain_pytorch(learner: LearnerPool) -> None:
    lm = load_trained(learner.config.model, seed=0)
    engine = PlainEngine(Policy(lm, 1.0, entropy_gradient=True), OPTIMIZER)
    pack = Packer(4096, 64, True, engine.device)
    worker = Reinforcer(UPDATE, engine, pack, reference=StartingPolicy(engine))  # type: ignore[arg-type]
    with process_group_of_one():
        for step in range(3):
            made, columns = batch(step)
            report = await learner.step(columns, version=step)
            metrics, _ = worker.step(rank_batch(made, columns, version=step, mask_truncated=False), OBJECTIVE, step)
            for name in ("loss", "grad_norm", "entropy", "live_group_fraction"):
                assert report.metrics[name] == pytest.approx(metrics[name], rel=5e-3, abs=1e-5), name
        assert report.metrics["kl_k3"] > 0
    sent = await learner.publish(3)
    assert_near(tensors_of(sent), {name: each.detach().numpy() for name, each in published(lm)})
    assert sent.nbytes < sum(file.stat().st_size for file in learner.config.model.folder.glob("*.safetensors")) / 50


async def test_a_checkpoint_holds_only_adapters_and_resumes_on_another_number_of_ranks(
    learner: LearnerPool, model: Path, tmp_path: Path
) -> None:
    await save(learner, tmp_path / "step-3", {"cursor": 7})
    kept = sum(file.stat().st_size for file in (tmp_path / "step-3").iterdir())
    assert kept < 4 * (await learner.publish(3)).nbytes
    first = await continued(learner)
    await learner.load(tmp_path / "step-3")
    assert same(first, await continued(learner))
    spec = ModelSpec(path=model, lora=LORA)
    whole = {
        "gradient_checkpointing": True,
        "deepspeed": {},
    }  # ZeRO-3 treats a layer as a unit, the default for small models
    one = await LearnerPool.start(config(model, tmp_path / "one", 1, model=spec, update=UPDATE, seed=9, learner=whole))
    try:
        assert await one.load(tmp_path / "step-3") == {"cursor": 7}
        assert_near(first, await continued(one))
    finally:
        await one.stop()


async def continued(learner: LearnerPool) -> dict[str, np.ndarray]:
    for step in (3, 4):
        await learner.step(batch(step)[1], version=step)
    return tensors_of(await learner.publish(5))


async def test_supervised_steps_also_train_only_the_adapters(learner: LearnerPool) -> None:
    rng = np.random.default_rng(0)
    rows = [SFTRow(rng.integers(3, 99, 5).astype(np.int32), rng.integers(3, 99, 9).astype(np.int32)) for _ in range(4)]
    losses = [(await learner.sft_step(rows)).metrics["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


async def test_the_export_is_the_base_plus_the_published_adapters(
    learner: LearnerPool, model: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    sent = {name: torch.from_numpy(each) for name, each in tensors_of(await learner.publish(5)).items()}
    folder = await learner.export(tmp_path / "model")
    base, whole = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).state_dict() for each in (model, folder)
    )
    for name, tensor in whole.items():
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in sent:
            delta = LORA.scale * (sent[f"{module}.lora_B.weight"] @ sent[f"{module}.lora_A.weight"])
            assert delta.abs().max() > 0
            torch.testing.assert_close(tensor, base[name] + delta, atol=1e-6, rtol=0)
        else:
            assert torch.equal(tensor, base[name]), name
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder / "adapter"))
    kept = {
        name.removeprefix("base_model.model.").replace(".default.", "."): each
        for name, each in alone.named_parameters()
    }
    assert all(torch.equal(kept[name], each) for name, each in sent.items())
