"""Metrics of a step at the edges where a wrong constant or sign would show: one group, one dead group, no token."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner.batch import RankBatch, rank_batch
from learner.reinforce import LARGEST_ADVANTAGE
from tests.learner_batches import naive_logprobs, on_policy, random_group, scored
from tests.unit.learner.conftest import tiny_lm
from tests.unit.learner.reinforcers import MAX2, Recording, batch_of, groups_of, reinforcer, step
from volley.objectives import MaxAtK
from volley.update import PolicyUpdate, SequenceCorrection


def one_group(rewards: tuple[float, ...], *, n: int = 2, **valid: Any) -> RankBatch:
    group = random_group(np.random.default_rng(3), 0, n=n, length=(1, 3))
    return rank_batch([group], [scored(group, rewards, **valid)], version=0, mask_truncated=False)


def test_the_shares_of_a_step_with_one_group_are_whole() -> None:
    spec = PolicyUpdate(behaviour_correction=SequenceCorrection())
    batch = one_group((1.0, 0.0, 0.0), n=3)
    corrected = {"kind": "max_at_k", "k": 2, "companion_weights": "exact", "weight_cap": 1e-9}
    metrics, advantage_Gn = step(reinforcer(tiny_lm(), spec)[0], batch, corrected)
    assert metrics["companion_truncated_share"] == 1.0, "every weight is above the cap"
    assert metrics["live_sample_fraction"] == np.mean(advantage_Gn != 0)
    assert metrics["tokens"] == batch.tokens
    focal = {"kind": "max_at_k", "k": 2, "focal": 1.0, "companion_weights": "none"}
    metrics, _ = step(reinforcer(tiny_lm(), spec)[0], batch, focal)
    assert metrics["focal_weight_mean"] == pytest.approx(1 - 1 / 3)
    assert metrics["live_group_fraction"] == 1.0


def test_the_shares_of_a_dead_group_are_zero() -> None:
    worker, engine = reinforcer(tiny_lm(), PolicyUpdate())
    metrics, advantage_Gn = step(worker, one_group((1.0, 1.0)), {"kind": "max_at_k", "k": 2, "focal": 1.0})
    assert not advantage_Gn.any()
    assert metrics["live_group_fraction"] == metrics["live_sample_fraction"] == metrics["focal_weight_mean"] == 0.0
    assert not any(each.any() for each in engine.seen[0].values())


@pytest.mark.parametrize("aggregation", ["sequence_sum", "sequence_mean", "token_mean"])
def test_one_group_of_short_samples_weighs_as_much_as_any(aggregation: str) -> None:
    """The divisors are the counts themselves: twice the same group has the mean gradient of one."""
    spec = PolicyUpdate.model_validate({"aggregation": aggregation})
    one = one_group((1.0, 0.0))
    twice = rank_batch(
        [one.groups[0], replace(one.groups[0], group_id=1)],
        [one.scored[0], replace(one.scored[0], meta=replace(one.scored[0].meta, group_id=1))],
        version=0,
        mask_truncated=False,
    )
    gradients = []
    for batch in (one, twice):
        worker, engine = reinforcer(tiny_lm(), spec)
        step(worker, batch, MAX2)
        gradients.append(torch.cat([each.reshape(-1) for each in engine.seen[0].values()]))
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def test_the_seconds_of_a_step_are_those_it_took() -> None:
    worker, _ = reinforcer(tiny_lm(), PolicyUpdate())
    batch = batch_of(groups_of(), worker.spec)
    begun = time.perf_counter()
    metrics, _ = step(worker, batch, MAX2)
    took = time.perf_counter() - begun
    within = metrics["seconds_prepare"] + metrics["seconds_update"]
    assert metrics["seconds_prepare"] > 0 < metrics["seconds_update"]
    assert within <= took
    assert metrics["tokens_per_second"] * within == pytest.approx(batch.tokens)


def test_only_the_last_part_of_an_update_is_announced_as_the_last() -> None:
    """The engine reduces the gradients over the ranks there: earlier is wrong, and every time is slow."""
    worker, engine = reinforcer(tiny_lm(), PolicyUpdate(updates_per_batch=2), budget=25, shared=False)
    flags: list[bool] = []

    class Watched(Recording):
        def __call__(self, *inputs: Any, last: bool = False) -> Any:
            if torch.is_grad_enabled():
                flags.append(last)
            return super().__call__(*inputs, last=last)

    engine.__class__ = Watched
    step(worker, batch_of(groups_of(), worker.spec), MAX2)
    assert len(flags) > 4
    half = len(flags) // 2
    assert flags == 2 * [*[False] * (half - 1), True]


def test_a_sample_that_the_policy_has_left_does_not_end_the_run() -> None:
    """Its own weight, which the correction applies, makes up for whatever its companions' weights are."""
    lm = tiny_lm()
    spec = PolicyUpdate(behaviour_correction=SequenceCorrection())
    groups = [on_policy(group, lm) for group in groups_of()]
    lengths_n = groups[0].lengths_n
    gone_T = np.repeat(np.array([90.0, 0.0, 0.0, 0.0]) / lengths_n, lengths_n).astype(np.float32)
    groups[0] = replace(groups[0], logprobs_T=groups[0].logprobs_T + gone_T)
    weight = float((naive_logprobs(lm, groups[0])[0].detach() - torch.from_numpy(groups[0].logprobs_T)).sum())
    assert np.exp(-weight) > LARGEST_ADVANTAGE
    worker, engine = reinforcer(lm, spec)
    metrics, _ = step(worker, batch_of(groups, spec), MaxAtK(k=2, companion_weights="exact"))
    assert np.isfinite(metrics["loss"])
    assert all(torch.isfinite(each).all() for each in engine.seen[0].values())


@pytest.mark.parametrize("coefficient", [0.0, 0.1], ids=["no penalty", "penalty"])
def test_divergences_are_means_over_the_tokens_of_measured_groups(coefficient: float) -> None:
    """A penalty needs the reference at every token; what is reported is of the measured groups all the same."""
    lm, reference = tiny_lm(), tiny_lm(initializer_range=0.25)
    spec = PolicyUpdate.model_validate({"kl_sample_fraction": 0.5, "kl": {"coefficient": coefficient}})
    groups = groups_of()
    worker, _ = reinforcer(lm, spec, reference=reference, budget=25)
    metrics, _ = step(worker, batch_of(groups, spec), MAX2)
    gaps = [(naive_logprobs(lm, g)[0] - naive_logprobs(reference, g)[0]).detach().numpy() for g in groups[:2]]
    gap_T = np.concatenate(gaps)
    assert metrics["kl_k1"] == pytest.approx(gap_T.mean(), rel=1e-4)
    assert metrics["kl_k3"] == pytest.approx((np.exp(-gap_T) - 1 + gap_T).mean(), rel=1e-4)
