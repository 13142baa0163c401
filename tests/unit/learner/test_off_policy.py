"""Lag with a known true gradient: all groups of samples of an older policy are enumerated.

A policy writes sequences of two tokens: it has logits for the first token, and for the second after each first. An
older policy draws the samples, and the loss is computed some updates later. The expectation of its gradient over all
groups, weighted with the older policy's probabilities, is compared with the exact gradient of the objective.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.loss import LossInputs, kl_estimate, policy_loss
from volley.objectives import MajAtK, MaxAtK, MaxRL, Mean, Objective, RiskSensitive, Softmax, advantages
from volley.objectives.spec import PER_SAMPLE
from volley.update import PolicyUpdate, check_update

SEQUENCES = tuple(itertools.product(range(2), repeat=2))
REWARDS = np.array([0.0, 0.3, 1.0, 0.5])
N = 4
SEQUENCE = {"kind": "sequence", "cap": 1e9}
TOKEN = {"kind": "token", "cap": 1e9}
NONE = {"kind": "none"}


def logprobs(logit_CV: Tensor) -> Tensor:
    """Log-prob of both tokens of each of the four sequences, [4, 2]; C contexts: the start, after 0, after 1."""
    logprob_CV = logit_CV.log_softmax(-1)
    return torch.stack([torch.stack([logprob_CV[0, a], logprob_CV[1 + a, b]]) for a, b in SEQUENCES])


def best(drawn: tuple[int, ...]) -> float:
    return float(REWARDS[list(drawn)].max())


def voted(drawn: tuple[int, ...]) -> float:
    counts = np.bincount(drawn, minlength=len(REWARDS))
    return float(REWARDS[counts == counts.max()].mean())


def value(logit_CV: Tensor, k: int, of_set: Callable[[tuple[int, ...]], float]) -> Tensor:
    """The exact expectation of ``of_set`` over k samples."""
    prob_S = logprobs(logit_CV).sum(-1).exp()
    sets = itertools.product(range(len(SEQUENCES)), repeat=k)
    return torch.stack([prob_S[list(drawn)].prod() * of_set(drawn) for drawn in sets]).sum()


def gradient(logit_CV: Tensor, k: int, of_set: Callable[[tuple[int, ...]], float] = best) -> Tensor:
    logit_CV = logit_CV.detach().requires_grad_()
    (grad_CV,) = torch.autograd.grad(value(logit_CV, k, of_set), logit_CV)
    return grad_CV


def policies(lag: int) -> tuple[Tensor, Tensor]:
    """An older policy, and the policy after ``lag`` plain gradient steps from it."""
    mu_CV = torch.tensor([[0.4, -0.8], [0.1, -0.3], [-0.5, 0.6]], dtype=torch.float64)
    pi_CV = mu_CV
    for _ in range(lag):
        pi_CV = pi_CV + 2.0 * gradient(pi_CV, 2)
    return mu_CV, pi_CV


def expected_gradient(
    mu_CV: Tensor,
    pi_CV: Tensor,
    objective: Objective,
    *,
    n: int = N,
    value: float = 0.0,
    reference_CV: Tensor | None = None,
    **update: Any,
) -> Tensor:
    """The expected gradient of the loss for the newer policy's logits, over all groups of the older policy.

    ``value`` is what a value model predicts for the prompt.
    """
    spec = PolicyUpdate.model_validate(update)
    mu_S2, total_CV = logprobs(mu_CV), torch.zeros_like(pi_CV)
    logit_CV = pi_CV.detach().requires_grad_()
    theta_S2, entropy_S2 = logprobs(logit_CV), at_tokens(entropies(logit_CV))
    reference_S2 = None if reference_CV is None else logprobs(reference_CV)
    log_weight_S = (theta_S2.detach() - mu_S2).sum(-1).numpy()
    sample_T = torch.arange(n).repeat_interleave(2)
    one_T = torch.ones(2 * n, dtype=torch.float64)
    for drawn in itertools.product(range(len(SEQUENCES)), repeat=n):
        chosen = list(drawn)
        advantage_n = advantages(REWARDS[chosen], objective, log_weights=log_weight_S[chosen], answers=np.array(drawn))
        theta_T = theta_S2[chosen].flatten()
        inputs = LossInputs(
            theta_T=theta_T,
            prox_T=theta_T.detach(),
            mu_T=mu_S2[chosen].flatten(),
            advantage_T=torch.from_numpy(advantage_n - value)[sample_T],
            weight_T=one_T,
            sample_T=sample_T,
            samples=n,
            penalty_divisor_T=one_T if isinstance(objective, PER_SAMPLE) else n * one_T,
            entropy_T=entropy_S2[chosen].flatten(),
            reference_T=None if reference_S2 is None else reference_S2[chosen].flatten(),
        )
        (grad_CV,) = torch.autograd.grad(policy_loss(inputs, spec).loss, logit_CV, retain_graph=True)
        total_CV -= mu_S2[chosen].sum().exp() * grad_CV
    return total_CV


def entropies(logit_CV: Tensor) -> Tensor:
    """The entropy of the next token in each context, [C]."""
    logprob_CV = logit_CV.log_softmax(-1)
    return -(logprob_CV.exp() * logprob_CV).sum(-1)


def at_tokens(value_C: Tensor) -> Tensor:
    """For each of the four sequences, the values of the two contexts it passes, [4, 2]."""
    return torch.stack([torch.stack([value_C[0], value_C[1 + first]]) for first, _ in SEQUENCES])


def token_mean_gradient(pi_CV: Tensor, value_of: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of a value per context, summed over a sequence's tokens, with the contexts held fixed."""
    logit_CV = pi_CV.detach().requires_grad_()
    prob_S1 = logprobs(pi_CV).sum(-1, keepdim=True).exp()
    (grad_CV,) = torch.autograd.grad((prob_S1 * at_tokens(value_of(logit_CV))).sum(), logit_CV)
    return grad_CV


def off_by(estimate_CV: Tensor, true_CV: Tensor) -> float:
    return float((estimate_CV - true_CV).norm() / true_CV.norm())


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_corrected_updates_agree_with_on_policy_ones_at_any_lag(k: int, ratio: str, lag: int) -> None:
    mu_CV, pi_CV = policies(lag)
    objective = MaxAtK(k=k, companion_weights="exact")
    corrected_CV = expected_gradient(mu_CV, pi_CV, objective, ratio=ratio, behaviour_correction=SEQUENCE)
    torch.testing.assert_close(corrected_CV, gradient(pi_CV, k), rtol=1e-9, atol=1e-12)


def test_the_first_update_with_cispo_is_corrected_too() -> None:
    mu_CV, pi_CV = policies(4)
    objective = MaxAtK(k=3, companion_weights="exact")
    corrected_CV = expected_gradient(mu_CV, pi_CV, objective, surrogate="cispo", behaviour_correction=SEQUENCE)
    torch.testing.assert_close(corrected_CV, gradient(pi_CV, 3), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("objective", [MaxAtK(k=3), MaxAtK(weights={1: 0.5, 3: 1.0}), MajAtK(k=3)], ids=str)
def test_whatever_a_value_model_predicts_changes_no_expected_gradient(objective: Objective) -> None:
    _, pi_CV = policies(4)
    plain_CV = expected_gradient(pi_CV, pi_CV, objective)
    moved_CV = expected_gradient(pi_CV, pi_CV, objective, value=0.4)
    torch.testing.assert_close(moved_CV, plain_CV, rtol=1e-9, atol=1e-12)
    assert plain_CV.norm() > 0.01


def test_a_geometric_ratio_divides_the_gradient_of_every_sample_by_its_length() -> None:
    """All sequences have two tokens."""
    mu_CV, pi_CV = policies(4)
    halved_CV = expected_gradient(mu_CV, pi_CV, Mean(), ratio="geometric", behaviour_correction=SEQUENCE)
    torch.testing.assert_close(halved_CV, gradient(pi_CV, 1) / 2, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("correction", "companions"),
    [
        pytest.param(NONE, "none", id="nothing corrected"),
        pytest.param(TOKEN, "none", id="own tokens only"),
        pytest.param(SEQUENCE, "none", id="own weight only"),
        pytest.param(NONE, "exact", id="companions only"),
        pytest.param(TOKEN, "exact", id="companions, own tokens"),
    ],
)
def test_weaker_corrections_are_biased(correction: dict[str, Any], companions: Any) -> None:
    mu_CV, pi_CV = policies(4)
    objective = MaxAtK(k=3, companion_weights=companions)
    biased_CV = expected_gradient(mu_CV, pi_CV, objective, behaviour_correction=correction)
    assert off_by(biased_CV, gradient(pi_CV, 3)) > 0.02


def test_the_mean_needs_only_the_samples_own_weight() -> None:
    mu_CV, pi_CV = policies(4)
    corrected_CV = expected_gradient(mu_CV, pi_CV, Mean(), behaviour_correction=SEQUENCE)
    torch.testing.assert_close(corrected_CV, gradient(pi_CV, 1), rtol=1e-9, atol=1e-12)


def test_votes_are_also_corrected() -> None:
    mu_CV, pi_CV = policies(4)
    objective = MajAtK(k=3, companion_weights="exact")
    corrected_CV = expected_gradient(mu_CV, pi_CV, objective, behaviour_correction=SEQUENCE)
    torch.testing.assert_close(corrected_CV, gradient(pi_CV, 3, voted), rtol=1e-9, atol=1e-12)
    plain_CV = expected_gradient(mu_CV, pi_CV, MajAtK(k=3), behaviour_correction=NONE)
    assert off_by(plain_CV, gradient(pi_CV, 3, voted)) > 0.02


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    ("objective", "published"),
    [
        (Mean(), False),
        (MaxAtK(k=2), False),
        (MajAtK(k=2), False),
        (Softmax(beta=1.0), False),
        (MaxRL(), True),
        (RiskSensitive(beta=1.0), True),
    ],
    ids=str,
)
def test_penalties_have_the_strength_of_their_coefficients_for_every_n(
    objective: Objective, published: bool, n: int
) -> None:
    """Against `E[f] - 0.3 KL(pi || reference) + 0.2 entropy`, with KL and entropy of the token distributions.

    Advantages as published are n times as large as their formula, and so are the penalties.
    """
    reference_CV, pi_CV = policies(3)
    times = n if published else 1

    def divergences(logit_CV: Tensor) -> Tensor:
        logprob_CV = logit_CV.log_softmax(-1)
        return (logprob_CV.exp() * (logprob_CV - reference_CV.log_softmax(-1))).sum(-1)

    plain_CV = expected_gradient(pi_CV, pi_CV, objective, n=n)
    penalty = {"coefficient": 0.3, "estimator": "k2"}
    pulled_CV = expected_gradient(pi_CV, pi_CV, objective, n=n, reference_CV=reference_CV, kl=penalty)
    pull_CV = token_mean_gradient(pi_CV, divergences)
    torch.testing.assert_close(pulled_CV - plain_CV, -0.3 * times * pull_CV, rtol=1e-9, atol=1e-12)
    spread_CV = expected_gradient(pi_CV, pi_CV, objective, n=n, entropy_bonus=0.2)
    spread_true_CV = token_mean_gradient(pi_CV, entropies)
    torch.testing.assert_close(spread_CV - plain_CV, 0.2 * times * spread_true_CV, rtol=1e-9, atol=1e-12)
    assert min(pull_CV.norm(), spread_true_CV.norm()) > 0.05


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_only_k1_as_a_reward_penalty_has_the_gradient_of_the_divergence(estimator: str) -> None:
    """The penalty is the sum of a sequence's estimates; compared with the gradient of `KL(pi || reference)`."""
    reference_CV, pi_CV = policies(4)
    prob_S = logprobs(pi_CV).sum(-1).exp()
    penalty_S = kl_estimate(logprobs(pi_CV), logprobs(reference_CV), estimator).sum(-1)
    logit_CV = pi_CV.detach().requires_grad_()
    pull_S = (prob_S * penalty_S.detach() * logprobs(logit_CV).sum(-1)).sum()  # REINFORCE with the penalty as reward
    (pull_CV,) = torch.autograd.grad(pull_S, logit_CV)
    log_ratio_S = (logprobs(logit_CV) - logprobs(reference_CV)).sum(-1)
    (true_CV,) = torch.autograd.grad((logprobs(logit_CV).sum(-1).exp() * log_ratio_S).sum(), logit_CV)
    if estimator == "k1":
        torch.testing.assert_close(pull_CV, true_CV, rtol=1e-9, atol=1e-12)
        check_update(penalised(estimator), Mean())
    else:
        assert off_by(pull_CV, true_CV) > 0.3
        with pytest.raises(ValueError, match=r"write kl\.estimator: k1"):
            check_update(penalised(estimator), Mean())


def test_a_penalty_in_the_reward_is_biased_for_the_best_of_k() -> None:
    """With the best of two penalised rewards, the estimate misses how the best sample's own penalty changes."""
    reference_CV, pi_CV = policies(4)
    logit_CV = pi_CV.detach().requires_grad_()
    prob_S = logprobs(logit_CV).sum(-1).exp()
    shaped_S = torch.from_numpy(REWARDS) - 0.5 * (logprobs(logit_CV) - logprobs(reference_CV)).sum(-1)
    best_SS = torch.maximum(shaped_S[:, None], shaped_S)
    chance_SS = prob_S[:, None] * prob_S
    (true_CV,) = torch.autograd.grad((chance_SS * best_SS).sum(), logit_CV, retain_graph=True)
    (estimate_CV,) = torch.autograd.grad((chance_SS * best_SS.detach()).sum(), logit_CV)
    assert off_by(estimate_CV, true_CV) > 0.1
    with pytest.raises(ValueError, match=r"write kl\.where: loss"):
        check_update(penalised("k1"), MaxAtK(k=2))


def penalised(estimator: str) -> PolicyUpdate:
    return PolicyUpdate.model_validate({"kl": {"coefficient": 0.1, "estimator": estimator, "where": "reward"}})
