"""Whole tensors from shards that are cut here as DeepSpeed cuts them: padded to a multiple of the ranks."""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]

from learner.weights import buckets, sent_to_first

pytestmark = pytest.mark.integration
SHAPES = ((), (1,), (3, 5), (7,), (2, 3, 4), (64, 33), (0, 4))


def weights() -> dict[str, Tensor]:
    """Of several types, so that a shard may begin in the middle of another's number."""
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    return {f"w{i}": torch.randn(shape).to(dtypes[i % 4]) for i, shape in enumerate(SHAPES)}


def sharded(whole: Tensor, rank: int, ranks: int) -> Any:
    size = -(-whole.numel() // ranks)
    padded = torch.cat([whole.reshape(-1), torch.full((size * ranks - whole.numel(),), 7).to(whole.dtype)])
    return SimpleNamespace(
        ds_tensor=padded[rank * size : (rank + 1) * size],
        ds_numel=whole.numel(),
        ds_shape=whole.shape,
        dtype=whole.dtype,
        element_size=whole.element_size,
        numel=whole.numel,
    )


def gather(rank: int, ranks: int, folder: Path, bucket_bytes: int) -> None:
    """One rank's part; the first writes what it received."""
    store = FileStore(str(folder / "store"), ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    parameters = [(name, sharded(each, rank, ranks)) for name, each in weights().items()]
    group: Any = distributed.group.WORLD
    found: dict[str, Tensor] = {}
    for bucket in buckets(parameters, bucket_bytes):
        found |= sent_to_first(bucket, group)
    torch.save(found, folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
def test_the_first_rank_has_every_tensor_bitwise_and_the_others_nothing(tmp_path: Path, bucket_bytes: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=gather, args=(rank, 3, tmp_path, bucket_bytes)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    found, *others = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    assert others == [{}, {}]
    assert found.keys() == weights().keys()
    for name, whole in weights().items():
        assert found[name].dtype == whole.dtype
        assert torch.equal(found[name], whole)
