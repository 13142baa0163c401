"""The policy loss a second time, in slow loops with a hand-written gradient, and a small problem to compare on."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.logprobs import chosen_logprobs
from learner.loss import LossInputs, policy_loss, sample_weights
from volley.update import PolicyUpdate

Array = NDArray[np.float64]
WIDTH, VOCABULARY = 3, 5
LENGTHS = (3, 1, 4, 2, 5, 2, 3, 1)  # two groups of four samples
MASKED = 6  # this sample was dropped from its group
GROUP_SIZES = (4, 4, 4, 4, 3, 3, 3, 3)  # samples left in the group of each sample


@dataclass(frozen=True)
class Problem:
    """A linear softmax policy over fixed features, and all inputs of the loss."""

    features_TH: Array
    token_T: NDArray[np.int64]
    sample_T: NDArray[np.int64]
    prox_T: Array
    mu_T: Array
    reference_T: Array
    advantage_N: Array
    weights_VH: Array


def small_problem() -> Problem:
    """A problem with ratios and corrections on both sides of every threshold, and advantages of both signs."""
    rng = np.random.default_rng(3)
    sample_T = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    features_TH, weights_VH = rng.normal(size=(len(sample_T), WIDTH)), rng.normal(size=(VOCABULARY, WIDTH))
    token_T = rng.integers(0, VOCABULARY, len(sample_T))
    theta_T = oracle_logprobs(weights_VH, features_TH, token_T)[0]
    prox_T = theta_T + rng.normal(0, 0.3, len(theta_T))
    return Problem(
        features_TH=features_TH,
        token_T=token_T,
        sample_T=sample_T,
        prox_T=prox_T,
        mu_T=prox_T + rng.normal(0, 0.5, len(theta_T)),
        reference_T=theta_T + rng.normal(0, 0.5, len(theta_T)),
        advantage_N=np.array([1.5, -1.0, -0.7, 0.4, 0.9, -1.2, 2.0, -0.3]),
        weights_VH=weights_VH,
    )


def oracle_logprobs(weights_VH: Array, features_TH: Array, token_T: NDArray[np.int64]) -> tuple[Array, Array, Array]:
    """Log-probs of the tokens, entropies, and the token distributions."""
    logits_TV = features_TH @ weights_VH.T
    p_TV = np.exp(logits_TV) / np.exp(logits_TV).sum(-1, keepdims=True)
    return np.log(p_TV[np.arange(len(token_T)), token_T]), -(p_TV * np.log(p_TV)).sum(-1), p_TV


def oracle_weight(spec: PolicyUpdate, sample: int) -> float:
    """The weight of one token of ``sample`` in the loss; two groups, one sample dropped."""
    if sample == MASKED:
        return 0.0
    kept = [length for index, length in enumerate(LENGTHS) if index != MASKED]
    return {
        "sequence_sum": 1 / 2,
        "sequence_mean": 1 / 2 / LENGTHS[sample],
        "token_mean": len(kept) / 2 / sum(kept),
    }[spec.aggregation]


def oracle_correction(problem: Problem, spec: PolicyUpdate, token: int) -> float:
    correction = spec.behaviour_correction
    if correction.kind == "none":
        return 1.0
    difference_T = problem.prox_T - problem.mu_T
    mine = problem.sample_T == problem.sample_T[token]
    weight = math.exp(difference_T[token] if correction.kind == "token" else difference_T[mine].sum())
    if weight < correction.floor:
        return 0.0
    if weight <= correction.cap:
        return weight
    return 0.0 if correction.mask else correction.cap


def oracle_keeps(problem: Problem, spec: PolicyUpdate, sample: int) -> bool:
    """Whether `off_policy_mask` leaves the sample in; the policy is the one at the problem's weights."""
    if spec.off_policy_mask is None or problem.advantage_N[sample] >= 0:
        return True
    theta_T = oracle_logprobs(problem.weights_VH, problem.features_TH, problem.token_T)[0]
    log_ratios = [problem.mu_T[t] - theta_T[t] for t in range(len(theta_T)) if problem.sample_T[t] == sample]
    return bool(sum(log_ratios) / len(log_ratios) <= spec.off_policy_mask)


def oracle_ratio(problem: Problem, spec: PolicyUpdate, theta_T: Array, token: int) -> float:
    gap_T = theta_T - problem.prox_T
    mine = problem.sample_T == problem.sample_T[token]
    whole = math.prod(math.exp(gap) for gap in gap_T[mine])
    ratios = {"token": math.exp(gap_T[token]), "sequence": whole, "geometric": whole ** (1 / int(mine.sum()))}
    return ratios[spec.ratio]


def oracle_loss(problem: Problem, spec: PolicyUpdate, weights_VH: Array) -> float:
    theta_T, entropy_T, _ = oracle_logprobs(weights_VH, problem.features_TH, problem.token_T)
    held_T = oracle_logprobs(problem.weights_VH, problem.features_TH, problem.token_T)[0]  # what has no gradient
    loss = 0.0
    for token, sample in enumerate(problem.sample_T):
        cispo = spec.surrogate == "cispo"
        ratio = oracle_ratio(problem, spec, held_T if cispo else theta_T, token)
        advantage = problem.advantage_N[sample]
        clipped = min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high)
        gain = clipped * advantage * theta_T[token] if cispo else min(ratio * advantage, clipped * advantage)
        gain /= 1 if spec.ratio == "token" else LENGTHS[sample]
        term = oracle_correction(problem, spec, token) * gain * oracle_keeps(problem, spec, sample)
        if spec.kl.where == "loss":
            d = theta_T[token] - problem.reference_T[token]
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[spec.kl.estimator]
            term -= spec.kl.coefficient * kl / GROUP_SIZES[sample]
        term += spec.entropy_bonus * entropy_T[token] / GROUP_SIZES[sample]
        loss -= oracle_weight(spec, sample) * term
    return loss


def hand_gradient(problem: Problem, spec: PolicyUpdate) -> Array:
    """d loss / d weights, with the chain rule written out, [V, H]."""
    theta_T, entropy_T, p_TV = oracle_logprobs(problem.weights_VH, problem.features_TH, problem.token_T)
    by_theta_T, by_entropy_T = np.zeros(len(theta_T)), np.zeros(len(theta_T))
    for token, sample in enumerate(problem.sample_T):
        mine = np.flatnonzero(problem.sample_T == sample)
        weight, advantage = oracle_weight(spec, sample), problem.advantage_N[sample]
        ratio = oracle_ratio(problem, spec, theta_T, token)
        flat = ratio > 1 + spec.clip_high if advantage > 0 else ratio < 1 - spec.clip_low
        if spec.surrogate == "cispo":
            ratio, flat = min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high), False
        flat = flat or not oracle_keeps(problem, spec, sample)
        slope = 0.0 if flat else oracle_correction(problem, spec, token) * ratio * advantage
        # d log(ratio) / d theta is 1 for every token in the ratio, 1 / length in a geometric mean; a sample's term is
        # spread over its tokens
        slope /= {"token": 1, "sequence": len(mine), "geometric": len(mine) ** 2}[spec.ratio]
        for other in [token] if spec.ratio == "token" else mine:
            by_theta_T[other] -= weight * slope
        if spec.kl.where == "loss":
            d = theta_T[token] - problem.reference_T[token]
            slope = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[spec.kl.estimator]
            by_theta_T[token] += weight * spec.kl.coefficient * slope / GROUP_SIZES[sample]
        by_entropy_T[token] -= weight * spec.entropy_bonus / GROUP_SIZES[sample]
    chosen_TV = np.eye(VOCABULARY)[problem.token_T]
    by_logit_TV = by_theta_T[:, None] * (chosen_TV - p_TV)
    by_logit_TV += by_entropy_T[:, None] * -p_TV * (np.log(p_TV) + entropy_T[:, None])
    gradient_VH: Array = by_logit_TV.T @ problem.features_TH
    return gradient_VH


def torch_loss(problem: Problem, spec: PolicyUpdate, weights_VH: Tensor) -> Tensor:
    theta_T, entropy_T = chosen_logprobs(
        torch.from_numpy(problem.features_TH),
        weights_VH,
        None,
        torch.from_numpy(problem.token_T),
        1.0,
        entropy_gradient=spec.entropy_bonus > 0,
    )
    return policy_loss(inputs(problem, spec, theta_T, entropy_T), spec).loss


def inputs(problem: Problem, spec: PolicyUpdate, theta_T: Tensor, entropy_T: Tensor) -> LossInputs:
    lengths_N = torch.tensor(LENGTHS, dtype=torch.float64)
    kept_N = torch.arange(len(LENGTHS)) != MASKED
    weight_N = sample_weights(
        spec.aggregation, lengths_N, groups=2, samples=float(kept_N.sum()), tokens=float(lengths_N[kept_N].sum())
    )
    sample_T = torch.from_numpy(problem.sample_T)
    return LossInputs(
        theta_T=theta_T,
        prox_T=torch.from_numpy(problem.prox_T),
        mu_T=torch.from_numpy(problem.mu_T),
        advantage_T=torch.from_numpy(problem.advantage_N)[sample_T],
        weight_T=torch.where(kept_N, weight_N, 0.0)[sample_T],
        sample_T=sample_T,
        samples=len(LENGTHS),
        penalty_divisor_T=torch.tensor(GROUP_SIZES, dtype=torch.float64)[sample_T],
        entropy_T=entropy_T,
        reference_T=torch.from_numpy(problem.reference_T),
    )
