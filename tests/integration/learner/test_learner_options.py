"""The value model on two ranks, compiled layers, and bfloat16 with every option of the loss at once."""

from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load
from transformers import AutoModel, AutoModelForCausalLM

from learner.batch import Packer, rank_batch
from learner.policy import Policy
from learner.pool import LearnerPool
from learner.reinforce import Reinforcer
from learner.value import Critic, PromptValue
from tests.integration.learner.conftest import OPTIMIZER, VOCABULARY, assert_near, batch, config, same, save, tensors_of
from tests.models import tiny_llama
from tests.plain_engine import PlainEngine, process_group_of_one
from volley.model import ModelSpec
from volley.objectives import Mean
from volley.update import PolicyUpdate, ValueModel

pytestmark = pytest.mark.integration
VALUE = ValueModel(lr=1e-3)


async def test_the_value_model_on_two_ranks_equals_plain_pytorch(ray_local: None, tmp_path: Path) -> None:
    """Compared with the same step in plain PyTorch in this process; its state is part of a checkpoint.

    The model uses one matrix as input and output embedding, so two modules share a parameter.
    """
    model = tiny_llama(tmp_path / "tied", vocab_size=VOCABULARY, initializer_range=0.05, tie_word_embeddings=True)
    spec = PolicyUpdate(value_model=VALUE)
    learner = await LearnerPool.start(config(model, tmp_path, 2, update=spec, objective=Mean()))
    with process_group_of_one():
        await compare(learner, model, spec, tmp_path)


async def compare(learner: LearnerPool, model: Path, spec: PolicyUpdate, tmp_path: Path) -> None:
    try:
        worker = plain_reinforcer(model, spec)
        for step in range(2):
            made, columns = batch(step)
            report = await learner.step(columns, version=step)
            metrics, advantages = worker.step(
                rank_batch(made, columns, version=step, mask_truncated=False), Mean(), step
            )
            for name in ("value_loss", "value_mean", "value_grad_norm", "loss", "live_group_fraction"):
                assert report.metrics[name] == pytest.approx(metrics[name], rel=5e-3, abs=1e-5), name
            for group_id, advantage_n in advantages.items():
                np.testing.assert_allclose(report.advantages[group_id], advantage_n, atol=1e-4)
        engine = worker.engine
        expected = {name.removeprefix("lm."): each.detach().numpy() for name, each in engine.module.named_parameters()}
        assert_near(tensors_of(await learner.publish(2)), expected)
        await save(learner, tmp_path / "step-2", {})
        first = await learner.step(batch(2)[1], version=2)
        weights = tensors_of(await learner.publish(3))
        await learner.load(tmp_path / "step-2")
        second = await learner.step(batch(2)[1], version=2)
        assert first.metrics["value_loss"] == second.metrics["value_loss"]
        assert same(weights, tensors_of(await learner.publish(3)))
    finally:
        await learner.stop()


def plain_reinforcer(model: Path, spec: PolicyUpdate) -> Reinforcer:
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    engine = PlainEngine(Policy(lm, 1.0), OPTIMIZER)
    critic = Critic.__new__(Critic)  # without DeepSpeed
    trunk = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    critic.spec, critic.budget = VALUE, 4096
    critic.engine = PlainEngine(PromptValue(trunk), OPTIMIZER.model_copy(update={"lr": VALUE.lr}))  # type: ignore[assignment]
    return Reinforcer(spec, engine, Packer(4096, 64, True, engine.device), critic=critic)  # type: ignore[arg-type]


async def test_compiled_layers_whose_weights_are_gathered_equal_plain_pytorch(
    ray_local: None, model: Path, tmp_path: Path
) -> None:
    spec = PolicyUpdate()
    options = {"compile": True, "step_deadline_s": 300}
    learner = await LearnerPool.start(config(model, tmp_path, 1, update=spec, objective=Mean(), learner=options))
    try:
        engine = PlainEngine(Policy(AutoModelForCausalLM.from_pretrained(model).eval(), 1.0), OPTIMIZER)
        with process_group_of_one():
            pack = Packer(4096, 64, True, engine.device)
            plain = Reinforcer(spec, engine, pack)  # type: ignore[arg-type]
            for step in range(2):
                made, columns = batch(step)
                metrics = (await learner.step(columns, version=step)).metrics
                expected, _ = plain.step(rank_batch(made, columns, version=step, mask_truncated=False), Mean(), step)
                assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        weights = {name.removeprefix("lm."): each.detach().numpy() for name, each in engine.module.named_parameters()}
        assert_near(tensors_of(await learner.publish(2)), weights)
    finally:
        await learner.stop()


async def test_bfloat16_with_every_option(ray_local: None, model: Path, tmp_path: Path) -> None:
    spec = PolicyUpdate.model_validate(
        {
            "clip_high": 0.3,
            "ratio": "sequence",
            "updates_per_batch": 2,
            "behaviour_correction": {"kind": "sequence", "cap": 3.0, "mask": True, "floor": 0.01},
            "off_policy_mask": 1.0,
            "aggregation": "token_mean",
            "kl": {"coefficient": 0.05, "estimator": "k2"},
            "entropy_bonus": 0.01,
            "mask_truncated": True,
        }
    )
    narrow = ModelSpec(path=model, dtype="bfloat16")
    learner = await LearnerPool.start(config(model, tmp_path, 1, update=spec, model=narrow))
    try:
        report = await learner.step(batch(0)[1], version=0)
        assert all(np.isfinite(value) for value in report.metrics.values())
        assert report.metrics["kl_k1"] != 0.0  # the batch's second update starts from changed weights
        update = await learner.publish(1)
        tensors = load(b"".join(part.tobytes() for part in ray.get(update.buckets[0].ref)))
        assert {each.dtype for each in tensors.values()} == {torch.bfloat16}
        await save(learner, tmp_path / "step-1", {})
        await learner.step(batch(1)[1], version=1)
        first = (await learner.publish(2)).checksum
        await learner.load(tmp_path / "step-1")
        assert (await learner.publish(1)).checksum == update.checksum
        await learner.step(batch(1)[1], version=1)
        assert (await learner.publish(2)).checksum == first  # float32 master weights and moments were restored
    finally:
        await learner.stop()
