"""Real ranks that split rows make the update of plain PyTorch, which splits nothing, with every option of the loss."""

import asyncio
import copy
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from learner.batch import Packer, rank_batch
from learner.lora import published
from learner.policy import Policy, StartingPolicy, load_trained, load_trunk
from learner.pool import LearnerPool
from learner.records import ScoredGroup, SFTRow
from learner.reinforce import Reinforcer
from learner.value import Critic, PromptValue
from tests.integration.learner.conftest import OBJECTIVE, OPTIMIZER, VOCABULARY, assert_near, config, save, tensors_of
from tests.learner_batches import naive_logprobs, random_group, scored
from tests.plain_engine import PlainEngine, process_group_of_one
from volley.errors import WorkerDied
from volley.lora import LoraSpec
from volley.model import ModelSpec
from volley.records import Group
from volley.update import PolicyUpdate, ValueModel

pytestmark = pytest.mark.integration
SPLIT = {"sequence_parallel": 2, "tokens_per_micro_batch": 60}
VALUE = ValueModel(lr=1e-3)
EVERYTHING = PolicyUpdate.model_validate(
    {
        "ratio": "sequence",
        "updates_per_batch": 2,
        "behaviour_correction": {"kind": "sequence", "cap": 3.0},
        "aggregation": "token_mean",
        "kl": {"coefficient": 0.05, "target": 1e-6},
        "kl_sample_fraction": 0.5,
        "entropy_bonus": 0.001,
        "value_model": VALUE,
    }
)
TIMES = {"tokens_per_second", "seconds_prepare", "seconds_update"}


def batch(step: int, *, groups: int = 4) -> tuple[list[Group], list[ScoredGroup]]:
    """Groups with observations, of unequal length; in the first, one sample was not scored."""
    rng = np.random.default_rng(step)
    made = [
        random_group(rng, 100 * step + i, vocabulary=VOCABULARY, version=step, length=(1, 6 + 20 * i), turns=True)
        for i in range(groups)
    ]
    rewards = [rng.integers(0, 3, group.n).astype(float).tolist() for group in made]
    valid = [[True] * group.n for group in made]
    valid[0][1] = False
    return made, [
        scored(group, reward, valid_n=kept, reference=ray.put(group))
        for group, reward, kept in zip(made, rewards, valid, strict=True)
    ]


def plain(spec: ModelSpec, update: PolicyUpdate) -> Reinforcer:
    """The same step in plain PyTorch, in this process."""
    lm = load_trained(spec, 0)
    engine: Any = PlainEngine(Policy(lm, 1.0, entropy_gradient=True), OPTIMIZER)
    reference: Any = StartingPolicy(engine) if spec.lora else Policy(copy.deepcopy(lm).requires_grad_(False), 1.0)
    critic = None
    if update.value_model is not None:
        critic = Critic.__new__(Critic)  # without DeepSpeed
        critic.spec, critic.budget = VALUE, 4096
        value: Any = PlainEngine(
            PromptValue(load_trunk(spec.folder, "float32")), OPTIMIZER.model_copy(update={"lr": VALUE.lr})
        )
        critic.engine = value
    pack = Packer(4096, 64, allow_shared=True, device=engine.device)
    return Reinforcer(update, engine, pack, reference=reference, critic=critic)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    with process_group_of_one():
        yield


@pytest.fixture(scope="module")
async def split(
    ray_local: None, alone: None, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LearnerPool]:
    """Two ranks that split every row."""
    folder = tmp_path_factory.mktemp("split")
    learner = await LearnerPool.start(config(model, folder, 2, update=EVERYTHING, learner=SPLIT))
    yield learner
    await learner.stop()


@pytest.fixture(scope="module")
def oracle(split: LearnerPool) -> Reinforcer:
    """Takes the steps that ``split`` takes."""
    return plain(split.config.model, EVERYTHING)


async def compare(learner: LearnerPool, worker: Reinforcer, steps: range) -> None:
    """Take the same steps with both; one of them has a single group."""
    for step in steps:
        made, columns = batch(step, groups=1 if step % 3 == 1 else 4)
        report = await learner.step(columns, version=step)
        rows = rank_batch(made, columns, version=step, mask_truncated=False)
        metrics, advantages = worker.step(rows, OBJECTIVE, step)
        assert metrics.keys() <= report.metrics.keys()
        for name in metrics.keys() - TIMES:
            assert report.metrics[name] == pytest.approx(metrics[name], rel=5e-3, abs=2e-5), (step, name)
        assert report.lag_histogram == {0: rows.tokens}
        assert report.advantages.keys() == advantages.keys()
        for group_id, advantage_n in advantages.items():
            np.testing.assert_allclose(report.advantages[group_id], advantage_n, atol=1e-4)


async def test_two_ranks_that_split_rows_make_the_update_of_plain_pytorch(
    split: LearnerPool, oracle: Reinforcer
) -> None:
    await compare(split, oracle, range(3))
    assert oracle.kl_coefficient > EVERYTHING.kl.coefficient
    lm = oracle.engine.module.lm
    assert_near(
        tensors_of(await split.publish(3)), {name: each.detach().numpy() for name, each in lm.named_parameters()}
    )


async def test_they_score_groups_as_plain_pytorch_does(split: LearnerPool, oracle: Reinforcer) -> None:
    for group in batch(7)[0]:
        expected_T = naive_logprobs(oracle.engine.module.lm, group)[0].detach().numpy()
        np.testing.assert_allclose(await split.score(ray.put(group)), expected_T, atol=1e-3)


async def test_a_checkpoint_is_resumed_with_and_without_splitting(
    split: LearnerPool, model: Path, tmp_path: Path
) -> None:
    await save(split, tmp_path / "step-3", {"cursor": 7})
    one = await LearnerPool.start(config(model, tmp_path / "one", 1, update=EVERYTHING))
    try:
        assert await one.load(tmp_path / "step-3") == {"cursor": 7}
        assert (await one.publish(3)).checksum == (await split.publish(3)).checksum
        first, second = [await one_more(learner, 3) for learner in (one, split)]
        assert_near(first, second)
        await save(one, tmp_path / "step-4", {"cursor": 8})
        assert await split.load(tmp_path / "step-4") == {"cursor": 8}
        assert_near(*[await one_more(learner, 4) for learner in (one, split)])
    finally:
        await one.stop()


async def one_more(learner: LearnerPool, step: int) -> dict[str, Any]:
    """The weights after another step."""
    await learner.step(batch(step)[1], version=step)
    return tensors_of(await learner.publish(step + 1))


async def test_supervised_steps_count_every_row_once(split: LearnerPool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        SFTRow(*(rng.integers(3, 99, length).astype(np.int32) for length in lengths))
        for lengths in ((5, 9), (2, 1), (7, 30))
    ]
    lm = load_trained(ModelSpec(path=await split.export(tmp_path / "model")), 0)
    total = torch.zeros(())
    for row in rows:
        logit_LV = lm(input_ids=torch.from_numpy(np.concatenate([row.prompt_p, row.answer_a]))[None].long()).logits[0]
        answer_a = torch.from_numpy(row.answer_a).long()
        total -= logit_LV[len(row.prompt_p) - 1 : -1].log_softmax(-1).gather(-1, answer_a[:, None]).sum().detach()
    metrics = (await split.sft_step(rows)).metrics
    assert metrics["tokens"] == 40
    assert metrics["loss"] == pytest.approx(float(total) / 40, rel=1e-4)


async def test_a_rank_killed_while_rows_are_exchanged_is_named(split: LearnerPool) -> None:
    async def many_steps() -> None:
        for step in range(9, 1000):
            await split.step(batch(step)[1], version=step)

    running = asyncio.create_task(many_steps())
    await asyncio.sleep(0.5)
    os.kill(split._ranks.processes[1].pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(WorkerDied, match="learner-1 died"):
        await running
    assert time.monotonic() - begun < 15


async def test_two_sequence_groups_train_adapters_with_recomputed_layers(
    ray_local: None, alone: None, model: Path, tmp_path: Path
) -> None:
    """Groups are dealt to sequence groups; in the step of one group, the second pair of ranks has none."""
    update = PolicyUpdate.model_validate(
        {"kl": {"coefficient": 0.05}, "entropy_bonus": 0.001, "kl_sample_fraction": 1.0}
    )
    spec = ModelSpec(path=model, lora=LoraSpec(rank=4, alpha=8))
    options = {**SPLIT, "gradient_checkpointing": True}
    learner = await LearnerPool.start(config(model, tmp_path, 4, model=spec, update=update, learner=options))
    try:
        worker = plain(spec, update)
        await compare(learner, worker, range(2))
        adapters = {name: each.detach().numpy() for name, each in published(worker.engine.module.lm)}
        assert_near(tensors_of(await learner.publish(2)), adapters)
    finally:
        await learner.stop()
