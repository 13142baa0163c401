"""One reinforcement step of a rank: forward passes, advantages, loss, updates and metrics.

Shapes: T sample tokens of the rank, t of a micro-batch; N samples of the rank, G its groups; n samples of a group.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.batch import Packer, RankBatch, group_advantages, value_advantages
from learner.engine import Engine
from learner.layout import MicroBatch, Piece
from learner.loss import LossInputs, adapted_coefficient, kl_estimate, policy_loss, sample_weights
from learner.sums import Sums
from learner.value import Critic
from volley.errors import Diverged
from volley.objectives import Mean, Objective
from volley.objectives.spec import PER_SAMPLE, weighs_companions
from volley.update import PolicyUpdate, check_update

LARGEST_ADVANTAGE = 1e30  # leaves room in float32 for the gradient of the log-prob


# Log-prob and entropy of each sample token of a micro-batch, float32 [T]: `Policy` under ZeRO, or a reference.
Scorer = Callable[[MicroBatch], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The rank's tokens and samples in a step, on the device.

    Attributes:
        prox_T: float32, the learner's log-probs before the update; None if the training pass itself yields them.
        reference_T: float32, the starting policy's log-probs, NaN at tokens for which they are not needed; None if no
            token needs them.
        mu_T: float32, the generator's log-probs.
        fresh_T: bool, tokens of samples drawn wholly under the version being trained: a sample that went on after an
            update attends to keys and values of older weights.
        sample_T: int64, the sample of each token.
        measured_T: bool, tokens over which the metrics are taken.
        advantage_N: float64.
        weight_N: float32, the weight of each of the sample's tokens in the loss.
        penalty_divisor_N: float32, see `LossInputs`.
    """

    prox_T: Tensor | None
    reference_T: Tensor | None
    mu_T: Tensor
    fresh_T: Tensor
    sample_T: Tensor
    measured_T: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    penalty_divisor_N: Tensor


class Reinforcer:
    """Takes the reinforcement steps of one rank. Every rank must make the same calls in the same order.

    Args:
        spec: the loss.
        engine: the policy.
        pack: lays out micro-batches.
        reference: the starting policy, or None if the divergence is neither penalised nor logged.
        critic: the value model, or None.
    """

    def __init__(
        self,
        spec: PolicyUpdate,
        engine: Engine,
        pack: Packer,
        *,
        reference: Scorer | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.spec, self.engine, self.pack = spec, engine, pack
        self.reference, self.critic = reference, critic
        self._kl = spec.kl

    @property
    def kl_coefficient(self) -> float:
        """The penalty's coefficient in the next step: the job's, unless `update.kl.target` adapts it."""
        return self.spec.kl.coefficient

    @kl_coefficient.setter
    def kl_coefficient(self, value: float) -> None:
        self.spec = self.spec.model_copy(update={"kl": self._kl.model_copy(update={"coefficient": value})})

    def step(
        self, batch: RankBatch, objective: Objective, step: int
    ) -> tuple[dict[str, float], dict[int, NDArray[np.float64]]]:
        """PPO updates on the rank's groups; returns metrics of all ranks and this rank's advantages by group id.

        Raises:
            ValueError: the objective does not fit the update.
            Diverged: a gradient is not finite, or an importance weight is too large.
        """
        check_update(self.spec, objective)
        begun = time.perf_counter()
        tensors, advantage_Gn, metrics = self._prepare(batch, objective, step)
        batches = self.pack(self._computed(batch, advantage_Gn))
        prepared = time.perf_counter()
        clipped = 0
        for _ in range(self.spec.updates_per_batch):
            # Metrics are those of the last update; earlier ones are discarded.
            sums = Sums(self.engine.device, self.engine.copies)
            for number, micro in enumerate(batches, 1):
                self._micro_step(tensors, batch.samples, micro, sums, last=number == len(batches))
            grad_norm, rate = self.engine.update(step)
            clipped += self.engine.spec.clips(grad_norm)
        metrics |= _metrics(sums.total(), masks=self.spec.off_policy_mask is not None)
        ended = time.perf_counter()
        metrics |= {
            "grad_norm": grad_norm,
            "clipped_share": clipped / self.spec.updates_per_batch,
            "learning_rate": rate,
            "tokens_per_second": metrics["tokens"] / (ended - begun),
            "seconds_prepare": prepared - begun,
            "seconds_update": ended - prepared,
        }
        self._adapt_penalty(metrics)
        advantages = {group.group_id: advantage_Gn[row] for row, group in enumerate(batch.groups)}
        return metrics, advantages

    def _adapt_penalty(self, metrics: dict[str, float]) -> None:
        """Choose the next step's penalty from this step's divergence, which is the same on all ranks."""
        if self._kl.target is None:
            return
        metrics["kl_coefficient"] = self.kl_coefficient
        if "kl_k3" in metrics:
            self.kl_coefficient = adapted_coefficient(self._kl, self.kl_coefficient, metrics["kl_k3"])

    # ---- before the update -------------------------------------------------------------------------------------

    def _prepare(
        self, batch: RankBatch, objective: Objective, step: int
    ) -> tuple[StepTensors, NDArray[np.float64], dict[str, float]]:
        """The inputs of the loss, the advantages [G, n], and the metrics known before the update."""
        spec, device = self.spec, self.engine.device
        prox_T = self._logprobs(self.engine, batch, batch.pieces) if self._needs_prox(objective) else None
        reference_T = self._reference(batch)
        shaped_N = batch.rewards
        if spec.kl.shapes_reward and prox_T is not None and reference_T is not None:
            kl_T = kl_estimate(prox_T, reference_T, spec.kl.estimator)
            shaped_N = shaped_N - spec.kl.coefficient * batch.sample_sums(kl_T)
        advantage_Gn, metrics = self._advantages(batch, objective, prox_T, shaped_N, step)
        tensors = StepTensors(
            prox_T=prox_T,
            reference_T=reference_T,
            mu_T=torch.from_numpy(batch.mu_T).to(device),
            fresh_T=torch.from_numpy(batch.fresh_T).to(device),
            sample_T=torch.from_numpy(batch.sample_T).to(device),
            measured_T=(torch.arange(batch.tokens) < self._measured(batch)[1]).to(device),
            advantage_N=torch.from_numpy(advantage_Gn.reshape(-1)).to(device),
            weight_N=self._weights(batch).to(device),
            penalty_divisor_N=_penalty_divisors(batch, objective).to(device, torch.float32),
        )
        return tensors, advantage_Gn, metrics

    def _needs_prox(self, objective: Objective) -> bool:
        """Whether a forward pass is needed before the update, rather than the training pass alone."""
        return self.spec.updates_per_batch > 1 or self.spec.kl.shapes_reward or weighs_companions(objective)

    def _measured(self, batch: RankBatch) -> tuple[int, int]:
        """The number of groups whose tokens are measured, the first ones, and how many tokens they have."""
        groups = math.ceil(self.spec.kl_sample_fraction * len(batch.groups))
        return groups, sum(len(group.tokens_T) for group in batch.groups[:groups])

    def _computed(self, batch: RankBatch, advantage_Gn: NDArray[np.float64]) -> list[Piece]:
        """What goes through the model: all of the measured groups, and samples with a gradient of the others."""
        if self.spec.acts_on_all:
            return list(batch.pieces)
        groups, _ = self._measured(batch)
        live = [
            piece.only(advantage_n != 0)
            for piece, advantage_n in zip(batch.pieces[groups:], advantage_Gn[groups:], strict=True)
        ]
        return [*batch.pieces[:groups], *(piece for piece in live if len(piece.lengths_n))]

    def _reference(self, batch: RankBatch) -> Tensor | None:
        if self.reference is None:
            return None
        groups, _ = self._measured(batch)
        return self._logprobs(
            self.reference, batch, batch.pieces if self.spec.kl.coefficient else batch.pieces[:groups]
        )

    @torch.no_grad()
    def _logprobs(self, model: Scorer, batch: RankBatch, pieces: Sequence[Piece]) -> Tensor:
        """Log-probs under ``model``, float32 [T], NaN at tokens outside ``pieces``."""
        out_T = torch.full((batch.tokens,), torch.nan, device=self.engine.device)
        for micro in self.pack(pieces):
            out_T[micro.index_T] = model(micro)[0].float()
        return out_T

    def _advantages(
        self,
        batch: RankBatch,
        objective: Objective,
        prox_T: Tensor | None,
        shaped_N: NDArray[np.float64],
        step: int,
    ) -> tuple[NDArray[np.float64], dict[str, float]]:
        """Advantages [G, n], and metrics of all ranks about them and the value model."""
        metrics: dict[str, float] = {}
        sums = Sums(self.engine.device, self.engine.copies)
        log_weight_N = None
        if prox_T is not None and weighs_companions(objective):
            log_weight_N = batch.sample_sums(prox_T.cpu() - torch.from_numpy(batch.mu_T))
        report = group_advantages(batch, objective, shaped_N=shaped_N, log_weight_N=log_weight_N)
        advantage_Gn = report.advantages
        if log_weight_N is not None:
            own_weight_N = np.exp(np.minimum(log_weight_N, 0.0))  # about the factor that the correction applies
            sums.peak(largest=torch.from_numpy(np.abs(advantage_Gn).reshape(-1) * own_weight_N))
        if self.critic is not None:
            target_Gn = batch.per_group(shaped_N) if isinstance(objective, Mean) else advantage_Gn
            value_G, metrics = self._criticise(self.critic, batch, target_Gn, step)
            advantage_Gn = value_advantages(batch, objective, target_Gn=target_Gn, value_G=value_G)
        live_G = (advantage_Gn != 0).any(-1)
        sums.add(
            groups=float(len(batch.groups)),
            truncated=report.truncated_share * len(batch.groups),
            live=float(live_G.sum()),
            focal=float(report.focal_weights[live_G].sum()),
            samples=float(batch.samples),
            live_samples=float((advantage_Gn != 0).sum()),
            tokens=float(batch.tokens),
        )
        total = sums.total()
        if total.get("largest", 0.0) > LARGEST_ADVANTAGE:
            raise Diverged(
                f"importance weights make an advantage of {total['largest']:.0e} in step {step}, too large for "
                "float32: write objective.weight_cap: 2.0 or objective.companion_weights: self_normalised, or lower "
                "max_lag, and resume from a checkpoint"
            )
        metrics["tokens"] = total["tokens"]
        metrics["live_group_fraction"] = total["live"] / max(total["groups"], 1.0)
        metrics["live_sample_fraction"] = total["live_samples"] / max(total["samples"], 1.0)
        if weighs_companions(objective):
            metrics["companion_truncated_share"] = total["truncated"] / max(total["groups"], 1.0)
        if objective.focal:
            metrics["focal_weight_mean"] = total["focal"] / max(total["live"], 1.0)
        return advantage_Gn, metrics

    def _criticise(
        self, critic: Critic, batch: RankBatch, target_Gn: NDArray[np.float64], step: int
    ) -> tuple[NDArray[np.float64], dict[str, float]]:
        """V of each group before the value model's update, and the metrics of that update."""
        prompts = critic.batches([group.prompt_p for group in batch.groups])
        value_G = critic.values(prompts, len(batch.groups))
        metrics: dict[str, float] = {}
        for _ in range(self.spec.updates_per_batch):
            metrics = critic.update(
                prompts,
                old_G=value_G,
                target_Gn=target_Gn,
                keep_Gn=batch.per_group(batch.keep_N),
                step=step,
            )
        return value_G, metrics

    def _weights(self, batch: RankBatch) -> Tensor:
        """The token weight of each sample, float32 [N], from counts over all ranks; 0 for dropped samples."""
        counted = Sums(self.engine.device, self.engine.copies)
        counted.add(
            groups=float(len(batch.groups)),
            samples=float(batch.keep_N.sum()),
            tokens=float(batch.lengths_N[batch.keep_N].sum()),
        )
        counts = counted.total()
        weight_N = sample_weights(
            self.spec.aggregation,
            torch.from_numpy(batch.lengths_N).to(torch.float32),
            groups=max(counts["groups"], 1.0),
            samples=counts["samples"],
            tokens=max(counts["tokens"], 1.0),
        )
        weight_N = weight_N * torch.from_numpy(batch.group_weights)
        return torch.where(torch.from_numpy(batch.keep_N), weight_N, 0.0)

    # ---- the update --------------------------------------------------------------------------------------------

    def _micro_step(self, tensors: StepTensors, samples: int, micro: MicroBatch, sums: Sums, *, last: bool) -> None:
        """Forward, loss and backward of one micro-batch."""
        theta_t, entropy_t = self.engine(micro, last=last)
        index_t = micro.index_T
        sample_t = tensors.sample_T[index_t]
        prox_t = theta_t.detach() if tensors.prox_T is None else tensors.prox_T[index_t]
        reference_t = None if tensors.reference_T is None else tensors.reference_T[index_t]
        inputs = LossInputs(
            theta_T=theta_t,
            prox_T=prox_t,
            mu_T=tensors.mu_T[index_t],
            advantage_T=tensors.advantage_N[sample_t],
            weight_T=tensors.weight_N[sample_t],
            sample_T=sample_t,
            samples=samples,
            penalty_divisor_T=tensors.penalty_divisor_N[sample_t],
            entropy_T=entropy_t,
            reference_T=reference_t,
        )
        parts = policy_loss(inputs, self.spec)
        self.engine.backward(parts.loss)
        measured_t = tensors.measured_T[index_t]
        mismatch_t = (prox_t - inputs.mu_T).abs()[tensors.fresh_T[index_t] & measured_t]
        sums.add(
            computed=float(len(theta_t)),
            measured=measured_t.sum(),
            loss=parts.loss,
            entropy=entropy_t[measured_t].sum(),
            ratio=parts.ratio_T[measured_t].sum(),
            clipped=parts.clipped_T[measured_t].sum(),
            correction=parts.correction_T[measured_t].sum(),
            truncated=parts.truncated_T[measured_t].sum(),
            masked=parts.masked_T[measured_t].sum(),
            fresh_tokens=float(len(mismatch_t)),
            mismatch=mismatch_t.sum(),
        )
        sums.peak(ratio_max=parts.ratio_T, mismatch_max=mismatch_t)
        if reference_t is not None:
            known_t = measured_t & ~reference_t.isnan()
            theta_k, reference_k = theta_t.detach()[known_t], reference_t[known_t]
            sums.add(
                reference_tokens=known_t.sum(),
                kl_k1=kl_estimate(theta_k, reference_k, "k1").sum(),
                kl_k3=kl_estimate(theta_k, reference_k, "k3").sum(),
            )


def _penalty_divisors(batch: RankBatch, objective: Objective) -> Tensor:
    """`LossInputs.penalty_divisor_T` of each sample, [N]."""
    sizes_N = torch.from_numpy(batch.group_sizes)
    return torch.ones_like(sizes_N) if isinstance(objective, PER_SAMPLE) else sizes_N


def _metrics(total: dict[str, float], *, masks: bool) -> dict[str, float]:
    """The metrics of an update, from its sums; with ``masks``, also how much `off_policy_mask` dropped."""
    measured = max(total["measured"], 1.0)
    metrics = {
        "loss": total["loss"],
        "entropy": total["entropy"] / measured,
        "ratio_mean": total["ratio"] / measured,
        "ratio_max": total["ratio_max"],
        "clip_fraction": total["clipped"] / measured,
        "correction_mean": total["correction"] / measured,
        "truncated_share": total["truncated"] / measured,
        "computed_tokens": total["computed"],
    }
    if masks:
        metrics["off_policy_masked_share"] = total["masked"] / measured
    if total["fresh_tokens"]:
        metrics["logprob_mismatch_mean"] = total["mismatch"] / total["fresh_tokens"]
        metrics["logprob_mismatch_max"] = total["mismatch_max"]
    if total.get("reference_tokens"):
        metrics["kl_k1"] = total["kl_k1"] / total["reference_tokens"]
        metrics["kl_k3"] = total["kl_k3"] / total["reference_tokens"]
    return metrics
