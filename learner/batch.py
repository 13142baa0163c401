"""One rank's part of a batch, as flat token arrays and laid-out micro-batches.

Shapes: T sample tokens of the rank, N samples of the rank, side by side; n samples of one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.layout import MicroBatch, Piece, micro_batches
from learner.records import ScoredGroup, SFTRow
from volley.objectives import Objective, advantages
from volley.records import Group


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What a rank trains on in one step.

    Attributes:
        groups: the groups' arrays.
        scored: their verdict columns, in the same order.
        mu_T: float32, the generator's log-probs.
        lag_T: int64, versions each token is old.
        sample_T: int64, which of the rank's samples each token is of.
        lengths_N: int64, tokens of each sample.
        keep_N: bool, False for samples that give no gradient: not scored, or cut and to be masked.
        pieces: one for each group, to be laid out.
    """

    groups: tuple[Group, ...]
    scored: tuple[ScoredGroup, ...]
    mu_T: Tensor
    lag_T: NDArray[np.int64]
    sample_T: Tensor
    lengths_N: Tensor
    keep_N: NDArray[np.bool_]
    pieces: tuple[Piece, ...]

    @property
    def samples(self) -> int:
        return len(self.lengths_N)

    @property
    def tokens(self) -> int:
        return len(self.mu_T)


def rank_batch(
    groups: Sequence[Group], scored: Sequence[ScoredGroup], *, version: int, mask_truncated: bool
) -> RankBatch:
    """Lay the groups' arrays end to end."""
    starts = np.cumsum([0, *(len(group.tokens_T) for group in groups)])
    lengths_N = _joined([group.lengths_n for group in groups], np.int64)
    keep_N = _joined([each.valid_n for each in scored], np.bool_)
    if mask_truncated:
        keep_N &= _joined([group.stopped_n for group in groups], np.bool_)
    return RankBatch(
        groups=tuple(groups),
        scored=tuple(scored),
        mu_T=torch.from_numpy(_joined([group.logprobs_T for group in groups], np.float32)),
        lag_T=version - _joined([group.versions_T for group in groups], np.int64),
        sample_T=torch.from_numpy(np.repeat(np.arange(len(lengths_N)), lengths_N)),
        lengths_N=torch.from_numpy(lengths_N),
        keep_N=keep_N,
        pieces=tuple(
            Piece(group.prompt_p, group.tokens_T, group.lengths_n, int(start))
            for group, start in zip(groups, starts, strict=False)
        ),
    )


def group_advantages(
    batch: RankBatch, objective: Objective, *, shaped_N: NDArray[np.float64], log_weight_N: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Advantages of the rank's samples, float64 [N], group by group, 0 for samples that leave their group.

    Args:
        shaped_N: rewards, shaped where the job asks for it; anything at samples that are not kept.
        log_weight_N: log importance weight of each sample, for objectives with companion weights.
    """
    if not batch.groups:
        return np.zeros(0)
    shape = (len(batch.groups), batch.groups[0].n)  # every group of a job asks for the same n
    keep_Gn = batch.keep_N.reshape(shape)
    return advantages(
        np.where(keep_Gn, shaped_N.reshape(shape), 0.0),
        objective,
        log_weights=None if log_weight_N is None else log_weight_N.reshape(shape),
        answers=np.stack([scored.answers_n for scored in batch.scored]),
        valid=keep_Gn,
        k=_adapted_k(batch.scored),
    ).reshape(-1)


def _adapted_k(scored: Sequence[ScoredGroup]) -> NDArray[np.int64] | None:
    ks = [each.k for each in scored if each.k is not None]
    return np.array(ks, dtype=np.int64) if len(ks) == len(scored) else None


def sft_pieces(rows: Sequence[SFTRow]) -> list[Piece]:
    """Supervised rows as pieces of one sample each."""
    starts = np.cumsum([0, *(len(row.answer_a) for row in rows)])
    return [
        Piece(row.prompt_p, row.answer_a, np.array([len(row.answer_a)], np.int32), int(start))
        for row, start in zip(rows, starts, strict=False)
    ]


def lay_out(pieces: Sequence[Piece], budget: int, *, width: int, allow_shared: bool) -> list[MicroBatch]:
    """`micro_batches`, and one dummy micro-batch for a rank that has nothing."""
    return micro_batches(pieces, budget, width=width, allow_shared=allow_shared) or [dummy()]


def dummy() -> MicroBatch:
    """One row without sample tokens: keeps a rank in step with the others' collectives."""
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(torch.zeros((1, 2), dtype=torch.int64), None, None, none, none, none, none)


def _joined(parts: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
