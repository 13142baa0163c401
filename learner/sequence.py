"""Sequence parallelism: the ranks of a sequence group split the columns of each row (Ulysses, arXiv 2309.14509).

    rank of the group          0             1
    columns                    0 .. l-1      l .. 2l-1     in embeddings, norms, matmuls and log-probs
    heads, for all columns     0 .. h/2-1    h/2 .. h-1    in attention, before and after which columns are exchanged

The ranks of a group hold the same micro-batches. Each computes the log-probs that its own columns predict, and receives
the others', so all of them compute the same loss. The gradient on a rank is what flows through its own columns; ZeRO-3
adds these parts up as it does for ranks with different micro-batches.

Shapes: R rows, L row length, l columns of a rank, T sample tokens of a micro-batch, t those predicted by one rank's
columns, h heads, d head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from learner.layout import MicroBatch
from volley.errors import JobError
from volley.update import LearnerSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = "volley_sequence_parallel"  # the name under which transformers finds the attention of split rows


class RowSplit:
    """This rank's part in its sequence group.

    Attributes:
        index: the rank's number within the group.
        size: ranks of the group.
    """

    def __init__(self, index: int, size: int, group: "ProcessGroup") -> None:
        self.index, self.size, self._group = index, size, group

    def part(self, batch: MicroBatch) -> MicroBatch:
        """This rank's columns, and the tokens that they predict; ``index_T`` is the place of those in ``batch``.

        Rows whose length does not divide are padded at the end, where causal attention never looks.
        """
        if batch.segment_RL is not None:
            raise ValueError("a row that samples share cannot be split")
        length = batch.ids_RL.shape[1]
        columns = -(-length // self.size)
        first = self.index * columns
        ids_RL = functional.pad(batch.ids_RL, (0, columns * self.size - length))
        position_l = torch.arange(first, first + columns, device=ids_RL.device).clamp(max=length - 1)
        row_T, column_T = batch.at_T // length, batch.at_T % length
        place_t = ((column_T >= first) & (column_T < first + columns)).nonzero()[:, 0]
        return MicroBatch(
            ids_RL=ids_RL[:, first : first + columns],
            positions_RL=position_l.expand(len(ids_RL), -1),
            segment_RL=None,
            at_T=(row_T * columns + column_T - first)[place_t],
            token_T=batch.token_T[place_t],
            index_T=place_t,
        )

    def joined(self, scores: tuple[Tensor, Tensor], place_t: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The scores of all ``tokens`` of a micro-batch, [T] each, from those of every rank's columns, [t] each."""
        whole_2T: Tensor = _Joined.apply(  # type: ignore[no-untyped-call]
            torch.stack(scores), place_t, tokens, self._group
        )
        first_T, second_T = whole_2T
        return first_T, second_T


class _Context(Protocol):
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, scores_2t: Tensor, place_t: Tensor, tokens: int, group: "ProcessGroup") -> Tensor:
        ctx.save_for_backward(place_t)
        whole_2T = scores_2t.new_zeros(len(scores_2t), tokens)
        whole_2T[:, place_t] = scores_2t
        dist.all_reduce(whole_2T, group=group)
        return whole_2T

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Every rank has the same loss, so a rank's own part of its gradient is complete."""
        (place_t,) = ctx.saved_tensors
        return grads[0][:, place_t], None, None, None


def split_rows(rank: int, spec: LearnerSpec, deadline_s: float) -> RowSplit | None:
    """Form the sequence groups of consecutive ranks; None if the job splits no rows. Every rank must call it.

    Args:
        deadline_s: limit on a collective.
    """
    size = spec.sequence_parallel
    if size == 1:
        return None
    from transformers import AttentionInterface

    patience = timedelta(seconds=deadline_s)
    group, _ = dist.new_subgroups(group_size=size, timeout=patience)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION, _exchanging_attention(group, size))
    return RowSplit(rank % size, size, group)


def _exchanging_attention(group: "ProcessGroup", size: int) -> Any:
    """An attention function for transformers, which gets and returns this rank's columns."""
    from deepspeed.sequence.layer import DistributedAttention

    exchanging = DistributedAttention(_causal_attention, group, scatter_idx=2, gather_idx=1)  # heads; columns

    def attention(
        module: torch.nn.Module,
        query_Rhld: Tensor,
        key_Rhld: Tensor,
        value_Rhld: Tensor,
        attention_mask: None,
        scaling: float | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        copies = max(1, size // key_Rhld.shape[1])  # so that every rank gets a key-value head
        key_Rhld, value_Rhld = (each.repeat_interleave(copies, dim=1) for each in (key_Rhld, value_Rhld))
        heads = [each.transpose(1, 2) for each in (query_Rhld, key_Rhld, value_Rhld)]
        out_Rlhd: Tensor = exchanging(*heads, batch_dim_idx=0, scale=scaling)
        return out_Rlhd, None

    return attention


def _causal_attention(query_RLhd: Tensor, key_RLhd: Tensor, value_RLhd: Tensor, *, scale: float | None) -> Tensor:
    """Attention of some heads over whole rows, [R, L, h, d]."""
    query_RhLd, key_RhLd, value_RhLd = (each.transpose(1, 2) for each in (query_RLhd, key_RLhd, value_RLhd))
    out_RhLd = functional.scaled_dot_product_attention(
        query_RhLd, key_RhLd, value_RhLd, is_causal=True, scale=scale, enable_gqa=True
    )
    return out_RhLd.transpose(1, 2)


@contextmanager
def whole_rows(lm: "PreTrainedModel") -> Iterator[None]:
    """Within the block, ``lm`` takes rows that are not split, even if the policy splits them."""
    splits = lm.config._attn_implementation == ATTENTION
    if splits:
        lm.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if splits:
            lm.set_attn_implementation(ATTENTION)


def attends_to_all(config: "PretrainedConfig") -> bool:
    """Whether every layer attends to all earlier positions: no window and no recurrence."""
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None)
    return set(layers) == {"full_attention"} if layers else not getattr(text, "sliding_window", None)


def check_model(config: "PretrainedConfig", size: int) -> None:
    """Raise `JobError` unless rows of a model with this configuration can be split over ``size`` ranks."""
    if not attends_to_all(config):
        raise JobError(
            f"learner.sequence_parallel: {size} needs layers that attend to all earlier positions, and models of type "
            f"{config.model_type} have others: write sequence_parallel: 1"
        )
    text = config.get_text_config()
    queries = text.num_attention_heads
    pairs = getattr(text, "num_key_value_heads", None) or queries
    sizes = [each for each in range(1, queries + 1) if _divides(each, queries, pairs)]
    if size not in sizes:
        raise JobError(
            f"learner.sequence_parallel: {size} cannot share out the {queries} query heads and {pairs} key-value heads "
            f"of {config.model_type}: write one of {', '.join(map(str, sizes))}"
        )


def _divides(size: int, queries: int, pairs: int) -> bool:
    """Whether every one of ``size`` ranks gets whole query heads, with key-value heads that may be repeated."""
    return queries % size == 0 and (pairs % size == 0 or size % pairs == 0)
