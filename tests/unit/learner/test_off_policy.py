"""Lag, where the true gradient is known: samples of an older policy, every group of them enumerated.

A policy writes sequences of two tokens: logits for the first, and for the second after each first. Older weights draw
the samples; some updates later the loss is made from them. The expectation of its gradient over all groups, weighted
with the older policy's probabilities, is compared with the gradient of the objective itself, a sum over all sets of k.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.loss import LossInputs, policy_loss
from volley.objectives import MajAtK, MaxAtK, Mean, Objective, advantages
from volley.update import PolicyUpdate

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
    """The expectation of ``of_set`` over k samples, exactly."""
    prob_S = logprobs(logit_CV).sum(-1).exp()
    sets = itertools.product(range(len(SEQUENCES)), repeat=k)
    return torch.stack([prob_S[list(drawn)].prod() * of_set(drawn) for drawn in sets]).sum()


def gradient(logit_CV: Tensor, k: int, of_set: Callable[[tuple[int, ...]], float] = best) -> Tensor:
    logit_CV = logit_CV.detach().requires_grad_()
    (grad_CV,) = torch.autograd.grad(value(logit_CV, k, of_set), logit_CV)
    return grad_CV


def policies(lag: int) -> tuple[Tensor, Tensor]:
    """An older policy, and the one that ``lag`` plain gradient steps make of it."""
    mu_CV = torch.tensor([[0.4, -0.8], [0.1, -0.3], [-0.5, 0.6]], dtype=torch.float64)
    pi_CV = mu_CV
    for _ in range(lag):
        pi_CV = pi_CV + 2.0 * gradient(pi_CV, 2)
    return mu_CV, pi_CV


def expected_gradient(mu_CV: Tensor, pi_CV: Tensor, objective: Objective, **update: Any) -> Tensor:
    """The mean, over all groups of the older policy, of what the loss adds to the logits of the newer one."""
    spec = PolicyUpdate.model_validate(update)
    mu_S2, total_CV = logprobs(mu_CV), torch.zeros_like(pi_CV)
    logit_CV = pi_CV.detach().requires_grad_()
    theta_S2 = logprobs(logit_CV)
    log_weight_S = (theta_S2.detach() - mu_S2).sum(-1).numpy()
    sample_T = torch.arange(N).repeat_interleave(2)
    for drawn in itertools.product(range(len(SEQUENCES)), repeat=N):
        chosen = list(drawn)
        advantage_n = advantages(REWARDS[chosen], objective, log_weights=log_weight_S[chosen], answers=np.array(drawn))
        theta_T = theta_S2[chosen].flatten()
        inputs = LossInputs(
            theta_T=theta_T,
            prox_T=theta_T.detach(),
            mu_T=mu_S2[chosen].flatten(),
            advantage_T=torch.from_numpy(advantage_n)[sample_T],
            weight_T=torch.ones(2 * N, dtype=torch.float64),
            sample_T=sample_T,
            samples=N,
            entropy_T=torch.zeros(2 * N, dtype=torch.float64),
        )
        (grad_CV,) = torch.autograd.grad(policy_loss(inputs, spec).loss, logit_CV, retain_graph=True)
        total_CV -= mu_S2[chosen].sum().exp() * grad_CV
    return total_CV


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
def test_anything_less_is_biased(correction: dict[str, Any], companions: Any) -> None:
    mu_CV, pi_CV = policies(4)
    objective = MaxAtK(k=3, companion_weights=companions)
    biased_CV = expected_gradient(mu_CV, pi_CV, objective, behaviour_correction=correction)
    assert off_by(biased_CV, gradient(pi_CV, 3)) > 0.02


def test_the_mean_needs_only_the_samples_own_weight() -> None:
    mu_CV, pi_CV = policies(4)
    corrected_CV = expected_gradient(mu_CV, pi_CV, Mean(), behaviour_correction=SEQUENCE)
    torch.testing.assert_close(corrected_CV, gradient(pi_CV, 1), rtol=1e-9, atol=1e-12)


def test_votes_are_corrected_too() -> None:
    mu_CV, pi_CV = policies(4)
    objective = MajAtK(k=3, companion_weights="exact")
    corrected_CV = expected_gradient(mu_CV, pi_CV, objective, behaviour_correction=SEQUENCE)
    torch.testing.assert_close(corrected_CV, gradient(pi_CV, 3, voted), rtol=1e-9, atol=1e-12)
    plain_CV = expected_gradient(mu_CV, pi_CV, MajAtK(k=3), behaviour_correction=NONE)
    assert off_by(plain_CV, gradient(pi_CV, 3, voted)) > 0.02
