"""Micro-batches: lays prompts and samples out as rows of tokens.

Two layouts give the same log-probs:

    flat     one row per sample, after its prompt: [p s1] [p s2] ...
    shared   m samples of a group in one row after one prompt: [p s1 s2 ...]; a mask lets each sample attend to the
             prompt and itself, and the positions of each continue from the prompt's end

The shared layout computes prompts less often, but attends over the whole row; `samples_per_row` chooses m.
Shapes: R rows, L row length, T sample tokens of the micro-batch, in the order of its samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.shape import samples_sharing_row


def _nothing() -> NDArray[np.int32]:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Piece:
    """A prompt and some of its samples, to be laid out together.

    Attributes:
        prompt_p: int32 [p].
        tokens_T: int32 [T], the samples end to end.
        lengths_n: int32 [n].
        index_T: int64 [T], each token's index in the rank's token arrays.
        observation_S, observation_at_S: int32 [S], tokens observed between turns, and the index in ``tokens_T`` that
            each is placed before. They are context: the loss never predicts them.
    """

    prompt_p: NDArray[np.int32]
    tokens_T: NDArray[np.int32]
    lengths_n: NDArray[np.int32]
    index_T: NDArray[np.int64]
    observation_S: NDArray[np.int32] = field(default_factory=_nothing)
    observation_at_S: NDArray[np.int32] = field(default_factory=_nothing)

    @property
    def row_tokens(self) -> int:
        return len(self.prompt_p) + len(self.tokens_T) + len(self.observation_S)

    @property
    def spans_n(self) -> NDArray[np.int64]:
        """int64 [n], each sample's length in a row: its tokens and its observations."""
        observed_n = np.bincount(self._owners()[self.observation_at_S], minlength=len(self.lengths_n))
        return self.lengths_n + observed_n

    def only(self, keep_n: NDArray[np.bool_]) -> "Piece":
        """The piece with only the samples in ``keep_n``."""
        keep_T = np.repeat(keep_n, self.lengths_n)
        keep_S = keep_T[self.observation_at_S]
        place_T = np.cumsum(keep_T) - 1
        return Piece(
            self.prompt_p,
            self.tokens_T[keep_T],
            self.lengths_n[keep_n],
            self.index_T[keep_T],
            self.observation_S[keep_S],
            place_T[self.observation_at_S[keep_S]].astype(np.int32),
        )

    def split(self, samples: int) -> list["Piece"]:
        """Split into pieces of at most ``samples`` samples each."""
        n = len(self.lengths_n)
        if samples >= n:
            return [self]
        return [self.only((np.arange(n) >= cut) & (np.arange(n) < cut + samples)) for cut in range(0, n, samples)]

    def _owners(self) -> NDArray[np.int64]:
        """int64 [T], the sample each token belongs to."""
        return np.repeat(np.arange(len(self.lengths_n)), self.lengths_n)

    def body(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The tokens after the prompt, observations included, and the index in them of each of ``tokens_T``."""
        tokens = np.arange(len(self.tokens_T))
        place_T = tokens + np.searchsorted(self.observation_at_S, tokens, side="right")
        ids = np.empty(len(self.tokens_T) + len(self.observation_S), np.int32)
        ids[place_T] = self.tokens_T
        ids[np.arange(len(self.observation_S)) + self.observation_at_S] = self.observation_S
        return ids, place_T


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows for one forward pass.

    Attributes:
        ids_RL: int64 token ids, right-padded.
        positions_RL: int64 position ids; None if they count from 0.
        segment_RL: int64, what each position belongs to: -1 padding, 0 the prompt, 1 and more a sample of the row; None
            if no samples share a row, for plain causal attention.
        at_T: int64 index in the flattened [R * L] of the hidden state that predicts each sample token.
        token_T: int64, the sample tokens.
        index_T: int64, each token's index in the rank's token arrays.
    """

    ids_RL: Tensor
    positions_RL: Tensor | None
    segment_RL: Tensor | None
    at_T: Tensor
    token_T: Tensor
    index_T: Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on ``device``."""
        return MicroBatch(
            ids_RL=self.ids_RL.to(device),
            positions_RL=None if self.positions_RL is None else self.positions_RL.to(device),
            segment_RL=None if self.segment_RL is None else self.segment_RL.to(device),
            at_T=self.at_T.to(device),
            token_T=self.token_T.to(device),
            index_T=self.index_T.to(device),
        )

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """What attention adds to its scores, [R, 1, L, L] of ``dtype``: 0 where a position may attend, else -inf.

        It is made for one forward pass, as it is by far the largest tensor of a micro-batch. With the model's dtype all
        layers use this one tensor; of a mask of bool, SDPA would make and keep one per layer.
        """
        if self.segment_RL is None:
            return None
        return torch.zeros((), dtype=dtype, device=self.segment_RL.device).masked_fill(
            ~_may_attend(self.segment_RL), -torch.inf
        )


def micro_batches(groups: Sequence[Piece], budget: int, *, width: int, allow_shared: bool) -> list[MicroBatch]:
    """Lay out ``groups`` in the cheapest way, longest rows first, with at most ``budget`` padded tokens per batch.

    A prompt and sample that together exceed the budget make a micro-batch of their own. Pieces without sample tokens
    are left out: an episode may end before the model's first answer, and then there may be no prompt either.

    Args:
        width: the model's hidden size, for the cost model.
        allow_shared: False for models that do not accept a 4D attention mask.
    """
    pieces: list[Piece] = []
    for group in (each for each in groups if len(each.tokens_T)):
        pieces += group.split(samples_per_row(group, budget, width) if allow_shared else 1)
    pieces.sort(key=lambda piece: -piece.row_tokens)
    batches: list[MicroBatch] = []
    rows: list[Piece] = []
    for piece in pieces:
        if rows and rows[0].row_tokens * (len(rows) + 1) > budget:
            batches.append(_lay_out(rows))
            rows = []
        rows.append(piece)
    if rows:
        batches.append(_lay_out(rows))
    return batches


def samples_per_row(group: Piece, budget: int, width: int) -> int:
    """The cheapest number of samples per prompt, within ``budget`` tokens per row."""
    spans_n = group.spans_n
    mean, longest = float(spans_n.mean()), int(spans_n.max())
    return samples_sharing_row(len(group.prompt_p), mean, longest, len(spans_n), budget=budget, width=width)


def _lay_out(rows: Sequence[Piece]) -> MicroBatch:
    length = max(piece.row_tokens for piece in rows)
    plain = all(len(piece.lengths_n) == 1 for piece in rows)
    ids_RL = np.zeros((len(rows), length), np.int64)
    positions_RL = np.zeros((len(rows), length), np.int64)
    segment_RL = np.full((len(rows), length), -1, np.int64)
    at_T, index_T = [], []
    for row, piece in enumerate(rows):
        prompt, end = len(piece.prompt_p), piece.row_tokens
        body, place_T = piece.body()
        within = _within(piece.spans_n)
        ids_RL[row, :end] = np.concatenate([piece.prompt_p, body])
        # The prompt's last token predicts the first token of every sample.
        column_T = prompt - 1 + np.where(within[place_T] == 0, 0, place_T)
        at_T.append(row * length + column_T)
        index_T.append(piece.index_T)
        positions_RL[row, :end] = np.concatenate([np.arange(prompt), prompt + within])
        segment_RL[row, :prompt] = 0
        segment_RL[row, prompt:end] = 1 + np.repeat(np.arange(len(piece.spans_n)), piece.spans_n)
    return MicroBatch(
        ids_RL=torch.from_numpy(ids_RL),
        positions_RL=None if plain else torch.from_numpy(positions_RL),
        segment_RL=None if plain else torch.from_numpy(segment_RL),
        at_T=torch.from_numpy(np.concatenate(at_T)),
        token_T=torch.from_numpy(np.concatenate([piece.tokens_T for piece in rows]).astype(np.int64)),
        index_T=torch.from_numpy(np.concatenate(index_T)),
    )


def _within(lengths_n: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each token's index within its sample: 0, 1, 2 ... for each, end to end."""
    ends_n = np.cumsum(lengths_n)
    return np.arange(int(ends_n[-1])) - np.repeat(ends_n - lengths_n, lengths_n)


def _may_attend(segment_RL: Tensor) -> Tensor:
    """True where a position may attend, bool [R, 1, L, L]: to the past of its own segment, and to the prompt."""
    own_RLL = segment_RL[:, :, None] == segment_RL[:, None, :]
    prompt_RLL = (segment_RL == 0)[:, None, :] & (segment_RL >= 0)[:, :, None]
    length = segment_RL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=segment_RL.device).tril()
    return ((own_RLL | prompt_RLL) & causal_LL)[:, None]
