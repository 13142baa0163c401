"""Reads a batch of groups and cuts it into dense buckets, each with one group size and one k.

The functions that compute advantages therefore see plain [rows, size] arrays and one k; masks are resolved here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from volley.objectives.combinatorics import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups flattened to two dimensions; values of masked samples are meaningless.

    g_BN rewards, log_w_BN log-weights or None, answers_BN ids or None, rank_BN ranks or None, valid_BN None when all
    are valid.
    """

    g_BN: FloatArray
    log_w_BN: FloatArray | None
    answers_BN: IntArray | None
    rank_BN: FloatArray | None
    valid_BN: BoolArray | None

    @property
    def valid_counts(self) -> IntArray:
        """The number of valid samples per group, [B]."""
        rows, n = self.g_BN.shape
        return np.full(rows, n) if self.valid_BN is None else self.valid_BN.sum(axis=-1)


def read_groups(
    rewards: ArrayLike,
    log_weights: ArrayLike | None = None,
    answers: ArrayLike | None = None,
    valid: ArrayLike | None = None,
    ranks: ArrayLike | None = None,
) -> tuple[Groups, tuple[int, ...]]:
    """Check and flatten a batch; also returns the leading shape of `rewards` [..., n].

    Raises:
        ValueError: no samples dimension, shapes that disagree, or a valid entry that is not finite (log-weights
            may be -inf: a weight of zero).
        TypeError: answers that are not integers, or a mask that is not boolean.
    """
    g = np.asarray(rewards, dtype=np.float64)
    if g.ndim == 0:
        raise ValueError("rewards need a last dimension of samples, [..., n]; got a scalar")
    flat = (-1, g.shape[-1]) if g.size else (int(np.prod(g.shape[:-1])), g.shape[-1])
    mask = None if valid is None else _same_shape(np.asarray(valid), g, "valid")
    if mask is not None and mask.dtype != np.bool_:
        raise TypeError(f"valid must be boolean, got {mask.dtype}; write valid.astype(bool)")
    ids = None if answers is None else _same_shape(np.asarray(answers), g, "answers")
    if ids is not None and not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"answers must be integer ids, got {ids.dtype}; number the distinct answers of each group")
    log_w = None if log_weights is None else _same_shape(np.asarray(log_weights, dtype=np.float64), g, "log_weights")
    rank = None if ranks is None else _same_shape(np.asarray(ranks, dtype=np.float64), g, "ranks")
    used = True if mask is None else mask
    if not np.isfinite(g, where=used, out=np.ones(g.shape, dtype=bool)).all():
        raise ValueError("a valid reward is not finite; mask such samples with valid=")
    if rank is not None and not np.isfinite(rank, where=used, out=np.ones(g.shape, dtype=bool)).all():
        raise ValueError("a valid sample has no finite rank; rank every sample, or mask it with valid=")
    if log_w is not None and (used & (np.isnan(log_w) | np.isposinf(log_w))).any():
        raise ValueError("a valid log-weight is nan or +inf; mask such samples with valid=")
    groups = Groups(
        g_BN=g.reshape(flat),
        log_w_BN=None if log_w is None else log_w.reshape(flat),
        answers_BN=None if ids is None else ids.reshape(flat).astype(np.int64),
        rank_BN=None if rank is None else rank.reshape(flat),
        valid_BN=None if mask is None or mask.all() else mask.reshape(flat),
    )
    return groups, g.shape[:-1]


Index: TypeAlias = tuple[IntArray, IntArray] | EllipsisType


def buckets(groups: Groups, k_B: IntArray) -> Iterator[tuple[Groups, int, Index]]:
    """The groups with two or more valid samples, as dense buckets of one size and one k.

    Yields the bucket, its k, and the index of its samples in a [B, n] array.
    """
    rows, n = groups.g_BN.shape
    n_valid_B = groups.valid_counts
    keys_B = n_valid_B * (n + 1) + k_B
    # valid samples first, in their order
    first_BN = None if groups.valid_BN is None else np.argsort(~groups.valid_BN, axis=-1, kind="stable")
    for key in np.unique(keys_B[n_valid_B >= 2]):
        size, k = divmod(int(key), n + 1)
        rows_R = np.flatnonzero(keys_B == key)
        columns_RS = np.arange(n)[None] if first_BN is None else first_BN[rows_R, :size]
        whole = first_BN is None and len(rows_R) == rows
        index: Index = ... if whole else (rows_R[:, None], columns_RS)
        yield _take(groups, index), k, index


def _take(groups: Groups, index: Index) -> Groups:
    log_w_BN, answers_BN, rank_BN = groups.log_w_BN, groups.answers_BN, groups.rank_BN
    return Groups(
        g_BN=groups.g_BN[index],
        log_w_BN=None if log_w_BN is None else log_w_BN[index],
        answers_BN=None if answers_BN is None else answers_BN[index],
        rank_BN=None if rank_BN is None else rank_BN[index],
        valid_BN=None,
    )


def _same_shape(x: NDArray[Any], g: FloatArray, name: str) -> NDArray[Any]:
    if x.shape != g.shape:
        raise ValueError(f"{name} has shape {x.shape}, rewards have {g.shape}; they must agree")
    return x
