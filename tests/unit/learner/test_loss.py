"""The policy loss compared with a second implementation in slow loops: values and hand-written gradients."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner.loss import LossInputs, kl_estimate, policy_loss, sample_weights, value_loss
from tests.unit.learner.loss_oracle import (
    LENGTHS,
    MASKED,
    VOCABULARY,
    WIDTH,
    Problem,
    hand_gradient,
    inputs,
    oracle_keeps,
    oracle_logprobs,
    oracle_loss,
    oracle_ratio,
    small_problem,
    torch_loss,
)
from volley.update import PolicyUpdate


@pytest.fixture(scope="module")
def problem() -> Problem:
    return small_problem()


SPECS: dict[str, dict[str, Any]] = {
    "plain": {"behaviour_correction": {"kind": "none"}},
    "asymmetric clip": {"clip_low": 0.1, "clip_high": 0.4, "behaviour_correction": {"kind": "none"}},
    "sequence ratio": {"ratio": "sequence", "behaviour_correction": {"kind": "none"}},
    "sequence ratio, mean": {"ratio": "sequence", "aggregation": "sequence_mean"},
    "geometric ratio": {"ratio": "geometric", "clip_low": 0.05, "clip_high": 0.08},
    "geometric ratio, corrected": {
        "ratio": "geometric",
        "behaviour_correction": {"kind": "sequence", "cap": 1.3},
        "kl": {"coefficient": 0.3, "estimator": "k3"},
    },
    "cispo": {"surrogate": "cispo", "behaviour_correction": {"kind": "none"}},
    "cispo, only an upper bound": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.3},
    "cispo, token mean": {"surrogate": "cispo", "aggregation": "token_mean", "entropy_bonus": 0.1},
    "no lower bound": {"clip_low": 1.0},
    "token correction": {"behaviour_correction": {"kind": "token", "cap": 1.3}},
    "token correction, masked": {"behaviour_correction": {"kind": "token", "cap": 1.3, "mask": True}},
    "sequence correction": {"behaviour_correction": {"kind": "sequence", "cap": 1.3}},
    "sequence correction, masked": {"behaviour_correction": {"kind": "sequence", "cap": 1.3, "mask": True}},
    "sequence ratio and correction": {"ratio": "sequence", "behaviour_correction": {"kind": "sequence", "cap": 1.3}},
    "token floor": {"behaviour_correction": {"kind": "token", "cap": 1.3, "floor": 0.8}},
    "two-sided token mask": {"behaviour_correction": {"kind": "token", "cap": 1.3, "mask": True, "floor": 0.8}},
    "two-sided sequence mask": {"behaviour_correction": {"kind": "sequence", "cap": 1.3, "mask": True, "floor": 0.8}},
    "off-policy mask": {"off_policy_mask": 0.06, "kl": {"coefficient": 0.3}, "entropy_bonus": 0.1},
    "off-policy mask, geometric": {"off_policy_mask": 0.06, "ratio": "geometric"},
    "off-policy mask, cispo": {"off_policy_mask": 0.06, "surrogate": "cispo"},
    "k1": {"kl": {"coefficient": 0.3, "estimator": "k1"}},
    "k2": {"kl": {"coefficient": 0.3, "estimator": "k2"}},
    "k3": {"kl": {"coefficient": 0.3, "estimator": "k3"}},
    "kl in the reward": {"kl": {"coefficient": 0.3, "estimator": "k1", "where": "reward"}},
    "entropy": {"entropy_bonus": 0.2},
    "sequence mean": {"aggregation": "sequence_mean"},
    "token mean": {"aggregation": "token_mean"},
    "everything": {
        "clip_low": 0.1,
        "clip_high": 0.3,
        "ratio": "sequence",
        "behaviour_correction": {"kind": "token", "cap": 1.2},
        "aggregation": "token_mean",
        "kl": {"coefficient": 0.1, "estimator": "k3"},
        "entropy_bonus": 0.05,
    },
}


@pytest.mark.parametrize("spec", [PolicyUpdate.model_validate(each) for each in SPECS.values()], ids=list(SPECS))
def test_value_and_gradient_equal_the_slow_implementation(problem: Problem, spec: PolicyUpdate) -> None:
    weights_VH = torch.from_numpy(problem.weights_VH).requires_grad_()
    loss = torch_loss(problem, spec, weights_VH)
    (by_autograd_VH,) = torch.autograd.grad(loss, weights_VH)
    assert float(loss.detach()) == pytest.approx(oracle_loss(problem, spec, problem.weights_VH), rel=1e-12)
    np.testing.assert_allclose(by_autograd_VH.numpy(), hand_gradient(problem, spec), rtol=1e-10, atol=1e-12)
    rng = np.random.default_rng(0)
    for direction_VH in rng.normal(size=(3, VOCABULARY, WIDTH)):
        step = 1e-6 * direction_VH
        ahead, behind = (oracle_loss(problem, spec, problem.weights_VH + sign * step) for sign in (1, -1))
        slope = float((by_autograd_VH.numpy() * direction_VH).sum())
        assert (ahead - behind) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_the_problem_crosses_every_threshold(problem: Problem) -> None:
    theta_T = oracle_logprobs(problem.weights_VH, problem.features_TH, problem.token_T)[0]
    ratio_T = np.exp(theta_T - problem.prox_T)
    sign_T = np.sign(problem.advantage_N[problem.sample_T])
    for sign in (-1, 1):
        mine = sign_T == sign
        assert (ratio_T[mine] < 0.8).any()
        assert (ratio_T[mine] > 1.2).any()
        assert ((ratio_T[mine] > 0.8) & (ratio_T[mine] < 1.2)).any()
    log_weight_T = problem.prox_T - problem.mu_T
    log_weight_N = np.array([log_weight_T[problem.sample_T == sample].sum() for sample in range(len(LENGTHS))])
    for weights in (np.exp(log_weight_T), np.exp(np.delete(log_weight_N, MASKED))):
        assert (weights > 1.3).any()
        assert (weights < 0.8).any()
        assert ((weights > 0.8) & (weights < 1.3)).any()
    spec = PolicyUpdate(off_policy_mask=0.06)
    negative = [sample for sample in np.flatnonzero(problem.advantage_N < 0) if sample != MASKED]
    assert {oracle_keeps(problem, spec, sample) for sample in negative} == {True, False}
    drift_T = problem.mu_T - theta_T
    assert any(  # kept for its mean, though its sum is above
        oracle_keeps(problem, spec, sample) and drift_T[problem.sample_T == sample].sum() > 0.06 for sample in negative
    )
    flipped = replace(problem, advantage_N=-problem.advantage_N)
    assert not all(oracle_keeps(flipped, spec, sample) for sample in np.flatnonzero(problem.advantage_N > 0))


def test_dropped_tokens_are_marked(problem: Problem) -> None:
    """By the floor, and by the off-policy mask, which no sample with an advantage of 0 or more meets."""
    spec = PolicyUpdate.model_validate(
        {"behaviour_correction": {"kind": "token", "cap": 1.3, "floor": 0.8}, "off_policy_mask": 0.06}
    )
    theta_T = torch.from_numpy(oracle_logprobs(problem.weights_VH, problem.features_TH, problem.token_T)[0])
    given = inputs(problem, spec, theta_T, torch.zeros_like(theta_T))
    parts = policy_loss(given, spec)
    weight_T = np.exp(problem.prox_T - problem.mu_T)
    np.testing.assert_array_equal(parts.truncated_T.numpy(), (weight_T > 1.3) | (weight_T < 0.8))
    np.testing.assert_allclose(parts.correction_T.numpy(), np.where(weight_T < 0.8, 0.0, np.minimum(weight_T, 1.3)))
    masked_T = [not oracle_keeps(problem, spec, sample) for sample in problem.sample_T]
    np.testing.assert_array_equal(parts.masked_T.numpy(), masked_T)
    idle = replace(given, advantage_T=torch.zeros_like(given.advantage_T), mu_T=given.mu_T + 100)
    assert not policy_loss(idle, spec).masked_T.any()


def test_geometric_ratios_cross_the_clip_range_on_both_sides(problem: Problem) -> None:
    theta_T = oracle_logprobs(problem.weights_VH, problem.features_TH, problem.token_T)[0]
    spec = PolicyUpdate.model_validate(SPECS["geometric ratio"])
    ratio_T = [oracle_ratio(problem, spec, theta_T, token) for token in range(len(theta_T))]
    parts = policy_loss(inputs(problem, spec, torch.from_numpy(theta_T), torch.zeros(len(theta_T))), spec)
    np.testing.assert_allclose(parts.ratio_T.numpy(), ratio_T, rtol=1e-12)
    advantage_T = problem.advantage_N[problem.sample_T]
    clipped_T = np.where(advantage_T > 0, np.array(ratio_T) > 1.08, np.array(ratio_T) < 0.95)
    np.testing.assert_array_equal(parts.clipped_T.numpy(), clipped_T)
    assert {(bool(c), a > 0) for c, a in zip(clipped_T, advantage_T, strict=True)} == {
        (c, a) for c in (True, False) for a in (True, False)
    }


def test_cispo_clips_weights_whatever_the_sign_of_the_advantage(problem: Problem) -> None:
    spec = PolicyUpdate(surrogate="cispo")
    theta_T = oracle_logprobs(problem.weights_VH, problem.features_TH, problem.token_T)[0]
    given = inputs(problem, spec, torch.from_numpy(theta_T), torch.zeros(len(theta_T)))
    idle_T = torch.from_numpy(problem.sample_T) == 2  # a sample without an advantage is not clipped either
    parts = policy_loss(replace(given, advantage_T=torch.where(idle_T, 0.0, given.advantage_T)), spec)
    ratio_T = np.exp(theta_T - problem.prox_T)
    outside_T = (ratio_T < 0.8) | (ratio_T > 1.2)
    np.testing.assert_array_equal(parts.clipped_T.numpy(), outside_T & ~idle_T.numpy())
    assert (outside_T & idle_T.numpy()).any()


@pytest.mark.parametrize("kind", ["none", "token", "sequence"])
def test_cispo_has_the_gradient_of_ppo_at_the_start_of_an_update(problem: Problem, kind: str) -> None:
    """With one update per batch every ratio is 1, and the truncated weights are those of the behaviour correction."""
    weights_VH = torch.from_numpy(problem.weights_VH).requires_grad_()
    prox_T = oracle_logprobs(problem.weights_VH, problem.features_TH, problem.token_T)[0]
    fresh = replace(problem, prox_T=prox_T)
    grads = []
    for surrogate in ("ppo", "cispo"):
        spec = PolicyUpdate.model_validate({"surrogate": surrogate, "behaviour_correction": {"kind": kind}})
        grads.append(torch.autograd.grad(torch_loss(fresh, spec, weights_VH), weights_VH)[0])
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [SPECS["geometric ratio"], SPECS["cispo"]], ids=["geometric", "cispo"])
def test_long_samples_lose_nothing_to_the_type_of_the_log_probs(spec: dict[str, Any], dtype: torch.dtype) -> None:
    """bfloat16 stops counting at 256."""
    rng, length = np.random.default_rng(0), 600
    sample_T = torch.arange(2).repeat_interleave(length)
    theta_T, prox_T = (torch.from_numpy(rng.normal(-1.0, 0.3, 2 * length)).to(dtype) for _ in range(2))
    advantage_T = torch.tensor([1.0, -0.5], dtype=torch.float64)[sample_T]
    results = []
    for wide in (False, True):
        now_T, then_T = (each_T.double() if wide else each_T for each_T in (theta_T, prox_T))
        one_T = torch.ones(2 * length, dtype=torch.float64)
        given = LossInputs(now_T.requires_grad_(), then_T, then_T, advantage_T, one_T, sample_T, 2, one_T, one_T)
        loss = policy_loss(given, PolicyUpdate.model_validate(spec)).loss
        (grad_T,) = torch.autograd.grad(loss, now_T)
        results.append((float(loss.detach()), grad_T.double()))
    (narrow, grad_T), (exact, exact_T) = results
    unit = torch.finfo(dtype).eps
    assert narrow == pytest.approx(exact, rel=4 * unit)
    torch.testing.assert_close(grad_T, exact_T, rtol=4 * unit, atol=4 * unit * float(exact_T.abs().max()))


@pytest.mark.parametrize(
    ("update", "advice"),
    [
        ({"ratio": "geometric", "aggregation": "sequence_mean"}, "write aggregation: sequence_sum"),
        ({"ratio": "geometric", "aggregation": "token_mean"}, "write aggregation: sequence_sum"),
        ({"ratio": "geometric", "surrogate": "cispo"}, "write ratio: token, or surrogate: ppo"),
        ({"ratio": "sequence", "surrogate": "cispo"}, "write ratio: token, or surrogate: ppo"),
        ({"behaviour_correction": {"kind": "token", "cap": 0.4, "floor": 0.5}}, "lower the floor"),
        ({"behaviour_correction": {"kind": "sequence", "cap": 0.4, "floor": 0.5}}, "lower the floor"),
        ({"behaviour_correction": {"kind": "sequence", "floor": 1.1}}, "less than or equal to 1"),
        ({"off_policy_mask": 0.0}, "greater than 0"),
        ({"clip_low": 1.1}, "less than or equal to 1"),
    ],
)
def test_terms_that_do_not_fit_are_rejected(update: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        PolicyUpdate.model_validate(update)


def test_clipped_and_truncated_tokens_are_marked(problem: Problem) -> None:
    spec = PolicyUpdate.model_validate({"behaviour_correction": {"kind": "token", "cap": 1.3}})
    theta_T = torch.from_numpy(oracle_logprobs(problem.weights_VH, problem.features_TH, problem.token_T)[0])
    parts = policy_loss(inputs(problem, spec, theta_T, torch.zeros_like(theta_T)), spec)
    ratio_T = np.exp(theta_T.numpy() - problem.prox_T)
    advantage_T = problem.advantage_N[problem.sample_T]
    np.testing.assert_allclose(parts.ratio_T.numpy(), ratio_T)
    clipped_T = np.where(advantage_T > 0, ratio_T > 1.2, ratio_T < 0.8)
    np.testing.assert_array_equal(parts.clipped_T.numpy(), clipped_T)
    weight_T = np.exp(problem.prox_T - problem.mu_T)
    np.testing.assert_allclose(parts.correction_T.numpy(), np.minimum(weight_T, 1.3))
    np.testing.assert_array_equal(parts.truncated_T.numpy(), weight_T > 1.3)


def test_a_ratio_beyond_float32_stays_finite() -> None:
    theta_T = torch.tensor([0.0, 0.0], requires_grad=True)
    far_T = torch.tensor([-200.0, -200.0])
    sample_T = torch.tensor([0, 1])
    one_T = torch.ones(2)
    spec = PolicyUpdate.model_validate({"kl": {"coefficient": 1.0, "estimator": "k3"}})
    given = LossInputs(theta_T, far_T, far_T, torch.tensor([0.0, -1.0]), one_T, sample_T, 2, one_T, one_T, -far_T)
    loss = policy_loss(given, spec).loss
    torch.autograd.backward(loss)
    assert torch.isfinite(loss.detach())
    assert theta_T.grad is not None
    assert torch.isfinite(theta_T.grad).all()


def test_log_ratios_are_capped_at_20() -> None:
    """e^20 is far beyond any clip range, and its square is still finite in float32."""
    inputs = LossInputs(
        theta_T=torch.tensor([25.0, 19.0]),
        prox_T=torch.zeros(2),
        mu_T=torch.zeros(2),
        advantage_T=torch.ones(2, dtype=torch.float64),
        weight_T=torch.ones(2),
        sample_T=torch.tensor([0, 1]),
        samples=2,
        penalty_divisor_T=torch.ones(2),
        entropy_T=torch.zeros(2),
        reference_T=None,
    )
    ratio_T = policy_loss(inputs, PolicyUpdate()).ratio_T
    torch.testing.assert_close(ratio_T, torch.tensor([math.exp(20), math.exp(19)]))
    far_T = kl_estimate(torch.tensor([-25.0, -19.0]), torch.zeros(2), "k3")
    torch.testing.assert_close(far_T, torch.tensor([math.expm1(20) - 20, math.expm1(19) - 19]))


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_a_weight_at_a_bound_is_kept(kind: str) -> None:
    """On-policy all weights are 1, so a cap or floor of 1 that masked equality would drop every token."""
    one_T = torch.ones(2)
    given = LossInputs(one_T, one_T, one_T, one_T.double(), one_T, torch.tensor([0, 1]), 2, one_T, one_T, None)
    spec = PolicyUpdate.model_validate({"behaviour_correction": {"kind": kind, "cap": 1.0, "mask": True, "floor": 1.0}})
    parts = policy_loss(given, spec)
    assert parts.correction_T.tolist() == [1.0, 1.0]
    assert not parts.truncated_T.any()


def test_a_sample_that_drifted_as_far_as_the_mask_allows_is_kept() -> None:
    """The drift is a mean over the sample's tokens; numbers here are exact in binary."""
    mu_T = torch.tensor([0.25, 0.75, 0.5, 0.515625])
    zero_T, one_T, sample_T = torch.zeros(4), torch.ones(4), torch.tensor([0, 0, 1, 1])
    given = LossInputs(zero_T, zero_T, mu_T, -one_T.double(), one_T, sample_T, 2, one_T, zero_T, None)
    assert policy_loss(given, PolicyUpdate(off_policy_mask=0.5)).masked_T.tolist() == [False, False, True, True]


def test_what_is_reported_keeps_no_graph(problem: Problem) -> None:
    """Metrics of a step are added up over its micro-batches: with a gradient they would keep every pass in memory."""
    theta_T = torch.tensor(problem.mu_T, requires_grad=True)
    inputs = LossInputs(
        theta_T=theta_T,
        prox_T=2 * theta_T,  # even if its caller forgets to detach it
        mu_T=torch.tensor(problem.mu_T),
        advantage_T=torch.ones(len(theta_T), dtype=torch.float64),
        weight_T=torch.ones(len(theta_T)),
        sample_T=torch.tensor(problem.sample_T),
        samples=len(LENGTHS),
        penalty_divisor_T=torch.ones(len(theta_T)),
        entropy_T=torch.zeros(len(theta_T)),
        reference_T=None,
    )
    parts = policy_loss(inputs, PolicyUpdate())
    assert parts.loss.requires_grad
    for reported_T in (parts.ratio_T, parts.clipped_T, parts.correction_T, parts.truncated_T, parts.masked_T):
        assert not reported_T.requires_grad


def test_a_dropped_sample_has_no_part_in_the_loss_whatever_its_terms_are() -> None:
    """Its reference may be unknown and its entropy infinite: weight 0 is not multiplied by them."""
    theta_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    sample_T, one_T, unknown_T = torch.tensor([0, 1]), torch.ones(2), torch.tensor([-1.0, math.nan])
    weight_T, entropy_T = torch.tensor([1.0, 0.0]), torch.tensor([0.5, math.inf])
    spec = PolicyUpdate.model_validate({"kl": {"coefficient": 0.1}, "entropy_bonus": 0.1})
    prox_T = theta_T.detach()
    loss = policy_loss(
        LossInputs(theta_T, prox_T, prox_T, one_T.double(), weight_T, sample_T, 2, one_T, entropy_T, unknown_T), spec
    ).loss
    assert float(loss.detach()) == pytest.approx(-1.05)


def test_an_advantage_beyond_float32_is_scaled_back_by_the_samples_own_weight() -> None:
    """`A_i = a_i / w_i` is huge for a sample that has become unlikely, but the loss uses `w_i A_i`, which is not."""
    theta_T = torch.tensor([-60.0, -40.0, -1.0], requires_grad=True)
    sample_T, one_T = torch.tensor([0, 0, 1]), torch.ones(3)
    spec = PolicyUpdate.model_validate({"behaviour_correction": {"kind": "sequence", "cap": 2.0}})
    advantage_T = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64) * math.exp(100)
    prox_T = theta_T.detach()
    given = LossInputs(theta_T, prox_T, torch.tensor([0.0, 0.0, -1.0]), advantage_T, one_T, sample_T, 2, one_T, one_T)
    loss = policy_loss(given, spec).loss
    torch.autograd.backward(loss)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(-1.0, rel=1e-6)
    assert theta_T.grad is not None
    np.testing.assert_allclose(theta_T.grad.numpy(), [-0.5, -0.5, 0.0], rtol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_have_the_known_expectations(estimator: str) -> None:
    """k1 and k3 are unbiased for KL(theta || reference); k2 is not."""
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    value_T = kl_estimate(torch.from_numpy(np.log(p)), torch.from_numpy(np.log(q)), estimator).numpy()
    exact = float((p * np.log(p / q)).sum())
    expected = exact if estimator != "k2" else float((p * np.log(p / q) ** 2 / 2).sum())
    assert float((p * value_T).sum()) == pytest.approx(expected, rel=1e-12)
    assert estimator == "k1" or (value_T >= 0).all()


def test_aggregations_follow_their_definitions() -> None:
    """One term per token; two groups with samples of lengths 1 3 | 2 4."""
    lengths_N = torch.tensor([1.0, 3.0, 2.0, 4.0], dtype=torch.float64)
    term = [[10.0], [1.0, 2.0, 3.0], [4.0, 5.0], [1.0, 1.0, 1.0, 5.0]]
    flat_T = torch.tensor([value for sample in term for value in sample], dtype=torch.float64)
    sample_T = torch.repeat_interleave(torch.arange(4), lengths_N.long())

    def total(aggregation: str) -> float:
        weight_N = sample_weights(aggregation, lengths_N, groups=2, samples=4, tokens=10)
        return float((weight_N[sample_T] * flat_T).sum())

    assert total("sequence_sum") == pytest.approx((10 + 6 + 9 + 8) / 2)
    assert total("sequence_mean") == pytest.approx((10 + 2 + 4.5 + 2) / 2)
    assert total("token_mean") == pytest.approx(33 / 10 * (4 / 2))


def test_the_value_loss_equals_its_formula() -> None:
    rng = np.random.default_rng(0)
    value_T, old_T, reward_T = rng.normal(0, 0.5, (3, 200))
    got = value_loss(torch.from_numpy(value_T), torch.from_numpy(old_T), torch.from_numpy(reward_T), 0.2).numpy()
    moved = 0
    for value, old, reward, loss in zip(value_T, old_T, reward_T, got, strict=True):
        near = min(max(value, old - 0.2), old + 0.2)
        moved += near != value
        assert loss == pytest.approx(max((value - reward) ** 2, (near - reward) ** 2) / 2)
    assert 20 < moved < 180
