"""Lag, where the true gradient is known: samples of an older policy, every group of them enumerated.

A policy over V answers of one token has a few numbers for logits. Older weights draw the samples; some updates later
the loss is made from them. The expectation of its gradient over all V^n groups, weighted with the older policy's
probabilities, is compared with the gradient of max@k itself, which is a sum over all V^k sets.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.loss import LossInputs, policy_loss
from volley.objectives import MajAtK, MaxAtK, Mean, Objective, advantages
from volley.update import PolicyUpdate

REWARDS = np.array([0.0, 1.0, 0.3, 1.0])
V, N = len(REWARDS), 4
UNCAPPED = {"kind": "token", "cap": 1e9}


def objective_of(logit_V: Tensor, k: int) -> Tensor:
    """max@k of the policy, exactly."""
    prob_V = logit_V.softmax(-1)
    sets = itertools.product(range(V), repeat=k)
    return torch.stack([prob_V[list(drawn)].prod() * REWARDS[list(drawn)].max() for drawn in sets]).sum()


def updated(logit_V: Tensor, k: int, steps: int) -> Tensor:
    """The policy some plain gradient steps later: lag as training makes it."""
    for _ in range(steps):
        logit_V = logit_V.detach().requires_grad_()
        (grad_V,) = torch.autograd.grad(objective_of(logit_V, k), logit_V)
        logit_V = logit_V + 2.0 * grad_V
    return logit_V.detach()


def expected_gradient(mu_V: Tensor, pi_V: Tensor, objective: Objective, spec: PolicyUpdate) -> Tensor:
    """The mean over all groups of the older policy of what the loss adds to the logits of the newer one."""
    mu_logprob_V, total_V = mu_V.log_softmax(-1), torch.zeros(V, dtype=torch.float64)
    for drawn in itertools.product(range(V), repeat=N):
        token_T = torch.tensor(drawn)
        logit_V = pi_V.clone().requires_grad_()
        theta_T = logit_V.log_softmax(-1)[token_T]
        log_weight_n = (theta_T.detach() - mu_logprob_V[token_T]).numpy()
        advantage_n = advantages(REWARDS[list(drawn)], objective, log_weights=log_weight_n, answers=np.array(drawn))
        inputs = LossInputs(
            theta_T=theta_T,
            prox_T=theta_T.detach(),
            mu_T=mu_logprob_V[token_T],
            advantage_T=torch.from_numpy(advantage_n),
            weight_T=torch.ones(N, dtype=torch.float64),
            sample_T=torch.arange(N),
            samples=N,
            entropy_T=torch.zeros(N, dtype=torch.float64),
        )
        (grad_V,) = torch.autograd.grad(policy_loss(inputs, spec).loss, logit_V)
        total_V -= mu_logprob_V[token_T].sum().exp() * grad_V
    return total_V


def policies(k: int, lag: int) -> tuple[Tensor, Tensor, Tensor]:
    """The older policy, the newer one, and the true gradient at the newer one."""
    mu_V = torch.tensor([0.4, -0.8, 0.1, -0.3], dtype=torch.float64)
    pi_V = updated(mu_V, k, lag).requires_grad_()
    (true_V,) = torch.autograd.grad(objective_of(pi_V, k), pi_V)
    return mu_V, pi_V.detach(), true_V


def off_by(gradient_V: Tensor, true_V: Tensor) -> float:
    return float((gradient_V - true_V).norm() / true_V.norm())


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_corrected_updates_agree_with_on_policy_ones_at_any_lag(k: int, ratio: str, lag: int) -> None:
    mu_V, pi_V, true_V = policies(k, lag)
    spec = PolicyUpdate.model_validate({"ratio": ratio, "behaviour_correction": UNCAPPED})
    corrected_V = expected_gradient(mu_V, pi_V, MaxAtK(k=k, companion_weights="exact"), spec)
    torch.testing.assert_close(corrected_V, true_V, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("correction", "companions", "at_least"),
    [
        ({"kind": "none"}, "none", 0.05),  # as if the current policy had drawn the samples
        (UNCAPPED, "none", 0.02),  # the sample's own weight, its companions' left out
        ({"kind": "none"}, "exact", 0.02),  # the other way round
    ],
    ids=["nothing corrected", "own weight only", "companions only"],
)
def test_uncorrected_updates_do_not(correction: dict[str, Any], companions: Any, at_least: float) -> None:
    mu_V, pi_V, true_V = policies(3, 4)
    spec = PolicyUpdate.model_validate({"behaviour_correction": correction})
    gradient_V = expected_gradient(mu_V, pi_V, MaxAtK(k=3, companion_weights=companions), spec)
    assert off_by(gradient_V, true_V) > at_least


def test_the_mean_needs_only_the_samples_own_weight() -> None:
    mu_V, pi_V, true_V = policies(1, 4)
    spec = PolicyUpdate.model_validate({"behaviour_correction": UNCAPPED})
    # The baseline of a lagged group is the older policy's mean: no bias, a baseline may be anything independent.
    torch.testing.assert_close(expected_gradient(mu_V, pi_V, Mean(), spec), true_V, rtol=1e-9, atol=1e-12)


def test_votes_are_corrected_too() -> None:
    mu_V, pi_V, _ = policies(3, 4)

    def voted(logit_V: Tensor) -> Tensor:
        prob_V, terms = logit_V.softmax(-1), []
        for drawn in itertools.product(range(V), repeat=3):
            counts = np.bincount(drawn, minlength=V)
            terms.append(prob_V[list(drawn)].prod() * REWARDS[counts == counts.max()].mean())
        return torch.stack(terms).sum()

    logit_V = pi_V.clone().requires_grad_()
    (true_V,) = torch.autograd.grad(voted(logit_V), logit_V)
    spec = PolicyUpdate.model_validate({"behaviour_correction": UNCAPPED})
    corrected_V = expected_gradient(mu_V, pi_V, MajAtK(k=3, companion_weights="exact"), spec)
    torch.testing.assert_close(corrected_V, true_V, rtol=1e-9, atol=1e-12)
    plain = PolicyUpdate.model_validate({"behaviour_correction": {"kind": "none"}})
    assert off_by(expected_gradient(mu_V, pi_V, MajAtK(k=3), plain), true_V) > 0.05
