"""A whole step of one rank, with plain PyTorch instead of DeepSpeed, compared with slow loops."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.batch import Packer, RankBatch, rank_batch, usable
from learner.policy import Policy
from learner.reinforce import Reinforcer
from tests.learner_batches import naive_logprobs, on_policy, random_group, samples_of, scored
from tests.plain_engine import PlainEngine
from tests.unit.learner.conftest import tiny_lm
from volley.errors import Diverged
from volley.objectives import BestOfK, MajAtK, MaxAtK, Mean, Objective, advantages, parse_objective
from volley.records import Group
from volley.update import Optimizer, PolicyUpdate, SequenceCorrection, check_update

REWARDS = ([1.0, 0.0, 0.3, 0.0], [0.0, 1.0, 1.0, 0.2], [0.5, 0.5, 0.5, 0.5])
STILL = Optimizer(lr=1e-30, clip_norm=None)


def groups_of(seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [random_group(rng, i) for i in range(3)]


def batch_of(groups: list[Group], spec: PolicyUpdate, valid: Any = None, version: int = 0) -> RankBatch:
    columns = [
        scored(group, rewards, valid_n=None if valid is None else valid[row])
        for row, (group, rewards) in enumerate(zip(groups, REWARDS, strict=True))
    ]
    return rank_batch(groups, columns, version=version, mask_truncated=spec.mask_truncated)


def reinforcer(
    lm: Any, spec: PolicyUpdate, *, reference: Any = None, budget: int = 1 << 20, shared: bool = True, **more: Any
) -> tuple[Reinforcer, "Recording"]:
    engine = Recording(Policy(lm, 1.0, entropy_gradient=spec.entropy_bonus > 0), more.pop("optimizer", STILL))
    pack = Packer(budget, 1 << 20 if shared else 1, shared, engine.device)
    other = None if reference is None else Policy(reference, 1.0)
    return Reinforcer(spec, engine, pack, reference=other, **more), engine  # type: ignore[arg-type]


class Recording(PlainEngine):
    """An engine that records the gradients of every update."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[dict[str, Tensor]] = []

    def update(self, step: int) -> tuple[float, float]:
        self.seen.append(self.gradients())
        return super().update(step)


def step(worker: Reinforcer, batch: RankBatch, objective: Any) -> tuple[dict[str, float], np.ndarray[Any, Any]]:
    metrics, by_id = worker.step(batch, parse_objective(objective), 0)
    return metrics, np.stack([by_id[group.group_id] for group in batch.groups])


MAX2: Objective = MaxAtK(k=2)
SPECS: dict[str, dict[str, Any]] = {
    "default": {},
    "sequences": {"ratio": "sequence", "behaviour_correction": {"kind": "sequence", "cap": 1.5}},
    "everything": {
        "aggregation": "token_mean",
        "kl": {"coefficient": 0.1, "estimator": "k3"},
        "entropy_bonus": 0.05,
        "behaviour_correction": {"kind": "token", "cap": 1.2, "mask": True},
    },
}


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


def textbook_loss(lm: Any, reference: Any, groups: list[Group], spec: PolicyUpdate) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    samples = sum(g.n for g in groups)
    tokens = sum(len(g.tokens_T) for g in groups)
    for group, rewards in zip(groups, REWARDS, strict=True):
        advantage_n = advantages(np.array(rewards), MAX2)
        theta_T, entropy_T = naive_logprobs(lm, group)
        ref_T = naive_logprobs(reference, group)[0].detach()
        start = 0
        for advantage, length in zip(advantage_n, group.lengths_n, strict=True):
            part = slice(start, start + int(length))
            start += int(length)
            theta, mu = theta_T[part], torch.from_numpy(group.logprobs_T[part]).double()
            weight = torch.exp(theta.detach() - mu)
            if spec.behaviour_correction.kind == "sequence":
                weight = weight.prod().expand(int(length))
            over = weight > spec.behaviour_correction.cap  # type: ignore[union-attr]
            masked = spec.behaviour_correction.mask  # type: ignore[union-attr]
            weight = torch.where(over, 0.0 if masked else spec.behaviour_correction.cap, weight)  # type: ignore[union-attr]
            ratio = torch.exp(theta - theta.detach())
            term = weight * (ratio.prod() / length if spec.ratio == "sequence" else ratio) * advantage
            difference = theta - ref_T[part]
            term = term - spec.kl.coefficient * (torch.exp(-difference) - 1 + difference) / group.n
            term = term + spec.entropy_bonus * entropy_T[part] / group.n
            scale = samples / tokens if spec.aggregation == "token_mean" else 1.0
            loss = loss - scale * term.sum() / len(groups)
    return loss


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


def test_samples_with_negative_advantages_are_live_too() -> None:
    worker, _ = reinforcer(tiny_lm(), PolicyUpdate())
    metrics, advantage_Gn = step(worker, batch_of(groups_of(), PolicyUpdate()), Mean())
    assert ((advantage_Gn < 0).sum(), (advantage_Gn > 0).sum()) == (5, 3)
    assert metrics["live_sample_fraction"] == pytest.approx(8 / 12)


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


def by_sample(group: Group, values_T: Any) -> list[Any]:
    """Values of a group's tokens, cut into its samples."""
    ends = np.cumsum(group.lengths_n)[:-1]
    return list(torch.tensor_split(values_T, torch.from_numpy(ends)))


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


def test_focal_weights_are_measured_over_groups_with_a_gradient() -> None:
    groups, spec, objective = groups_of(), PolicyUpdate(), Mean(focal=2.0)
    metrics, advantage_Gn = step(reinforcer(tiny_lm(), spec)[0], batch_of(groups, spec), objective)
    plain_Gn = advantages(np.array(REWARDS), Mean())
    weights = [(1 - sum(rewards) / 4) ** 2 for rewards in REWARDS]
    np.testing.assert_allclose(advantage_Gn, np.array(weights)[:, None] * plain_Gn, rtol=1e-12)
    assert metrics["focal_weight_mean"] == pytest.approx((weights[0] + weights[1]) / 2)  # the third is all equal


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
