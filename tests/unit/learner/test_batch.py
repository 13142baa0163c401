"""A rank's part of a batch: the smallest groups that can be used, and a rank without any."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from learner.batch import Packer, as_many, group_advantages, idle, rank_batch, sft_pieces, usable, value_advantages
from learner.records import SFTRow
from tests.learner_batches import random_group, scored
from tests.unit.learner.conftest import tiny_lm
from tests.unit.learner.reinforcers import MAX2, reinforcer
from volley.errors import JobError
from volley.objectives import MaxRL, Mean
from volley.update import PolicyUpdate

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("left", range(5))
@pytest.mark.parametrize("by", ["score", "truncation"])
def test_two_samples_that_can_be_compared_make_a_group(left: int, by: str) -> None:
    group = random_group(RNG, 7)
    kept_n = [index < left for index in range(group.n)]
    group.stopped_n[:] = kept_n if by == "truncation" else True
    each = scored(group, [0.0] * group.n, valid_n=kept_n if by == "score" else None)
    kept, dropped = usable([group], [each], mask_truncated=True)
    if left >= 2:
        assert (kept, dropped) == ([(group, each)], {})
    else:
        assert (kept, dropped) == ([], {7: f"{left} of 4 samples could be used"})
    whole, _ = usable([group], [each], mask_truncated=False)
    assert bool(whole) == (left >= 2 or by == "truncation")


@pytest.mark.parametrize("groups", [1, 2])
def test_a_group_s_weight_and_size_are_those_of_each_of_its_samples(groups: int) -> None:
    made = [random_group(RNG, index) for index in range(groups)]
    columns = [replace(scored(group, [1.0, 0.0, 0.0, 0.5]), weight=index + 0.5) for index, group in enumerate(made)]
    batch = rank_batch(made, columns, version=0, mask_truncated=False)
    assert batch.group_weights.tolist() == [index + 0.5 for index in range(groups) for _ in range(4)]
    assert batch.group_sizes.tolist() == [4] * (4 * groups)


def test_a_rank_without_groups_has_arrays_without_elements() -> None:
    batch = rank_batch([], [], version=3, mask_truncated=True)
    assert (batch.samples, batch.tokens, batch.pieces) == (0, 0, ())
    for empty in (batch.rewards, batch.group_sizes, batch.group_weights, batch.fresh_T, batch.keep_N, batch.lag_T):
        assert empty.shape == (0,)
    assert batch.per_group(batch.keep_N).shape == (0, 0)
    report = group_advantages(batch, MAX2, shaped_N=batch.rewards, log_weight_N=None)
    assert report.advantages.shape == (0, 0)
    assert report.k.shape == report.focal_weights.shape == (0,)
    assert (report.dropped, report.truncated_share) == ({}, 0.0)
    assert value_advantages(batch, Mean(), target_Gn=report.advantages, value_G=np.zeros(0)).shape == (0, 0)


def test_rewards_that_an_objective_does_not_take_are_the_jobs_fault() -> None:
    """Any other error would count as the rank's death, and the step would be repeated."""
    group = random_group(RNG, 0)
    batch = rank_batch([group], [scored(group, [-1.0, 1.0, 0.0, 1.0])], version=0, mask_truncated=False)
    with pytest.raises(JobError, match="maxrl"):
        group_advantages(batch, MaxRL(), shaped_N=batch.rewards, log_weight_N=None)


def test_a_step_without_groups_has_a_gradient_of_zero() -> None:
    """Other ranks wait for this one's part of every collective."""
    lm = tiny_lm()
    spec = PolicyUpdate.model_validate({"kl": {"coefficient": 0.1}, "updates_per_batch": 2})
    worker, engine = reinforcer(lm, spec, reference=tiny_lm())
    metrics, _ = worker.step(rank_batch([], [], version=0, mask_truncated=False), MAX2, 0)
    assert len(engine.seen) == 2
    assert not any(each.any() for seen in engine.seen for each in seen.values())
    named = ("tokens", "loss", "live_group_fraction", "live_sample_fraction", "entropy", "truncated_share")
    assert [metrics[name] for name in named] == [0.0] * len(named)
    assert not {"kl_k1", "logprob_mismatch_mean"} & set(metrics)


def test_rows_of_supervised_training_are_pieces_of_one_sample() -> None:
    def row(prompt: int, answer: int) -> SFTRow:
        ids = RNG.integers(3, 40, prompt + answer).astype(np.int32)
        return SFTRow(ids[:prompt], ids[prompt:])

    rows = [row(3, 2), row(1, 4)]
    pieces = sft_pieces(rows)
    assert [piece.lengths_n.tolist() for piece in pieces] == [[2], [4]]
    micro = Packer(1 << 20, 8, False, torch.device("cpu"))(pieces)
    assert sorted(torch.cat([each.index_T for each in micro]).tolist()) == list(range(6))


def test_an_idle_pass_scores_no_token() -> None:
    engine = reinforcer(tiny_lm(), PolicyUpdate())[1]
    scores_T, entropy_T = engine(idle())
    assert scores_T.shape == entropy_T.shape == (0,)


@pytest.mark.parametrize(("own", "others"), [(0, 0), (0, 3), (3, 0), (2, 3), (1, 1)])
def test_every_rank_passes_as_often_as_the_one_with_most(
    own: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are simulated here; the integration tests have real ones."""

    def reduced(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        assert op == dist.ReduceOp.MAX
        tensor.clamp_(min=max(others, 1))

    monkeypatch.setattr(dist, "all_reduce", reduced)
    filled = as_many(["batch"] * own, lambda: "spare", torch.device("cpu"))
    assert filled == ["batch"] * own + ["spare"] * (max(own, others, 1) - own)
