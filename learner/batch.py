"""One rank's part of a batch, as flat token arrays and micro-batches.

Shapes: T sample tokens of the rank, N samples of the rank, G groups of the rank, n samples of a group.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from learner.layout import MicroBatch, Piece, micro_batches
from learner.records import ScoredGroup, SFTRow
from volley.errors import JobError
from volley.objectives import AdvantageReport, BestOfK, Mean, Objective, advantage_report
from volley.records import Group

T = TypeVar("T")
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What a rank trains on in one step.

    Attributes:
        groups: the arrays of each group.
        scored: the scores of each group, in the same order.
        mu_T: float32, the generator's log-probs.
        lag_T: int64, how many versions ago each token was sampled.
        sample_T: int64, the sample of each token.
        lengths_N: int64, tokens of each sample.
        keep_N: bool, False for samples dropped from their group: not scored, or truncated with `mask_truncated` set.
        pieces: one per group, the input of the micro-batch layout.
    """

    groups: tuple[Group, ...]
    scored: tuple[ScoredGroup, ...]
    mu_T: NDArray[np.float32]
    lag_T: NDArray[np.int64]
    sample_T: NDArray[np.int64]
    lengths_N: NDArray[np.int64]
    keep_N: NDArray[np.bool_]
    pieces: tuple[Piece, ...]

    @property
    def samples(self) -> int:
        return len(self.lengths_N)

    @property
    def tokens(self) -> int:
        return len(self.mu_T)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """float64 [N], NaN for samples without a reward."""
        return _joined([each.rewards_n for each in self.scored], np.float64)

    @property
    def group_sizes(self) -> NDArray[np.int64]:
        """The number of samples that each sample's group keeps, int64 [N]; 2 or more in `usable` groups."""
        keep_Gn = self.per_group(self.keep_N)
        return np.repeat(keep_Gn.sum(axis=-1), keep_Gn.shape[-1])

    @property
    def group_weights(self) -> NDArray[np.float32]:
        """The weight of each sample's group, float32 [N]."""
        weight_G = np.array([each.weight for each in self.scored], dtype=np.float32)
        return np.repeat(weight_G, len(self.lengths_N) // max(len(self.groups), 1))

    @property
    def fresh_T(self) -> NDArray[np.bool_]:  # noqa: N802 - a shape suffix
        """Tokens of samples of which no token is older than the version being trained, bool [T]."""
        stale_N = np.bincount(self.sample_T, self.lag_T > 0, self.samples)
        fresh_T: NDArray[np.bool_] = (stale_N == 0)[self.sample_T]
        return fresh_T

    def per_group(self, values_N: NDArray[Scalar]) -> NDArray[Scalar]:
        """[N] as [G, n]; all groups of a job have the same n."""
        return values_N.reshape(len(self.groups), -1) if self.groups else values_N.reshape(0, 0)

    def sample_sums(self, values_T: Tensor) -> NDArray[np.float64]:
        """The sum over the tokens of each sample, float64 [N]."""
        return np.bincount(self.sample_T, values_T.double().cpu().numpy(), self.samples).astype(np.float64)


def usable(
    groups: Sequence[Group], scored: Sequence[ScoredGroup], *, mask_truncated: bool
) -> tuple[list[tuple[Group, ScoredGroup]], dict[int, str]]:
    """The groups with two samples or more to compare, and why the others are dropped, by group id."""
    kept: list[tuple[Group, ScoredGroup]] = []
    dropped: dict[int, str] = {}
    for group, each in zip(groups, scored, strict=True):
        left = int((each.valid_n & group.stopped_n if mask_truncated else each.valid_n).sum())
        if left >= 2:
            kept.append((group, each))
        else:
            dropped[group.group_id] = f"{left} of {group.n} samples could be used"
    return kept, dropped


def rank_batch(
    groups: Sequence[Group], scored: Sequence[ScoredGroup], *, version: int, mask_truncated: bool
) -> RankBatch:
    """Concatenate the arrays of the groups."""
    starts = np.cumsum([0, *(len(group.tokens_T) for group in groups)])
    lengths_N = _joined([group.lengths_n for group in groups], np.int64)
    keep_N = _joined([each.valid_n for each in scored], np.bool_)
    if mask_truncated:
        keep_N &= _joined([group.stopped_n for group in groups], np.bool_)
    return RankBatch(
        groups=tuple(groups),
        scored=tuple(scored),
        mu_T=_joined([group.logprobs_T for group in groups], np.float32),
        lag_T=version - _joined([group.versions_T for group in groups], np.int64),
        sample_T=np.repeat(np.arange(len(lengths_N)), lengths_N),
        lengths_N=lengths_N,
        keep_N=keep_N,
        pieces=tuple(
            Piece(
                group.prompt_p,
                group.tokens_T,
                group.lengths_n,
                start + np.arange(len(group.tokens_T)),
                group.observation_S,
                group.observation_at_S,
            )
            for group, start in zip(groups, starts, strict=False)
        ),
    )


def group_advantages(
    batch: RankBatch, objective: Objective, *, shaped_N: NDArray[np.float64], log_weight_N: NDArray[np.float64] | None
) -> AdvantageReport:
    """Advantages of the rank's samples, [G, n], 0 for dropped samples.

    Args:
        shaped_N: rewards, less the KL penalty if the job puts it there; dropped samples may have any value.
        log_weight_N: log importance weight of each sample, for objectives with companion weights.

    Raises:
        JobError: the objective does not take such rewards, answers or ranks; a repetition would fail too.
    """
    if not batch.groups:
        return AdvantageReport(np.zeros((0, 0)), np.zeros(0, np.int64), {}, 0.0, np.zeros(0))
    keep_Gn = batch.per_group(batch.keep_N)
    try:
        return advantage_report(
            np.where(keep_Gn, batch.per_group(shaped_N), 0.0),
            objective,
            log_weights=None if log_weight_N is None else batch.per_group(log_weight_N),
            answers=np.stack([scored.answers_n for scored in batch.scored]),
            ranks=_ranks(batch.scored) if isinstance(objective, BestOfK) else None,
            valid=keep_Gn,
            k=_adapted_k(batch.scored),
        )
    except ValueError as error:
        raise JobError(str(error)) from error


def value_advantages(
    batch: RankBatch, objective: Objective, *, target_Gn: NDArray[np.float64], value_G: NDArray[np.float64]
) -> NDArray[np.float64]:
    """``target - V(x)`` for the samples kept of each group, [G, n]; for the mean objective divided by their number.

    Args:
        target_Gn: what V learns: the (shaped) rewards for the mean objective, whose baseline V then is, the advantages
            for others.
    """
    keep_Gn = batch.per_group(batch.keep_N)
    gain_Gn = np.where(keep_Gn, target_Gn - value_G[:, None], 0.0)
    return gain_Gn / np.maximum(keep_Gn.sum(-1, keepdims=True), 1) if isinstance(objective, Mean) else gain_Gn


def sft_pieces(rows: Sequence[SFTRow]) -> list[Piece]:
    """Supervised rows, each as a piece with one sample."""
    starts = np.cumsum([0, *(len(row.answer_a) for row in rows)])
    return [
        Piece(
            row.prompt_p,
            row.answer_a,
            np.array([len(row.answer_a)], np.int32),
            start + np.arange(len(row.answer_a)),
            row.observed_s,
            row.observed_at_s,
        )
        for row, start in zip(rows, starts, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Micro-batches in the host's memory; iterating, as often as wanted, moves them to ``device`` one by one."""

    on_host: tuple[MicroBatch, ...]
    device: torch.device

    def __len__(self) -> int:
        return len(self.on_host)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (batch.to(self.device) for batch in self.on_host)


@dataclass(frozen=True, slots=True)
class Packer:
    """How this rank lays out micro-batches.

    Attributes:
        budget: padded tokens of one micro-batch.
        width: the model's hidden size.
        allow_shared: whether samples of a group may share a row.
        device: device of the micro-batches.
    """

    budget: int
    width: int
    allow_shared: bool
    device: torch.device

    def __call__(self, pieces: Sequence[Piece]) -> MicroBatches:
        """Micro-batches of ``pieces``, the same number on every rank: ZeRO-3 gathers parameters collectively."""
        batches = micro_batches(pieces, self.budget, width=self.width, allow_shared=self.allow_shared)
        return MicroBatches(tuple(as_many(batches, idle, self.device)), self.device)


def as_many(batches: list[T], spare: Callable[[], T], device: torch.device) -> list[T]:
    """``batches``, filled up with spares to the largest number on any rank, or 1. Every rank must call it."""
    most = torch.tensor([max(len(batches), 1)], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return batches + [spare() for _ in range(int(most) - len(batches))]


def idle() -> MicroBatch:
    """A micro-batch of one row without sample tokens."""
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(torch.zeros((1, 2), dtype=torch.int64), None, None, none, none, none)


def _ranks(scored: Sequence[ScoredGroup]) -> NDArray[np.float64] | None:
    ranks = [each.ranks_n for each in scored if each.ranks_n is not None]
    return np.stack(ranks) if len(ranks) == len(scored) else None


def _adapted_k(scored: Sequence[ScoredGroup]) -> NDArray[np.int64] | None:
    ks = [each.k for each in scored if each.k is not None]
    return np.array(ks, dtype=np.int64) if len(ks) == len(scored) else None


def _joined(parts: Sequence[NDArray[Any]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
