"""Real ZeRO-3 ranks under Ray: the same update on one rank, two ranks and plain PyTorch; weights, checkpoints, export.

The tests of this module share two learners and run in order.
"""

import asyncio
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from learner.logprobs import CHUNK_ELEMENTS
from learner.pool import LearnerPool, deal
from learner.records import SFTRow
from tests.integration.learner.conftest import (
    OBJECTIVE,
    OPTIMIZER,
    UPDATE,
    VOCABULARY,
    assert_near,
    batch,
    rank_stopped,
    same,
    save,
    tensors_of,
)
from tests.learner_batches import naive_logprobs
from tests.plain_engine import PlainEngine
from volley.checksum import weights_checksum
from volley.errors import DeadlineExceeded, Diverged, HostError, WorkerDied
from volley.objectives import advantages
from volley.processes import is_alive

pytestmark = pytest.mark.integration
Learners = tuple[LearnerPool, LearnerPool]


@pytest.fixture(scope="module")
def plain(model: Path) -> PlainEngine:
    """The same model, trained with plain PyTorch."""
    from transformers import AutoModelForCausalLM

    return PlainEngine(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), OPTIMIZER)


def plain_step(engine: PlainEngine, step: int, groups: int = 5) -> tuple[float, float]:
    """The textbook update, one sequence at a time, with AdamW; returns loss and gradient norm."""
    made, columns = batch(step, groups=groups)
    total = 0.0
    for group, column in zip(made, columns, strict=True):
        theta_T, entropy_T = naive_logprobs(engine.module, group)
        correction_T = (theta_T.detach() - torch.from_numpy(group.logprobs_T)).exp().clamp(max=2.0)
        rewards_n = np.nan_to_num(column.rewards_n)
        advantage_n = advantages(rewards_n, OBJECTIVE, valid=column.valid_n)
        advantage_T = torch.from_numpy(np.repeat(advantage_n, group.lengths_n)).float()
        valid_T = torch.from_numpy(np.repeat(column.valid_n, group.lengths_n))
        ratio_T = (theta_T - theta_T.detach()).exp()
        term_T = correction_T * advantage_T * ratio_T + UPDATE.entropy_bonus * entropy_T / column.valid_n.sum()
        loss = -(valid_T * term_T).sum() / len(made)
        engine.backward(loss)
        total += float(loss.detach())
    return total, engine.update(step)[0]


def test_two_ranks_need_unequal_numbers_of_chunks(ray_local: None) -> None:
    """The batches below cover the hard case: ranks with different numbers of chunks must still gather together."""
    tokens = [column.meta.sample_tokens for column in batch(2)[1]]
    shares = deal([column.meta.sample_tokens + column.meta.prompt_tokens for column in batch(2)[1]], 2)
    step = CHUNK_ELEMENTS["cpu"] // VOCABULARY
    chunks = [math.ceil(sum(tokens[index] for index in share) / step) for share in shares]
    assert chunks[0] != chunks[1]


async def test_one_rank_two_ranks_and_plain_pytorch_make_the_same_update(
    learners: Learners, whole: LearnerPool, plain: PlainEngine
) -> None:
    for step in range(3):
        groups = 1 if step == 1 else 5  # with one group the second rank has no work
        loss, norm = plain_step(plain, step, groups)
        for learner in (*learners, whole):
            _, columns = batch(step, groups=groups)
            report = await learner.step(columns, version=step)
            assert report.metrics["loss"] == pytest.approx(loss, rel=2e-3, abs=1e-5)
            assert report.metrics["grad_norm"] == pytest.approx(norm, rel=2e-3)
            assert sum(report.lag_histogram.values()) == report.metrics["tokens"]
            assert report.advantages.keys() == {column.meta.group_id for column in columns}
    one, two, kept = [tensors_of(await learner.publish(3)) for learner in (*learners, whole)]
    expected = {name: each.detach().numpy() for name, each in plain.module.named_parameters()}
    assert_near(one, two)
    assert_near(one, kept)
    assert_near(one, expected)


async def test_published_weights_equal_the_parameters_bitwise(learners: Learners, tmp_path: Path) -> None:
    """Compared with the export, which plain transformers loads; the checksum covers the weights sent."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for learner in learners:
        update = await learner.publish(4)
        published = tensors_of(update)
        folder = await learner.export(tmp_path / f"model-{learner.config.learner.ranks}")
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        assert same(published, {name: each.detach().numpy() for name, each in lm.named_parameters()})
        assert AutoTokenizer.from_pretrained(folder).decode([5]) == "2"
        assert update.nbytes >= sum(each.nbytes for each in published.values())
        fresh = AutoModelForCausalLM.from_config(lm.config).eval()
        fresh.load_state_dict({name: torch.from_numpy(each) for name, each in published.items()})
        ids = torch.arange(3, 20)[None]
        assert torch.equal(fresh(ids).logits, lm(ids).logits)


async def test_a_version_is_the_weights_at_its_beginning_whatever_is_trained_while_it_is_published(
    learners: Learners,
) -> None:
    for learner in learners:
        at_rest = tensors_of(await learner.publish(5))
        await learner.begin_publish(6)
        _, update = await asyncio.gather(learner.step(batch(5)[1], version=5), learner.published(6))
        assert same(tensors_of(update), at_rest)
        assert not same(tensors_of(await learner.publish(7)), at_rest)


async def test_training_resumes_bitwise_on_one_rank_and_equally_on_two(learners: Learners, tmp_path: Path) -> None:
    one, two = learners
    await save(one, tmp_path / "step-3", {"cursor": 7})
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    first = await continued(one)
    assert await one.load(tmp_path / "step-3") == {"cursor": 7}
    assert same(first, await continued(one))
    assert await two.load(tmp_path / "step-3") == {"cursor": 7}
    assert await one.load(tmp_path / "step-3") == {"cursor": 7}
    updates = [await learner.publish(3) for learner in learners]
    assert same(tensors_of(updates[0]), tensors_of(updates[1]))
    assert len(updates[1].buckets) > len(updates[0].buckets)
    assert updates[0].checksum == updates[1].checksum  # for any split of the weights
    assert updates[0].checksum == weights_checksum(np.frombuffer(file, np.uint8) for file in files_of(updates[1]))
    assert_near(await continued(two), first)


async def test_a_checkpoint_is_the_state_at_its_beginning_whatever_is_trained_while_it_is_written(
    learners: Learners, tmp_path: Path
) -> None:
    for learner in learners:
        folder = tmp_path / f"of-{learner.config.learner.ranks}" / "step-3"
        await learner.begin_save(folder, {"cursor": 7}, {"more": b"files"})
        assert not folder.exists()
        first, _ = await asyncio.gather(continued(learner), learner.saved())
        assert [path.name for path in folder.parent.iterdir()] == ["step-3"]
        assert (folder / "more").read_bytes() == b"files"
        assert await learner.load(folder) == {"cursor": 7}
        assert same(first, await continued(learner))


async def test_a_checkpoint_that_could_not_be_written_is_written_when_there_is_a_way(
    learners: Learners, tmp_path: Path
) -> None:
    for learner in learners:
        in_the_way = tmp_path / f"of-{learner.config.learner.ranks}"
        in_the_way.write_text("a file, not a folder")
        await learner.begin_save(in_the_way / "step-3", {"cursor": 8})
        first = await continued(learner)
        with pytest.raises(HostError, match="step-3: Not a directory"):
            await learner.saved()
        in_the_way.unlink()
        await learner.saved()
        assert await learner.load(in_the_way / "step-3") == {"cursor": 8}
        assert same(first, await continued(learner))


async def continued(learner: LearnerPool) -> dict[str, Any]:
    """The weights after two more steps."""
    for step in (3, 4):
        await learner.step(batch(step)[1], version=step)
    return tensors_of(await learner.publish(5))


def files_of(update: Any) -> list[bytes]:
    import ray

    return [b"".join(part.tobytes() for part in ray.get(bucket.ref)) for bucket in update.buckets]


async def test_a_checkpoint_of_two_ranks_can_be_resumed_by_one(learners: Learners, tmp_path: Path) -> None:
    one, two = learners
    await save(two, tmp_path / "step-5", {}, background=False)
    assert len(list((tmp_path / "step-5").glob("policy-*.safetensors"))) > 2
    await one.load(tmp_path / "step-5")
    updates = [await learner.publish(5) for learner in learners]
    assert updates[0].checksum == updates[1].checksum


async def test_groups_beyond_the_lag_are_dropped_and_change_nothing(learners: Learners) -> None:
    one, two = learners
    _, columns = batch(5)
    stale = batch(2)[1][:2]
    mixed = await one.step([*columns, *stale], version=5)
    pure = await two.step(columns, version=5)
    assert list(mixed.dropped) == [group.meta.group_id for group in stale]
    assert mixed.metrics["loss"] == pytest.approx(pure.metrics["loss"], rel=1e-3, abs=1e-6)
    assert mixed.metrics["tokens"] == pure.metrics["tokens"]
    assert_near(tensors_of(await one.publish(6)), tensors_of(await two.publish(6)))


async def test_supervised_steps_agree(learners: Learners, tmp_path: Path) -> None:
    """Cross-entropy over answers of unequal length; five rows on one rank and on two."""
    one, two = learners
    await save(one, tmp_path / "same", {})
    await two.load(tmp_path / "same")
    folder = await one.export(tmp_path / "model")
    rng = np.random.default_rng(0)
    rows = [
        SFTRow(*(rng.integers(3, 99, int(length)).astype(np.int32) for length in rng.integers(1, 30, 2)))
        for _ in range(5)
    ]
    reports = [await learner.sft_step(rows) for learner in learners]
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_p, row.answer_a]).astype(np.int64))
        logprobs = lm(ids[None]).logits[0, len(row.prompt_p) - 1 : -1].log_softmax(-1)
        losses.append(-logprobs.gather(-1, ids[len(row.prompt_p) :, None]))
    expected = float(torch.cat(losses).mean().detach())
    for report in reports:
        assert report.metrics["loss"] == pytest.approx(expected, rel=1e-4)
        assert report.metrics["tokens"] == sum(len(row.answer_a) for row in rows)
    assert_near(tensors_of(await one.publish(7)), tensors_of(await two.publish(7)))


# ---- faults, on the learners that the tests above have finished with ------------------------------------------------


async def test_a_gradient_that_is_not_finite_ends_the_run_and_leaves_the_weights(learners: Learners) -> None:
    one, _ = learners
    before = (await one.publish(8)).checksum
    made, columns = batch(8)
    broken = replace(made[0], logprobs_T=np.full_like(made[0].logprobs_T, np.nan))
    bad = [replace(columns[0], group=ray.put(broken)), *columns[1:]]
    with pytest.raises(Diverged, match=r"lower optimizer\.lr"):
        await one.step(bad, version=8)
    assert (await one.publish(8)).checksum == before


async def test_a_killed_rank_is_named(learners: Learners) -> None:
    """Its peer sees a closed connection first; the error is about the one that died, with its log."""
    _, two = learners
    pids = [process.pid for process in two._ranks.processes]
    running = asyncio.create_task(many_steps(two))
    await asyncio.sleep(0.3)
    os.kill(pids[1], signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(WorkerDied, match="learner-1 died"):
        await running
    assert time.monotonic() - begun < 15
    await two.stop()
    assert not any(is_alive(pid) for pid in pids)


async def many_steps(learner: LearnerPool) -> None:
    for step in range(9, 1000):
        await learner.step(batch(step)[1], version=step)


async def test_a_rank_stopped_before_a_step_is_named_and_ended(whole: LearnerPool) -> None:
    whole.config = replace(whole.config, learner=whole.config.learner.model_copy(update={"step_deadline_s": 3.0}))
    async with rank_stopped(whole):
        with pytest.raises(DeadlineExceeded, match=r"coordinator waited 3 s for learner-1: step 9"):
            await whole.step(batch(9)[1], version=9)
