"""The policy loss: a pure function of tensors.

Shapes: T sample tokens of a micro-batch, sample by sample; N samples of the rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from volley.update import KLPenalty, NoCorrection, PolicyUpdate, SequenceCorrection, TokenCorrection

LOG_RATIO_CAP = 20.0  # e^20: far beyond any clip range, far within float32
KL_RANGE = 1024.0  # an adapted penalty has at most this many times the job's coefficient


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the loss needs to know about the tokens of one micro-batch.

    Attributes:
        theta_T: log-prob under the weights being trained; the gradient flows through it.
        prox_T: log-prob under the learner's weights at the start of the update.
        mu_T: log-prob recorded by the generator.
        advantage_T: the sample's advantage at each of its tokens; float64, because an off-policy advantage is divided
            by the sample's own weight and may lie outside float32 until the correction multiplies it again.
        weight_T: the factor of each token's term, see `sample_weights`; 0 removes the token from the loss.
        sample_T: int64 in 0..N-1, the sample of each token.
        samples: N.
        penalty_divisor_T: what KL and entropy are divided by, as the advantages are: the number of samples that the
            token's group keeps, or 1 for an objective of `PER_SAMPLE`.
        entropy_T: entropy of each token's distribution; with a bonus, the gradient flows through it.
        reference_T: log-prob under the starting policy; None if it is not needed.
    """

    theta_T: Tensor
    prox_T: Tensor
    mu_T: Tensor
    advantage_T: Tensor
    weight_T: Tensor
    sample_T: Tensor
    samples: int
    penalty_divisor_T: Tensor
    entropy_T: Tensor
    reference_T: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossParts:
    """The loss to minimise, and how each token entered it. All but ``loss`` are detached."""

    loss: Tensor
    ratio_T: Tensor
    clipped_T: Tensor
    correction_T: Tensor
    truncated_T: Tensor
    masked_T: Tensor


def policy_loss(inputs: LossInputs, spec: PolicyUpdate) -> LossParts:
    """``-sum_t weight_t * c_t * min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)``, plus KL and entropy terms.

    - ``r``: PPO's ratio ``exp(theta - prox)``, clipped asymmetrically (arXiv 1707.06347; DAPO, arXiv 2503.14476).
      ``ratio: sequence`` takes one ratio per sample (arXiv 2503.19595, App. A.4), ``ratio: geometric`` its root
      ``exp(mean_t(theta - prox))`` (GSPO, arXiv 2507.18071).
    - ``surrogate: cispo`` puts ``clip(r_t, 1 - low, 1 + high) A_t theta_t`` in the place of the minimum; no gradient
      passes through the clipped ratio, so every token keeps one (arXiv 2506.13585).
    - ``c``: behaviour correction ``exp(prox - mu)``, truncated or masked at a cap (decoupled PPO, arXiv 2110.00641;
      truncated importance sampling) and masked below a floor, per token or per sample; no gradient passes through it.
    - ``off_policy_mask`` drops the policy terms of samples with ``A < 0`` and ``mean_t(mu - theta)`` above it
      (DeepSeek-V3.2, arXiv 2512.02556).
    - KL in the loss: k2 or k3 of `kl_estimate` per token.
    - entropy bonus: minus the entropy of each token's distribution (arXiv 1602.01783).

    An advantage is one sample's part of a sum over its group, so the policy terms of a group are added. KL and entropy
    are expectations, so they are divided by the size of the group: ``E[f] - coefficient * KL + bonus * entropy`` then
    has the coefficients that the job states, whatever n is. Objectives of `PER_SAMPLE` are n times their formula, and
    so are KL and entropy beside them.

    The sum is over the micro-batch; ``weight_T`` is made with global counts, so losses of micro-batches and ranks add.
    """
    ratio_T, share_T = _ratio(inputs, spec)
    gain_T, clipped_T = _gain(ratio_T, inputs, spec)
    correction_T, truncated_T = _correction(inputs, spec)
    masked_T = _masked(inputs, spec)
    term_T = torch.where(masked_T, 0.0, correction_T * gain_T * share_T)
    if spec.kl.coefficient and spec.kl.where == "loss" and inputs.reference_T is not None:
        kl_T = kl_estimate(inputs.theta_T, inputs.reference_T, spec.kl.estimator)
        term_T = term_T - spec.kl.coefficient * kl_T / inputs.penalty_divisor_T
    if spec.entropy_bonus:
        term_T = term_T + spec.entropy_bonus * inputs.entropy_T / inputs.penalty_divisor_T
    loss = -torch.where(inputs.weight_T > 0, inputs.weight_T * term_T, 0.0).sum()
    return LossParts(
        loss=loss.to(inputs.theta_T.dtype),
        ratio_T=ratio_T.detach(),
        clipped_T=clipped_T,
        correction_T=correction_T,
        truncated_T=truncated_T,
        masked_T=masked_T,
    )


def kl_estimate(theta_T: Tensor, reference_T: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of ``KL(theta || reference)`` from tokens drawn under theta.

    k1 ``log theta - log ref``; k2 half its square; k3 ``exp(ref - theta) - 1 - (ref - theta)``; named so in
    J. Schulman, "Approximating KL divergence", 2020. As a loss, k2 has the gradient of ``KL(theta || reference)``
    and k3 that of ``KL(reference || theta)``, for tokens drawn under theta; lag is not corrected for.
    """
    difference_T = (theta_T - reference_T).clamp(min=-LOG_RATIO_CAP)
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T.square() / 2
    return torch.expm1(-difference_T) + difference_T


def adapted_coefficient(kl: KLPenalty, coefficient: float, divergence: float) -> float:
    """The penalty's coefficient after a step with this one and this divergence, in nats per token.

    PPO's adaptive penalty (arXiv 1707.06347, section 4), except that it never falls below the job's coefficient: a
    policy that begins at the reference would otherwise be without a penalty by the time it reaches the target.
    """
    if kl.target is None or kl.target / 1.5 <= divergence <= kl.target * 1.5:
        return coefficient
    changed = coefficient * 2 if divergence > kl.target else coefficient / 2
    return min(max(changed, kl.coefficient), kl.coefficient * KL_RANGE)


def sample_weights(aggregation: str, lengths_N: Tensor, *, groups: float, samples: float, tokens: float) -> Tensor:
    """The weight in the loss of every token of each sample, [N], from counts over the whole batch.

    - ``sequence_sum``: ``1 / groups``, the form the estimators require: a sum over a sample's tokens and a group's
      samples, a mean over groups.
    - ``sequence_mean``: ``1 / (groups * length)``, with a mean over each sample's tokens.
    - ``token_mean`` (DAPO, arXiv 2503.14476): ``samples / (groups * tokens)``, which is `sequence_sum` divided by the
      mean length: all tokens of the batch weigh the same, at the scale of ``sequence_mean``.
    """
    if aggregation == "sequence_sum":
        return torch.full_like(lengths_N, 1 / groups)
    if aggregation == "sequence_mean":
        return 1 / (groups * lengths_N)
    return torch.full_like(lengths_N, samples / (groups * tokens))


def value_loss(value_T: Tensor, old_T: Tensor, reward_T: Tensor, clip: float) -> Tensor:
    """Clipped value loss of each entry: ``1/2 max((V - R)^2, (clip(V, V_old - a, V_old + a) - R)^2)``.

    Source: arXiv 2503.19595, appendix A.4.
    """
    near_T = torch.clamp(value_T, old_T - clip, old_T + clip)
    return torch.maximum((value_T - reward_T).square(), (near_T - reward_T).square()) / 2


def _ratio(inputs: LossInputs, spec: PolicyUpdate) -> tuple[Tensor, Tensor | float]:
    """The ratio of each token, and the token's share in its sample's term.

    A ratio of a whole sample makes one term. Each token has an equal part of it, so that the sum counts it once.
    """
    log_ratio_T = inputs.theta_T - inputs.prox_T
    share_T: Tensor | float = 1.0
    if spec.ratio != "token":
        log_ratio_T = _per_sample(log_ratio_T.double(), inputs)
        share_T = 1 / _lengths(inputs)
    if spec.ratio == "geometric":
        log_ratio_T = log_ratio_T * share_T
    return log_ratio_T.clamp(max=LOG_RATIO_CAP).exp(), share_T


def _gain(ratio_T: Tensor, inputs: LossInputs, spec: PolicyUpdate) -> tuple[Tensor, Tensor]:
    """What the update raises for each token, before correction, and the tokens at which clipping changed it."""
    clipped_ratio_T = ratio_T.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    if spec.surrogate == "cispo":
        gain_T = clipped_ratio_T.detach() * inputs.advantage_T * inputs.theta_T
        return gain_T, (clipped_ratio_T != ratio_T) & (inputs.advantage_T != 0)
    gain_T, clipped_gain_T = ratio_T * inputs.advantage_T, clipped_ratio_T * inputs.advantage_T
    return torch.minimum(gain_T, clipped_gain_T), clipped_gain_T < gain_T


def _correction(inputs: LossInputs, spec: PolicyUpdate) -> tuple[Tensor, Tensor]:
    """The behaviour correction and the tokens whose weight was outside its range; no gradient."""
    log_weight_T = (inputs.prox_T - inputs.mu_T).detach()
    match spec.behaviour_correction:
        case NoCorrection():
            return torch.ones_like(log_weight_T), torch.zeros_like(log_weight_T, dtype=torch.bool)
        case TokenCorrection(cap=cap, mask=mask, floor=floor):
            pass
        case SequenceCorrection(cap=cap, mask=mask, floor=floor):
            log_weight_T = _per_sample(log_weight_T.double(), inputs)
    weight_T = log_weight_T.exp()
    above_T, below_T = weight_T > cap, weight_T < floor
    weight_T = torch.where(above_T, 0.0 if mask else cap, weight_T)
    return torch.where(below_T, 0.0, weight_T), above_T | below_T


def _masked(inputs: LossInputs, spec: PolicyUpdate) -> Tensor:
    """The tokens of samples that `off_policy_mask` drops."""
    if spec.off_policy_mask is None:
        return torch.zeros_like(inputs.sample_T, dtype=torch.bool)
    drift_T = _per_sample((inputs.mu_T - inputs.theta_T).double(), inputs) / _lengths(inputs)
    return (drift_T > spec.off_policy_mask) & (inputs.advantage_T < 0)


def _lengths(inputs: LossInputs) -> Tensor:
    """The number of tokens in its sample, for each token; float64, since bfloat16 counts to 256 only."""
    return _per_sample(torch.ones_like(inputs.theta_T, dtype=torch.float64), inputs)


def _per_sample(values_T: Tensor, inputs: LossInputs) -> Tensor:
    """The sum over its sample, for each token."""
    zeros_N = values_T.new_zeros(inputs.samples)
    return zeros_N.index_add(0, inputs.sample_T, values_T)[inputs.sample_T]
