"""Micro-batches: how prompts and samples are laid out as rows of tokens.

Two layouts give the same log-probs:

    flat     one row a sample, its prompt in front: [p s1] [p s2] ...
    shared   one row a group, the prompt once: [p s1 s2 ...]; a mask lets each sample see the prompt and itself, and
             positions count on from the prompt's end in each

Shared computes each prompt once, but its attention is over the whole row; `cheaper_shared` chooses.
Shapes: R rows, L row length, T sample tokens of the micro-batch, in the order of its samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ATTENTION_COST = 1 / 6  # of one key seen, against one parameter-width of a token; from 2 L d against 12 d^2 a layer


@dataclass(frozen=True, slots=True)
class Piece:
    """A prompt and samples of it, to be laid out together.

    Attributes:
        prompt_p: int32 [p].
        tokens_T: int32 [T], the samples end to end.
        lengths_n: int32 [n].
        start: where the piece's tokens begin in the rank's token arrays.
    """

    prompt_p: NDArray[np.int32]
    tokens_T: NDArray[np.int32]
    lengths_n: NDArray[np.int32]
    start: int

    @property
    def row_tokens(self) -> int:
        return len(self.prompt_p) + len(self.tokens_T)

    def split(self) -> list["Piece"]:
        """One piece for each sample."""
        ends = np.cumsum(self.lengths_n)
        return [
            Piece(
                self.prompt_p,
                self.tokens_T[end - length : end],
                np.array([length], np.int32),
                self.start + int(end - length),
            )
            for end, length in zip(ends, self.lengths_n, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows to take through the model at once.

    Attributes:
        ids_RL: int64 token ids, right-padded.
        positions_RL: int64 position ids; None where they simply count from 0.
        mask_R1LL: float additive attention mask; None for plain causal attention.
        row_T, column_T: int64, where the hidden state is that predicts each sample token.
        token_T: int64, the sample tokens.
        index_T: int64, each token's place in the rank's token arrays.
    """

    ids_RL: Tensor
    positions_RL: Tensor | None
    mask_R1LL: Tensor | None
    row_T: Tensor
    column_T: Tensor
    token_T: Tensor
    index_T: Tensor


def micro_batches(groups: Sequence[Piece], budget: int, *, width: int, allow_shared: bool) -> list[MicroBatch]:
    """Lay out ``groups`` in the cheaper way, longest rows first, at most ``budget`` padded tokens each.

    Args:
        width: the model's hidden size, for the cost model.
        allow_shared: False for models that take no 4D attention mask.
    """
    pieces: list[Piece] = []
    for group in groups:
        shared = allow_shared and len(group.lengths_n) > 1 and cheaper_shared(group, width)
        pieces += [group] if shared else group.split()
    pieces.sort(key=lambda piece: -piece.row_tokens)
    batches, rows = [], []
    for piece in pieces:
        longest = rows[0].row_tokens if rows else piece.row_tokens
        if rows and longest * (len(rows) + 1) > budget:
            batches.append(_lay_out(rows))
            rows = []
        rows.append(piece)
    if rows:
        batches.append(_lay_out(rows))
    return batches


def cheaper_shared(group: Piece, width: int) -> bool:
    """Is one row for the whole group less work than one row a sample?"""

    def cost(length: float, rows: float) -> float:
        return rows * length * (1 + ATTENTION_COST * length / width)

    prompt, n = len(group.prompt_p), len(group.lengths_n)
    return cost(group.row_tokens, 1) < cost(prompt + float(group.lengths_n.mean()), n)


def _lay_out(rows: Sequence[Piece]) -> MicroBatch:
    length = max(piece.row_tokens for piece in rows)
    ids_RL = np.zeros((len(rows), length), np.int64)
    row_T, column_T, token_T, index_T = [], [], [], []
    plain = all(len(piece.lengths_n) == 1 for piece in rows)
    positions_RL = None if plain else np.zeros((len(rows), length), np.int64)
    segment_RL = None if plain else np.full((len(rows), length), -1, np.int64)
    for row, piece in enumerate(rows):
        prompt = len(piece.prompt_p)
        ids_RL[row, : piece.row_tokens] = np.concatenate([piece.prompt_p, piece.tokens_T])
        within = np.concatenate([np.arange(length) for length in piece.lengths_n])
        column = prompt + np.arange(len(piece.tokens_T)) - 1
        row_T.append(np.full(len(piece.tokens_T), row))
        column_T.append(np.where(within == 0, prompt - 1, column))
        token_T.append(piece.tokens_T)
        index_T.append(piece.start + np.arange(len(piece.tokens_T)))
        if positions_RL is not None and segment_RL is not None:
            positions_RL[row, : piece.row_tokens] = np.concatenate([np.arange(prompt), prompt + within])
            segment_RL[row, :prompt] = 0
            segment_RL[row, prompt : piece.row_tokens] = 1 + np.repeat(np.arange(len(piece.lengths_n)), piece.lengths_n)
    return MicroBatch(
        ids_RL=torch.from_numpy(ids_RL),
        positions_RL=None if positions_RL is None else torch.from_numpy(positions_RL),
        mask_R1LL=None if segment_RL is None else _mask(torch.from_numpy(segment_RL)),
        row_T=torch.from_numpy(np.concatenate(row_T)),
        column_T=torch.from_numpy(np.concatenate(column_T)),
        token_T=torch.from_numpy(np.concatenate(token_T).astype(np.int64)),
        index_T=torch.from_numpy(np.concatenate(index_T)),
    )


def _mask(segment_RL: Tensor) -> Tensor:
    """0 where a position may look, a very negative number elsewhere: the past of its own segment, and the prompt."""
    same_RLL = segment_RL[:, :, None] == segment_RL[:, None, :]
    prompt_RLL = (segment_RL == 0)[:, None, :] & (segment_RL >= 0)[:, :, None]
    length = segment_RL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool).tril()
    allowed_RLL = (same_RLL | prompt_RLL) & causal_LL
    zero = torch.zeros((), dtype=torch.float32)
    return torch.where(allowed_RLL, zero, torch.finfo(torch.float32).min)[:, None]
