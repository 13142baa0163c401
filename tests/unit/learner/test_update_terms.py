"""The second update of a batch, where ratios differ from 1, compared with one loop over unpadded samples."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.learner_batches import naive_logprobs
from tests.unit.learner.conftest import tiny_lm
from tests.unit.learner.reinforcers import batch_of, by_sample, groups_of, reinforcer, step
from volley.objectives import MaxAtK, Mean
from volley.records import Group
from volley.update import Optimizer, PolicyUpdate, check_update

SPECS: dict[str, dict[str, Any]] = {
    "geometric": {"ratio": "geometric", "clip_low": 3e-3, "clip_high": 4e-3, "behaviour_correction": {"kind": "none"}},
    "geometric, corrected": {
        "ratio": "geometric",
        "clip_low": 3e-3,
        "clip_high": 4e-3,
        "behaviour_correction": {"kind": "sequence", "cap": 0.05},
    },
    "cispo": {"surrogate": "cispo", "clip_low": 0.02, "clip_high": 0.02, "behaviour_correction": {"kind": "none"}},
    "cispo, corrected": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.02, "aggregation": "token_mean"},
}
SPECS["two-sided mask"] = {
    **SPECS["cispo"],
    "behaviour_correction": {"kind": "sequence", "cap": 1.5, "mask": True, "floor": 0.02},
}
SPECS["off-policy mask"] = {**SPECS["cispo, corrected"], "off_policy_mask": 0.5}
SPECS["off-policy mask, geometric"] = {**SPECS["geometric"], "off_policy_mask": 0.5}
LAYOUTS = ((1 << 20, True), (1 << 20, False), (40, True), (1, False))  # tokens of a micro-batch, shared prompts


@pytest.mark.parametrize(("budget", "shared"), LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_the_second_update_equals_the_textbook(name: str, budget: int, shared: bool) -> None:
    spec = PolicyUpdate.model_validate({**SPECS[name], "updates_per_batch": 2, "kl_sample_fraction": 1.0})
    lm, groups = tiny_lm(), groups_of()
    prox = [naive_logprobs(lm, group)[0].detach() for group in groups]
    worker, engine = reinforcer(lm, spec, budget=budget, shared=shared, optimizer=Optimizer(lr=1e-3, clip_norm=None))
    batch = batch_of(groups, spec)
    advantage_Gn = worker._prepare(batch, Mean(), 0)[1]
    textbooks: list[tuple[Tensor, Any, dict[str, float]]] = []
    update = worker.engine.update

    def compare_then_update(step: int) -> tuple[float, float]:
        loss, figures = textbook(lm, groups, prox, advantage_Gn, spec)
        textbooks.append((loss.detach(), torch.autograd.grad(loss, list(lm.parameters())), figures))
        return update(step)

    worker.engine.update = compare_then_update  # type: ignore[method-assign]
    metrics, _ = step(worker, batch, Mean())
    loss, expected, figures = textbooks[1]
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-4, abs=1e-5)
    for mine, theirs in zip(engine.seen[1].values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    for figure, share in figures.items():
        assert metrics[figure] == pytest.approx(share, abs=1e-9)
        assert 0 < share < 1, f"{figure}: the batch must have tokens on both sides"


def textbook(
    lm: Any, groups: list[Group], prox: list[Tensor], advantage_Gn: Any, spec: PolicyUpdate
) -> tuple[Tensor, dict[str, float]]:
    """The loss, and the shares of tokens that metrics report; over all groups."""
    loss = torch.zeros((), dtype=torch.float64)
    tokens = sum(len(group.tokens_T) for group in groups)
    scale = sum(group.n for group in groups) / tokens if spec.aggregation == "token_mean" else 1.0
    low, high = 1 - spec.clip_low, 1 + spec.clip_high
    clipped = outside = masked = 0
    for group, prox_T, advantage_n in zip(groups, prox, advantage_Gn, strict=True):
        columns = (naive_logprobs(lm, group)[0], prox_T, torch.from_numpy(group.logprobs_T).double())
        cut = [by_sample(group, each_T) for each_T in columns]
        for theta_t, prox_t, mu_t, advantage in zip(*cut, advantage_n, strict=True):
            weight, over_t = own_weight(prox_t - mu_t, spec)
            outside += int(over_t.expand(len(theta_t)).sum())
            far = spec.off_policy_mask is not None and float((mu_t - theta_t.detach()).mean()) > spec.off_policy_mask
            if far and advantage < 0:
                masked += len(theta_t)
                weight = torch.zeros_like(weight)
            if spec.ratio == "geometric":
                ratio = (theta_t - prox_t).mean().exp()
                gain = torch.minimum(ratio * advantage, ratio.clip(low, high) * advantage)
                over = bool(ratio > high) if advantage > 0 else bool(ratio < low)
                clipped += len(theta_t) * int(over and advantage != 0)
                loss = loss - weight * gain / len(groups)
            else:
                ratio_t = (theta_t - prox_t).exp().detach()
                loss = loss - scale * (weight * ratio_t.clip(low, high) * advantage * theta_t).sum() / len(groups)
                clipped += int(((ratio_t < low) | (ratio_t > high)).sum()) * int(advantage != 0)
    figures = {"clip_fraction": clipped / tokens}
    if spec.behaviour_correction.kind != "none":
        figures["truncated_share"] = outside / tokens
    if spec.off_policy_mask is not None:
        figures["off_policy_masked_share"] = masked / tokens
    return loss, figures


def own_weight(gap_t: Tensor, spec: PolicyUpdate) -> tuple[Tensor, Tensor]:
    """The behaviour correction of a sample or of its tokens, and where it left its range."""
    correction = spec.behaviour_correction
    if correction.kind == "none":
        return torch.ones(()), torch.zeros(())
    weight = (gap_t if correction.kind == "token" else gap_t.sum()).exp()
    kept = torch.where(weight < correction.floor, 0.0, weight)
    kept = torch.where(weight > correction.cap, 0.0 if correction.mask else correction.cap, kept)
    return kept, kept != weight


def test_a_geometric_ratio_cannot_restore_whole_weights() -> None:
    spec = PolicyUpdate.model_validate({"ratio": "geometric", "behaviour_correction": {"kind": "sequence"}})
    check_update(spec, MaxAtK(k=2))
    with pytest.raises(ValueError, match=r"write update\.ratio: sequence or token, or companion_weights: none"):
        check_update(spec, MaxAtK(k=2, companion_weights="exact"))
