"""What a step of one rank reports of itself, against slow loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.learner_batches import naive_logprobs, on_policy
from tests.unit.learner.conftest import tiny_lm
from tests.unit.learner.reinforcers import (
    MAX2,
    REWARDS,
    batch_of,
    groups_of,
    reinforcer,
    step,
)
from volley.objectives import Mean, advantages
from volley.update import Optimizer, PolicyUpdate


def test_on_policy_all_ratios_are_one() -> None:
    lm, spec = tiny_lm(), PolicyUpdate()
    worker, _ = reinforcer(lm, spec, reference=lm)
    groups = [on_policy(group, lm) for group in groups_of()]
    metrics, _ = step(worker, batch_of(groups, spec), MAX2)
    assert metrics["ratio_mean"] == metrics["ratio_max"] == 1.0
    assert metrics["correction_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["logprob_mismatch_max"] < 1e-6
    assert metrics["clip_fraction"] == metrics["truncated_share"] == 0.0
    assert abs(metrics["kl_k3"]) < 1e-9
    assert not {"companion_truncated_share", "off_policy_masked_share", "focal_weight_mean"} & metrics.keys()
    assert metrics["tokens"] == sum(len(group.tokens_T) for group in groups)
    assert metrics["live_group_fraction"] == pytest.approx(2 / 3)  # the third group's rewards are all equal
    assert metrics["live_sample_fraction"] == pytest.approx(5 / 12)  # best of two: the worst sample is never the best


def test_only_samples_wholly_under_the_trained_version_count_as_mismatch() -> None:
    """The last token of a sample may be fresh, but it attended to keys and values of older weights."""
    lm, spec = tiny_lm(), PolicyUpdate()
    worker, _ = reinforcer(lm, spec)
    groups = groups_of()
    starts_n = np.cumsum(groups[0].lengths_n) - groups[0].lengths_n
    versions_T = np.zeros_like(groups[0].versions_T)
    whole_T = np.zeros(len(versions_T), np.bool_)
    first, second = (slice(starts_n[i], starts_n[i] + groups[0].lengths_n[i]) for i in range(2))
    versions_T[first], whole_T[first] = 1, True
    versions_T[second.stop - 1] = 1
    groups = [replace(groups[0], versions_T=versions_T), *groups[1:]]
    metrics, _ = step(worker, batch_of(groups, spec, version=1), MAX2)
    own_T = naive_logprobs(lm, groups[0])[0].detach().numpy()
    gaps_T = np.abs(own_T - groups[0].logprobs_T)[whole_T]
    assert metrics["logprob_mismatch_mean"] == pytest.approx(gaps_T.mean(), rel=1e-5)
    assert metrics["logprob_mismatch_max"] == pytest.approx(gaps_T.max(), rel=1e-5)


def test_a_batch_without_fresh_tokens_has_no_mismatch() -> None:
    lm, spec = tiny_lm(), PolicyUpdate()
    worker, _ = reinforcer(lm, spec)
    metrics, _ = step(worker, batch_of(groups_of(), spec, version=1), MAX2)
    assert not [name for name in metrics if name.startswith(("logprob_mismatch", "kl_"))]


def test_the_share_of_clipped_updates_is_of_all_updates_of_the_batch() -> None:
    """The first update's norm is over the limit; the others' are not, with the ratio outside its range."""
    lm = tiny_lm()
    spec = PolicyUpdate(updates_per_batch=4, clip_low=0.01, clip_high=0.01)
    worker, engine = reinforcer(lm, spec, optimizer=Optimizer(lr=3e-2, clip_norm=None))
    step(worker, batch_of(groups_of(), spec), MAX2)
    norms = [float(torch.stack([each.norm() for each in seen.values()]).norm()) for seen in engine.seen]
    limit = sorted(norms)[1] * 1.001
    worker, _ = reinforcer(tiny_lm(), spec, optimizer=Optimizer(lr=3e-2, clip_norm=max(norms) * 1.001))
    assert step(worker, batch_of(groups_of(), spec), MAX2)[0]["clipped_share"] == 0.0
    worker, engine = reinforcer(tiny_lm(), spec, optimizer=Optimizer(lr=3e-2, clip_norm=limit))
    metrics, _ = step(worker, batch_of(groups_of(), spec), MAX2)
    norms = [float(torch.stack([each.norm() for each in seen.values()]).norm()) for seen in engine.seen]
    assert metrics["clipped_share"] == sum(norm > limit for norm in norms) / 4
    assert 0 < metrics["clipped_share"] < 1


def test_a_share_of_the_groups_is_enough_to_log_the_divergence() -> None:
    lm, reference = tiny_lm(), tiny_lm(initializer_range=0.25)
    spec = PolicyUpdate(kl_sample_fraction=0.34)
    groups = groups_of()
    worker, _ = reinforcer(lm, spec, reference=reference)
    metrics, _ = step(worker, batch_of(groups, spec), MAX2)
    gaps = [(naive_logprobs(lm, g)[0] - naive_logprobs(reference, g)[0]).detach().numpy() for g in groups[:2]]
    assert metrics["kl_k1"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-4)


def test_figures_are_means_over_the_tokens_of_measured_groups() -> None:
    """Of three groups two are measured; every figure is theirs alone, though all tokens are computed."""
    lm = tiny_lm()
    spec = PolicyUpdate.model_validate(
        {"kl_sample_fraction": 0.5, "entropy_bonus": 0.01, "behaviour_correction": {"kind": "token", "cap": 1.2}}
    )
    groups = groups_of()
    worker, _ = reinforcer(lm, spec)
    metrics, _ = step(worker, batch_of(groups, spec), MAX2)
    scores = [naive_logprobs(lm, group) for group in groups[:2]]
    entropy_T = torch.cat([entropy for _, entropy in scores]).detach().numpy()
    weight_T = np.exp(
        torch.cat([theta for theta, _ in scores]).detach().numpy()
        - np.concatenate([group.logprobs_T for group in groups[:2]])
    )
    assert metrics["computed_tokens"] == sum(len(group.tokens_T) for group in groups)
    assert metrics["entropy"] == pytest.approx(entropy_T.mean(), rel=1e-5)
    assert metrics["correction_mean"] == pytest.approx(np.minimum(weight_T, 1.2).mean(), rel=1e-4)
    assert abs(metrics["correction_mean"] - 1) > 0.05
    assert metrics["truncated_share"] == pytest.approx((weight_T > 1.2).mean())
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    gap_T = np.abs(np.log(weight_T))
    assert metrics["logprob_mismatch_mean"] == pytest.approx(gap_T.mean(), rel=1e-4)
    assert metrics["logprob_mismatch_max"] == pytest.approx(gap_T.max(), rel=1e-4)


def test_ratios_and_clipping_are_measured_against_the_anchor() -> None:
    lm = tiny_lm()
    spec = PolicyUpdate(updates_per_batch=2, clip_low=0.01, clip_high=0.01, kl_sample_fraction=0.5)
    groups = groups_of()
    before = [naive_logprobs(lm, group)[0].detach() for group in groups]
    worker, _ = reinforcer(lm, spec, optimizer=Optimizer(lr=3e-3, clip_norm=None))
    captured: list[list[Tensor]] = []
    update = worker.engine.update

    def capture(step: int) -> tuple[float, float]:
        captured.append([naive_logprobs(lm, group)[0].detach() for group in groups])
        return update(step)

    worker.engine.update = capture  # type: ignore[method-assign]
    metrics, advantage_Gn = step(worker, batch_of(groups, spec), Mean())
    ratio_T = torch.cat([now - then for now, then in zip(captured[1][:2], before[:2], strict=True)]).exp().numpy()
    advantage_T = np.concatenate([np.repeat(a, g.lengths_n) for a, g in zip(advantage_Gn, groups[:2], strict=False)])
    clipped_T = np.where(advantage_T > 0, ratio_T > 1.01, ratio_T < 0.99) & (advantage_T != 0)
    assert metrics["ratio_mean"] == pytest.approx(ratio_T.mean(), rel=1e-4)
    assert metrics["clip_fraction"] == pytest.approx(clipped_T.mean(), abs=1e-9)
    assert 0 < metrics["clip_fraction"] < 1


def test_focal_weights_are_measured_over_groups_with_a_gradient() -> None:
    groups, spec, objective = groups_of(), PolicyUpdate(), Mean(focal=2.0)
    metrics, advantage_Gn = step(reinforcer(tiny_lm(), spec)[0], batch_of(groups, spec), objective)
    plain_Gn = advantages(np.array(REWARDS), Mean())
    weights = [(1 - sum(rewards) / 4) ** 2 for rewards in REWARDS]
    np.testing.assert_allclose(advantage_Gn, np.array(weights)[:, None] * plain_Gn, rtol=1e-12)
    assert metrics["focal_weight_mean"] == pytest.approx((weights[0] + weights[1]) / 2)  # the third is all equal
