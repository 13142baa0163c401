"""One step of a rank: forward passes, loss, optimiser updates, and what is measured on the way.

Shapes: T sample tokens of the rank, N its samples, G its groups.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.batch import RankBatch, group_advantages, lay_out
from learner.config import LearnerConfig
from learner.layout import MicroBatch, Piece
from learner.loss import LossInputs, kl_estimate, policy_loss, token_weights
from learner.sums import Sums
from volley.objectives import MajAtK, MaxAtK, Objective
from volley.update import Optimizer, PolicyUpdate


def learning_rate(spec: Optimizer, step: int, steps: int) -> float:
    """The rate of the step numbered ``step`` from 0: linear warm-up, then constant or cosine to zero."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    done = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    return spec.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class Stepper:
    """Takes steps with one DeepSpeed engine. Every rank must make the same calls in the same order.

    Args:
        engine: the DeepSpeed engine around a `learner.engine.Policy`.
        reference: the starting policy, or None where no divergence is wanted.
        width: the model's hidden size.
        allow_shared: may groups be laid out as one row?
    """

    def __init__(self, config: LearnerConfig, engine: Any, reference: Any, *, width: int, allow_shared: bool) -> None:
        self.config, self.engine, self.reference = config, engine, reference
        self.width, self.allow_shared = width, allow_shared
        self.steps_taken = 0

    # ---- supervised --------------------------------------------------------------------------------------------

    def supervised(self, pieces: Sequence[Piece]) -> dict[str, float]:
        """One step of cross-entropy on the answers' tokens, a mean over the tokens of all ranks."""
        begun = time.perf_counter()
        sums = Sums()
        tokens = sum(len(piece.tokens_T) for piece in pieces)
        sums.add(tokens=tokens)
        everywhere = sums.total(only=("tokens",))["tokens"]
        batches = self._padded(self._lay_out(pieces))
        for index, batch in enumerate(batches):
            logprob_T, entropy_T = self._forward(batch, last=index == len(batches) - 1)
            self._backward(-logprob_T.sum() / everywhere)
            sums.add(nll=-logprob_T.sum(), entropy=entropy_T.sum())
        grad_norm, rate = self._update()
        total = sums.total()
        seconds = time.perf_counter() - begun
        return {
            "loss": total["nll"] / everywhere,
            "entropy": total["entropy"] / everywhere,
            "tokens": everywhere,
            "tokens_per_second": everywhere / seconds,
            "grad_norm": grad_norm,
            "learning_rate": rate,
        }

    # ---- reinforcement -----------------------------------------------------------------------------------------

    def reinforce(self, batch: RankBatch, objective: Objective) -> tuple[dict[str, float], NDArray[np.float64]]:
        """One PPO step over the rank's groups: metrics over all ranks, and this rank's advantages, float64 [N]."""
        spec = self._policy_spec()
        begun = time.perf_counter()
        sums = Sums()
        sums.add(groups=len(batch.groups), samples=batch.samples, tokens=batch.tokens)
        counts = sums.total(only=("groups", "samples", "tokens"))
        batches = self._padded(self._lay_out(batch.pieces))
        prox_T = self._prox(batch, batches, objective, spec)
        reference_T = self._reference(batch, batches, spec)
        forwarded = time.perf_counter()
        advantage_N = self._advantages(batch, objective, spec, prox_T, reference_T)
        weight_N = token_weights(
            spec.aggregation,
            batch.lengths_N.to(torch.float32),
            groups=int(counts["groups"]),
            samples=int(counts["samples"]),
            tokens=int(counts["tokens"]),
        )
        weight_N = torch.where(torch.from_numpy(batch.keep_N), weight_N, 0.0)
        prepared = time.perf_counter()
        grad_norm, rate, loss = 0.0, 0.0, 0.0
        for update in range(spec.updates_per_batch):
            seen = sums if update == spec.updates_per_batch - 1 else Sums()
            for index, micro in enumerate(batches):
                self._micro_step(
                    batch,
                    micro,
                    spec,
                    prox_T=prox_T,
                    reference_T=reference_T,
                    advantage_N=torch.from_numpy(advantage_N).float(),
                    weight_N=weight_N,
                    sums=seen,
                    last=index == len(batches) - 1,
                )
            grad_norm, rate = self._update()
        total = sums.total()
        tokens = max(total["tokens"], 1.0)
        loss = total["loss"]
        metrics = {
            "loss": loss,
            "entropy": total["entropy"] / tokens,
            "ratio_mean": total["ratio"] / tokens,
            "ratio_max": total["ratio_max"],
            "clip_fraction": total["clipped"] / tokens,
            "correction_mean": total["correction"] / tokens,
            "truncated_share": total["truncated"] / tokens,
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "tokens": total["tokens"],
            "tokens_per_second": total["tokens"] / (time.perf_counter() - begun),
            "seconds_extra_forward": forwarded - begun,
            "seconds_update": time.perf_counter() - prepared,
        }
        if total["fresh_tokens"]:
            metrics["logprob_mismatch_mean"] = total["mismatch"] / total["fresh_tokens"]
            metrics["logprob_mismatch_max"] = total["mismatch_max"]
        if total["reference_tokens"]:
            metrics["kl_k1"] = total["kl_k1"] / total["reference_tokens"]
            metrics["kl_k3"] = total["kl_k3"] / total["reference_tokens"]
        return metrics, advantage_N

    def _micro_step(
        self,
        batch: RankBatch,
        micro: MicroBatch,
        spec: PolicyUpdate,
        *,
        prox_T: Tensor | None,
        reference_T: Tensor | None,
        advantage_N: Tensor,
        weight_N: Tensor,
        sums: Sums,
        last: bool,
    ) -> None:
        """Forward, loss and backward of one micro-batch."""
        theta_t, entropy_t = self._forward(micro, last=last)
        index_t = micro.index_T
        sample_t = batch.sample_T[index_t]
        prox_t = theta_t.detach() if prox_T is None else prox_T[index_t]
        reference_t = None if reference_T is None else reference_T[index_t]
        inputs = LossInputs(
            theta_T=theta_t,
            prox_T=prox_t,
            mu_T=batch.mu_T[index_t],
            advantage_T=advantage_N[sample_t],
            weight_T=weight_N[sample_t],
            sample_T=sample_t,
            samples=batch.samples,
            entropy_T=entropy_t,
            reference_T=None
            if reference_t is None
            else torch.where(reference_t.isnan(), theta_t.detach(), reference_t),
        )
        parts = policy_loss(inputs, spec)
        self._backward(parts.loss)
        fresh_t = torch.from_numpy(batch.lag_T)[index_t] == 0
        mismatch_t = (prox_t - inputs.mu_T).abs()[fresh_t]
        sums.add(
            loss=parts.loss,
            entropy=entropy_t.sum(),
            ratio=parts.ratio_T.sum(),
            clipped=parts.clipped_T.sum(),
            correction=parts.correction_T.sum(),
            truncated=parts.truncated_T.sum(),
            fresh_tokens=fresh_t.sum(),
            mismatch=mismatch_t.sum(),
        )
        sums.peak(ratio_max=parts.ratio_T, mismatch_max=mismatch_t)
        if reference_t is not None:
            known_t = ~reference_t.isnan()
            theta_k, reference_k = theta_t.detach()[known_t], reference_t[known_t]
            sums.add(
                reference_tokens=known_t.sum(),
                kl_k1=kl_estimate(theta_k, reference_k, "k1").sum(),
                kl_k3=kl_estimate(theta_k, reference_k, "k3").sum(),
            )

    def _advantages(
        self,
        batch: RankBatch,
        objective: Objective,
        spec: PolicyUpdate,
        prox_T: Tensor | None,
        reference_T: Tensor | None,
    ) -> NDArray[np.float64]:
        shaped_N = np.concatenate([each.rewards_n for each in batch.scored]) if batch.scored else np.zeros(0)
        if spec.kl.coefficient and spec.kl.where == "reward" and prox_T is not None and reference_T is not None:
            kl_T = kl_estimate(prox_T, reference_T, spec.kl.estimator)
            shaped_N = shaped_N - spec.kl.coefficient * _sample_sums(kl_T, batch).numpy()
        log_weight_N = None
        if prox_T is not None and _off_policy(objective):
            log_weight_N = _sample_sums(prox_T - batch.mu_T, batch).numpy().astype(np.float64)
        return group_advantages(batch, objective, shaped_N=shaped_N, log_weight_N=log_weight_N)

    def _prox(
        self, batch: RankBatch, batches: Sequence[MicroBatch], objective: Objective, spec: PolicyUpdate
    ) -> Tensor | None:
        """The learner's log-probs before the update, float32 [T]; None where the training pass itself gives them."""
        shaped = bool(spec.kl.coefficient) and spec.kl.where == "reward"
        if spec.updates_per_batch == 1 and not _off_policy(objective) and not shaped:
            return None
        return self._logprobs(self.engine, batch, batches)

    def _reference(self, batch: RankBatch, batches: Sequence[MicroBatch], spec: PolicyUpdate) -> Tensor | None:
        """The starting policy's log-probs, float32 [T]; NaN at tokens it is not wanted for."""
        if self.reference is None:
            return None
        if spec.kl.coefficient:
            return self._logprobs(self.reference, batch, batches)
        if not spec.kl.logged_share:
            return None
        count = math.ceil(spec.kl.logged_share * len(batch.pieces))
        return self._logprobs(self.reference, batch, self._lay_out(batch.pieces[:count]))

    @torch.no_grad()
    def _logprobs(self, model: Any, batch: RankBatch, batches: Sequence[MicroBatch]) -> Tensor:
        out_T = torch.full((batch.tokens,), torch.nan)
        for micro in batches:
            out_T[micro.index_T] = model(micro)[0]
        return out_T

    # ---- engine ------------------------------------------------------------------------------------------------

    def _lay_out(self, pieces: Sequence[Piece]) -> list[MicroBatch]:
        budget = self.config.learner.tokens_per_micro_batch
        return lay_out(pieces, budget, width=self.width, allow_shared=self.allow_shared)

    def _padded(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """As many micro-batches on every rank: ZeRO-3 gathers parameters in step."""
        sums = Sums()
        sums.peak(micro_batches=torch.tensor([float(len(batches))]))
        from learner.batch import dummy

        return batches + [dummy()] * (int(sums.total()["micro_batches"]) - len(batches))

    def _forward(self, batch: MicroBatch, *, last: bool) -> tuple[Tensor, Tensor]:
        self.engine.set_gradient_accumulation_boundary(last)
        logprob_T, entropy_T = self.engine(batch)
        return logprob_T, entropy_T

    def _backward(self, loss: Tensor) -> None:
        # DeepSpeed takes the mean over ranks; losses carry global counts, so their sum is wanted.
        self.engine.backward(loss * self.config.learner.ranks)

    def _update(self) -> tuple[float, float]:
        """The optimiser's update after the last micro-batch: gradient norm before clipping, learning rate."""
        spec = self.config.optimizer
        rate = learning_rate(spec, self.steps_taken, self.config.steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return float(norm) if norm is not None else float("nan"), rate

    def _policy_spec(self) -> PolicyUpdate:
        if self.config.update is None:
            raise ValueError("a learner for supervised steps has no policy loss")
        return self.config.update


def _off_policy(objective: Objective) -> bool:
    return isinstance(objective, MaxAtK | MajAtK) and objective.companion_weights != "none"


def _sample_sums(values_T: Tensor, batch: RankBatch) -> Tensor:
    return torch.zeros(batch.samples, dtype=torch.float64).index_add(0, batch.sample_T, values_T.double())
