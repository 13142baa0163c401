"""What a long row must not cost: tensors of [L, L], a mask per layer, all micro-batches on the device at once."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner.batch import MicroBatches
from learner.layout import MicroBatch, micro_batches
from learner.policy import Policy
from learner.sequence import RowSplit
from tests.learner_batches import random_group
from tests.unit.learner.conftest import tiny_lm
from tests.unit.learner.reinforcers import MAX2, REWARDS, batch_of, groups_of, reinforcer
from tests.unit.learner.test_layout import WIDE, pieces_of
from volley.update import LearnerSpec, PolicyUpdate

LENGTH = 200


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest number of elements of a tensor that any operation returns, forward and backward."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(out) if isinstance(each, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


def row_batch(*, shared: bool, n: int = 1) -> MicroBatch:
    rng = np.random.default_rng(0)
    group = random_group(rng, 0, n=n, prompt=(9, 10), length=(LENGTH // n, LENGTH // n + 1))
    (batch,) = micro_batches(pieces_of([group]), 1 << 20, width=WIDE, allow_shared=shared)
    return batch


@pytest.mark.parametrize(("shared", "square"), [(False, False), (True, True)])
def test_a_flat_row_makes_no_tensor_of_its_length_squared(shared: bool, square: bool) -> None:
    """With samples that share a row there is one, so the test would see it."""
    batch = row_batch(shared=shared, n=2 if shared else 1)
    policy = Policy(tiny_lm(), 1.0)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        torch.autograd.backward(policy(batch)[0].sum())
    length = batch.ids_RL.shape[1]
    assert (largest.elements >= length * length) == square


def test_a_flat_row_takes_the_causal_kernel_and_keeps_grouped_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, calls = torch.nn.functional.scaled_dot_product_attention, list[dict[str, Any]]()

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        calls.append({**options, "heads": (query.shape[1], key.shape[1])})
        return kernel(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    Policy(tiny_lm(), 1.0)(row_batch(shared=False))
    assert len(calls) == 2
    for call in calls:
        assert call["attn_mask"] is None
        assert call["is_causal"]
        assert call["enable_gqa"]
        assert call["heads"] == (4, 2)


def test_the_layers_of_a_shared_row_keep_one_mask() -> None:
    batch, masks = row_batch(shared=True, n=4), set[int]()
    length = batch.ids_RL.shape[1]

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[-2:] == (length, length):
            masks.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        Policy(tiny_lm(num_hidden_layers=4), 1.0)(batch)
    assert len(masks) == 1


def test_a_step_holds_one_mask_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made, most = MicroBatch.mask, list[weakref.ref[Tensor]](), 0

    def spy(batch: MicroBatch, dtype: torch.dtype) -> Tensor | None:
        nonlocal most
        mask = make(batch, dtype)
        if mask is not None:
            made.append(weakref.ref(mask))
            most = max(most, sum(each() is not None for each in made))
        return mask

    monkeypatch.setattr(MicroBatch, "mask", spy)
    spec = PolicyUpdate(updates_per_batch=2, entropy_bonus=0.1)  # every sample is computed
    worker, _ = reinforcer(tiny_lm(), spec, budget=40)
    worker.step(batch_of(groups_of(), spec), MAX2, 0)
    assert len(made) > 2 * len(REWARDS)
    assert most == 1


def test_micro_batches_are_moved_one_by_one_as_often_as_they_are_iterated() -> None:
    """A CPU returns the same tensor when asked to move it, so the device is "meta" here."""
    batches = MicroBatches(tuple(row_batch(shared=True, n=2) for _ in range(5)), torch.device("meta"))
    alive: list[weakref.ref[Tensor]] = []
    for _ in range(2):
        for micro in batches:
            assert {micro.ids_RL.device.type, micro.at_T.device.type} == {"meta"}
            alive.append(weakref.ref(micro.ids_RL))
            assert sum(each() is not None for each in alive) <= 2
    assert len(alive) == 2 * len(batches) == 10


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ranks": 6, "sequence_parallel": 4}, "4 does not divide ranks: 6: write ranks: 8, or sequence_parallel: 2"),
        ({"sequence_parallel": 2}, "2 does not divide ranks: 1: write ranks: 2, or sequence_parallel: 1"),
        ({"ranks": 2, "sequence_parallel": 2, "attention": "eager"}, "write attention: sdpa, or sequence_parallel: 1"),
        ({"ranks": 2, "sequence_parallel": 2, "shared_rows": True}, "write shared_rows: null, or sequence_parallel: 1"),
    ],
)
def test_what_split_rows_cannot_have_is_said_with_what_to_write(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerSpec(**keys)


def test_rows_that_are_split_are_not_shared() -> None:
    spec = LearnerSpec(ranks=6, sequence_parallel=2)
    assert not spec.shares_rows
    assert spec.sequence_groups == 3
    part = RowSplit(0, 2, None)  # type: ignore[arg-type]  # it needs no other rank for this
    with pytest.raises(ValueError, match="a row that samples share cannot be split"):
        part.part(row_batch(shared=True, n=2))


def test_rows_are_shared_on_cpus_only_unless_the_job_says_so() -> None:
    assert LearnerSpec().shares_rows
    assert not LearnerSpec(gpus_per_rank=1).shares_rows
    assert LearnerSpec(gpus_per_rank=1, shared_rows=True).shares_rows
    assert not LearnerSpec(shared_rows=False).shares_rows
    assert not LearnerSpec(attention="eager").shares_rows
    with pytest.raises(ValueError, match=r"shared_rows: true needs masks, .* write attention: sdpa"):
        LearnerSpec(attention="eager", shared_rows=True)
