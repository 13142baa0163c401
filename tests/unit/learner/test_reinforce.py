"""A whole step of one rank, with plain PyTorch instead of DeepSpeed, compared with slow loops."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.batch import rank_batch, usable
from tests.learner_batches import naive_logprobs, on_policy, samples_of, scored
from tests.unit.learner.conftest import tiny_lm
from tests.unit.learner.reinforcers import (
    MAX2,
    REWARDS,
    SPECS,
    batch_of,
    by_sample,
    groups_of,
    reinforcer,
    step,
    textbook_loss,
)
from volley.errors import Diverged
from volley.objectives import BestOfK, MajAtK, MaxAtK, Mean, Objective, advantages, parse_objective
from volley.update import Optimizer, PolicyUpdate, SequenceCorrection, check_update


@pytest.mark.parametrize("spec", [PolicyUpdate.model_validate(each) for each in SPECS.values()], ids=list(SPECS))
def test_the_gradient_equals_the_textbook_for_every_layout_and_budget(spec: PolicyUpdate) -> None:
    """The textbook is one loop over unpadded samples; compared for both layouts, three budgets and two orders."""
    lm, reference = tiny_lm(), tiny_lm(initializer_range=0.25)
    groups = groups_of()
    parameters = list(lm.parameters())
    loss = textbook_loss(lm, reference, groups, spec)
    expected = torch.autograd.grad(loss, parameters)
    for budget, shared in ((1 << 20, True), (1 << 20, False), (40, True), (25, False), (1, False)):
        for order in (1, -1):
            worker, engine = reinforcer(lm, spec, reference=reference, budget=budget, shared=shared)
            batch = batch_of(groups, spec)
            turned = rank_batch(batch.groups[::order], batch.scored[::order], version=0, mask_truncated=False)
            metrics, _ = step(worker, turned, MAX2)
            assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
            for mine, theirs in zip(engine.seen[0].values(), expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_weight_of_a_group_scales_its_part_of_the_gradient() -> None:
    lm, spec = tiny_lm(), PolicyUpdate()
    batch = batch_of(groups_of(), spec)

    def gradient(*weights: float) -> Tensor:
        columns = [replace(each, weight=weight) for each, weight in zip(batch.scored, weights, strict=True)]
        worker, engine = reinforcer(lm, spec)
        _, advantage_Gn = step(worker, replace(batch, scored=tuple(columns)), MAX2)
        assert (advantage_Gn == step(reinforcer(lm, spec)[0], batch, MAX2)[1]).all(), "advantages are as they were"
        return torch.cat([each.reshape(-1) for each in engine.seen[0].values()])

    first, second = gradient(1.0, 0.0, 0.0), gradient(0.0, 1.0, 0.0)
    assert first.abs().max() > 1e-3
    torch.testing.assert_close(gradient(0.25, 0.5, 1.0), 0.25 * first + 0.5 * second, rtol=1e-4, atol=1e-6)


def test_samples_with_negative_advantages_are_live_too() -> None:
    worker, _ = reinforcer(tiny_lm(), PolicyUpdate())
    metrics, advantage_Gn = step(worker, batch_of(groups_of(), PolicyUpdate()), Mean())
    assert ((advantage_Gn < 0).sum(), (advantage_Gn > 0).sum()) == (5, 3)
    assert metrics["live_sample_fraction"] == pytest.approx(8 / 12)


def test_dropped_samples_do_not_affect_their_group() -> None:
    """With an unscored sample and a cut one, gradient and advantages equal those of a batch without them."""
    lm, spec = tiny_lm(), PolicyUpdate.model_validate({"mask_truncated": True, "entropy_bonus": 0.1})
    groups = groups_of()
    stopped = np.array([True, True, False, True])
    cut = [groups[0], replace(groups[1], stopped_n=stopped), groups[2]]
    valid = [[True, False, True, True], [True] * 4, [True] * 4]
    worker, engine = reinforcer(lm, spec)
    _, advantage_Gn = step(worker, batch_of(cut, spec, valid), MAX2)
    assert advantage_Gn[0][1] == advantage_Gn[1][2] == 0.0
    kept_n = np.array([0, 2, 3])
    np.testing.assert_allclose(advantage_Gn[0][kept_n], advantages(np.array(REWARDS[0])[kept_n], MAX2))
    loss = torch.zeros((), dtype=torch.float64)
    for row, group in enumerate(cut):
        theta_T, entropy_T = naive_logprobs(lm, group)
        weight_T = torch.exp(theta_T.detach() - torch.from_numpy(group.logprobs_T)).clamp(max=2.0)
        keep_n = np.array(valid[row]) & group.stopped_n
        keep_T = torch.from_numpy(np.repeat(keep_n, group.lengths_n))
        advantage_T = torch.from_numpy(np.repeat(advantage_Gn[row], group.lengths_n))
        loss = loss - (keep_T * (weight_T * advantage_T * theta_T + 0.1 / keep_n.sum() * entropy_T)).sum() / 3
    for mine, theirs in zip(engine.seen[0].values(), torch.autograd.grad(loss, list(lm.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_kl_in_the_reward_shapes_the_advantages() -> None:
    lm, reference = tiny_lm(), tiny_lm(initializer_range=0.25)
    spec = PolicyUpdate.model_validate({"kl": {"coefficient": 0.2, "estimator": "k1", "where": "reward"}})
    groups = groups_of()
    worker, _ = reinforcer(lm, spec, reference=reference)
    _, advantage_Gn = step(worker, batch_of(groups, spec), Mean())
    for row, group in enumerate(groups):
        k1_T = (naive_logprobs(lm, group)[0] - naive_logprobs(reference, group)[0]).detach().numpy()
        k1_n = [part.sum() for part in np.split(k1_T, np.cumsum(group.lengths_n)[:-1])]
        np.testing.assert_allclose(
            advantage_Gn[row], advantages(np.array(REWARDS[row]) - 0.2 * np.array(k1_n), Mean()), rtol=1e-4, atol=1e-6
        )


def test_companion_weights_are_the_samples_importance_weights() -> None:
    lm, spec = tiny_lm(), PolicyUpdate(behaviour_correction=SequenceCorrection())
    groups = groups_of()
    objective = MaxAtK(k=2, companion_weights="exact", weight_cap=0.05)
    worker, _ = reinforcer(lm, spec)
    metrics, advantage_Gn = step(worker, batch_of(groups, spec), objective)
    for row, group in enumerate(groups):
        gap_T = naive_logprobs(lm, group)[0].detach().numpy() - group.logprobs_T
        log_weight_n = np.array([part.sum() for part in np.split(gap_T, np.cumsum(group.lengths_n)[:-1])])
        expected_n = advantages(np.array(REWARDS[row]), objective, log_weights=log_weight_n)
        np.testing.assert_allclose(advantage_Gn[row], expected_n, rtol=1e-4, atol=1e-7)
    gaps = [naive_logprobs(lm, group)[0].detach() - torch.from_numpy(group.logprobs_T) for group in groups]
    weights = [float(part.sum()) for group, gap in zip(groups, gaps, strict=True) for part in by_sample(group, gap)]
    assert metrics["companion_truncated_share"] == pytest.approx(np.mean(np.array(weights) > np.log(0.05)))
    assert 0 < metrics["companion_truncated_share"] < 1


def test_companion_weights_too_large_for_float32_are_named_as_such() -> None:
    lm, spec = tiny_lm(), PolicyUpdate(behaviour_correction=SequenceCorrection())
    groups = [on_policy(group, lm) for group in groups_of()]
    far_T = groups[0].logprobs_T - np.float32(20.0)  # the policy likes each of their tokens e^20 times as much
    groups = [replace(groups[0], logprobs_T=far_T), *groups[1:]]
    worker, engine = reinforcer(lm, spec)
    with pytest.raises(Diverged, match=r"importance weights make an advantage of \d.*write objective\.weight_cap"):
        step(worker, batch_of(groups, spec), MaxAtK(k=2, companion_weights="exact"))
    assert not engine.seen
    capped = MaxAtK(k=2, companion_weights="exact", weight_cap=2.0)
    for objective in (capped, MaxAtK(k=2, companion_weights="self_normalised")):
        metrics, _ = step(worker, batch_of(groups, spec), objective)
        assert np.isfinite(metrics["loss"])
        assert all(torch.isfinite(each).all() for each in engine.seen[-1].values())


def test_an_advantage_is_measured_with_the_weight_that_the_correction_gives_its_own_sample() -> None:
    """A companion that outweighs a sample by far makes its advantage huge, but the sample itself has next to none."""
    lm, spec = tiny_lm(), PolicyUpdate(behaviour_correction=SequenceCorrection())
    groups = [on_policy(group, lm) for group in groups_of()]
    shift_n = np.array([100.0, 0.0, 100.0, 100.0])
    lengths_n = groups[0].lengths_n
    unlikely_T = groups[0].logprobs_T + np.repeat(shift_n / lengths_n, lengths_n).astype(np.float32)
    groups = [replace(groups[0], logprobs_T=unlikely_T), *groups[1:]]
    worker, _ = reinforcer(lm, spec)
    metrics, advantage_Gn = step(worker, batch_of(groups, spec), MaxAtK(k=2, companion_weights="self_normalised"))
    assert np.abs(advantage_Gn[0]).max() > 1e30
    assert np.isfinite(metrics["loss"])


def test_voters_have_importance_weights_too() -> None:
    lm, spec = tiny_lm(), PolicyUpdate(behaviour_correction=SequenceCorrection())
    groups = groups_of()
    objective = MajAtK(k=3, companion_weights="exact", weight_cap=0.05)
    worker, _ = reinforcer(lm, spec)
    batch = batch_of(groups, spec)
    metrics, advantage_Gn = step(worker, batch, objective)
    over = 0
    for row, group in enumerate(groups):
        gap_T = naive_logprobs(lm, group)[0].detach() - torch.from_numpy(group.logprobs_T)
        log_weight_n = np.array([float(part.sum()) for part in by_sample(group, gap_T)])
        over += int((log_weight_n > np.log(0.05)).sum())
        answers_n = batch.scored[row].answers_n
        expected_n = advantages(np.array(REWARDS[row]), objective, log_weights=log_weight_n, answers=answers_n)
        np.testing.assert_allclose(advantage_Gn[row], expected_n, rtol=1e-4, atol=1e-9)
    assert advantage_Gn.any()
    assert metrics["companion_truncated_share"] == pytest.approx(over / 12)
    assert 0 < over < 12


def test_several_updates_per_batch_clip_around_the_first_log_probs() -> None:
    lm = tiny_lm()
    spec = PolicyUpdate(updates_per_batch=3, clip_low=0.01, clip_high=0.01)
    worker, engine = reinforcer(lm, spec, optimizer=Optimizer(lr=3e-3))
    metrics, _ = step(worker, batch_of(groups_of(), spec), MAX2)
    assert len(engine.seen) == 3
    assert metrics["ratio_max"] > 1.01
    assert metrics["clip_fraction"] > 0


@pytest.mark.parametrize("objective", [MAX2, Mean()], ids=lambda each: each.kind)
@pytest.mark.parametrize("terms", [{}, {"entropy_bonus": 0.1}, {"kl": {"coefficient": 0.1}}], ids=str)
def test_leaving_out_samples_without_a_gradient_changes_nothing(terms: dict[str, Any], objective: Objective) -> None:
    """For the mean, whose samples below it have negative advantages, as for the best of two."""
    lm, reference = tiny_lm(), tiny_lm(initializer_range=0.25)
    groups = groups_of()[::-1]  # the group without signal last, where it is not measured
    columns = [scored(group, row) for group, row in zip(groups, REWARDS, strict=True)]
    seen = {}
    for share in (1.0, 0.01):
        spec = PolicyUpdate.model_validate({**terms, "kl_sample_fraction": share})
        worker, engine = reinforcer(lm, spec, reference=reference)
        batch = rank_batch(groups, columns, version=0, mask_truncated=False)
        metrics, advantage_Gn = step(worker, batch, objective)
        seen[share] = (metrics, list(engine.seen[0].values()))
    for whole, live in zip(seen[1.0][1], seen[0.01][1], strict=True):
        torch.testing.assert_close(live, whole, rtol=1e-4, atol=1e-6)
    assert seen[0.01][0]["loss"] == pytest.approx(seen[1.0][0]["loss"], rel=1e-4, abs=1e-6)
    tokens = sum(len(group.tokens_T) for group in groups)
    assert seen[1.0][0]["computed_tokens"] == seen[0.01][0]["tokens"] == tokens
    spared = sum(
        int(group.lengths_n[advantage_n == 0].sum())
        for group, advantage_n in zip(groups[1:], advantage_Gn[1:], strict=True)
    )
    assert spared > 0
    assert seen[0.01][0]["computed_tokens"] == tokens - (0 if terms else spared), "terms of every token need them all"


@pytest.mark.parametrize("aggregation", ["sequence_sum", "sequence_mean", "token_mean"])
def test_aggregation_counts_the_samples_that_stay(aggregation: str) -> None:
    """Two samples left their groups: neither they nor their tokens are in any mean."""
    lm = tiny_lm()
    spec = PolicyUpdate.model_validate({"aggregation": aggregation, "behaviour_correction": {"kind": "none"}})
    groups, valid = groups_of(), [[True, False, True, True], [True] * 4, [False, True, True, True]]
    worker, engine = reinforcer(lm, spec)
    _, advantage_Gn = step(worker, batch_of(groups, spec, valid), Mean())
    kept = sum(map(sum, valid))
    tokens = sum(int(group.lengths_n[np.array(keep)].sum()) for group, keep in zip(groups, valid, strict=True))
    loss = torch.zeros((), dtype=torch.float64)
    for group, keep, advantage_n in zip(groups, valid, advantage_Gn, strict=True):
        for sample, (theta_t, stays) in enumerate(
            zip(by_sample(group, naive_logprobs(lm, group)[0]), keep, strict=True)
        ):
            if stays:
                scale = {"sequence_sum": 1.0, "sequence_mean": 1 / len(theta_t), "token_mean": kept / tokens}[
                    aggregation
                ]
                loss = loss - scale * advantage_n[sample] * theta_t.sum() / 3
    for mine, theirs in zip(engine.seen[0].values(), torch.autograd.grad(loss, list(lm.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_votes_and_the_k_of_each_prompt_reach_the_advantages() -> None:
    lm, spec = tiny_lm(), PolicyUpdate()
    groups = groups_of()
    rewards = [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]]
    answers = [[0, 1, 0, 2], [3, 3, 5, 5], [1, 1, 1, 0]]
    columns = [
        replace(scored(group, row), answers_n=np.array(ids, np.int32))
        for group, row, ids in zip(groups, rewards, answers, strict=True)
    ]
    batch = rank_batch(groups, columns, version=0, mask_truncated=False)
    _, voted_Gn = step(reinforcer(lm, spec)[0], batch, MajAtK(k=3))
    np.testing.assert_allclose(voted_Gn, advantages(np.array(rewards), MajAtK(k=3), answers=np.array(answers)))
    assert voted_Gn.any()
    adapted = [replace(each, k=k) for each, k in zip(columns, (2, 3, 4), strict=True)]
    _, own_k_Gn = step(reinforcer(lm, spec)[0], rank_batch(groups, adapted, version=0, mask_truncated=False), MAX2)
    expected_Gn = [advantages(np.array(row), MaxAtK(k=k)) for row, k in zip(rewards, (2, 3, 4), strict=True)]
    np.testing.assert_allclose(own_k_Gn, expected_Gn)


def test_groups_with_nothing_to_compare_are_dropped_with_a_reason() -> None:
    groups = groups_of()
    columns = [scored(group, row) for group, row in zip(groups, REWARDS, strict=True)]
    one_left = replace(groups[1], stopped_n=np.array([True, False, False, False]))
    kept, dropped = usable([groups[0], one_left, groups[2]], columns, mask_truncated=True)
    assert [group.group_id for group, _ in kept] == [groups[0].group_id, groups[2].group_id]
    assert dropped == {one_left.group_id: "1 of 4 samples could be used"}
    assert not usable([groups[0], one_left], columns[:2], mask_truncated=False)[1]


def test_ranks_and_weights_reach_the_advantages() -> None:
    groups, spec, rng = groups_of(), PolicyUpdate(), np.random.default_rng(5)
    ranks_Gn = rng.permuted(np.tile(np.array([0.0, 1.0, 1.0, 2.0]), (3, 1)), axis=-1)
    columns = [
        replace(scored(group, rewards), ranks_n=ranks_n)
        for group, rewards, ranks_n in zip(groups, REWARDS, ranks_Gn, strict=True)
    ]
    batch = rank_batch(groups, columns, version=0, mask_truncated=False)
    for objective in (BestOfK(k=3), BestOfK(weights={1: 0.5, 4: 0.5}), MaxAtK(weights={1: 0.5, 4: 0.5})):
        _, advantage_Gn = step(reinforcer(tiny_lm(), spec)[0], batch, objective)
        np.testing.assert_allclose(advantage_Gn, advantages(np.array(REWARDS), objective, ranks=ranks_Gn), rtol=1e-12)
    with pytest.raises(ValueError, match="best_of_k needs ranks="):
        step(reinforcer(tiny_lm(), spec)[0], batch_of(groups, spec), BestOfK(k=3))


@pytest.mark.parametrize(
    ("update", "objective", "message"),
    [
        ({}, {"kind": "max_at_k", "k": 2, "companion_weights": "exact"}, "kind: sequence"),
        ({}, {"kind": "best_of_k", "k": 2, "companion_weights": "exact"}, "kind: sequence"),
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, {"kind": "mean"}, "only noise: write k2"),
        ({"kl": {"coefficient": 0.1, "where": "reward"}}, {"kind": "mean"}, "estimator: k3 .* write kl.estimator: k1"),
        (
            {"kl": {"coefficient": 0.1, "where": "reward", "estimator": "k2"}},
            {"kind": "mean"},
            "estimator: k2 .* write kl.estimator: k1",
        ),
        (
            {"kl": {"coefficient": 0.1, "where": "reward", "estimator": "k1"}},
            {"kind": "mean", "focal": 1.0},
            "write kl.where: loss, or focal: 0",
        ),
        (
            {"kl": {"coefficient": 0.1, "where": "reward", "estimator": "k1"}},
            {"kind": "mean", "normalize": "std"},
            "write kl.where: loss, or normalize: none",
        ),
        *(
            ({"kl": {"coefficient": 0.1, "where": "reward", "estimator": "k1"}}, objective, "write kl.where: loss")
            for objective in (
                {"kind": "max_at_k", "k": 2},
                {"kind": "maj_at_k", "k": 2},
                {"kind": "best_of_k", "k": 2},
                {"kind": "softmax", "beta": 1.0},
                {"kind": "maxrl"},
                {"kind": "pass_at_k_analytic", "k": 2},
                {"kind": "risk_sensitive", "beta": 1.0},
            )
        ),
    ],
)
def test_misleading_settings_are_rejected_with_advice(
    update: dict[str, Any], objective: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_update(PolicyUpdate.model_validate(update), parse_objective(objective))


def test_samples_of_a_group_are_slices_of_its_tokens() -> None:
    group = groups_of()[0]
    assert [len(sample) for sample in samples_of(group)] == group.lengths_n.tolist()
