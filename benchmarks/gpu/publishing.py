"""What publishing costs: how long the step waits for it, how long storing takes, and what copies to the host reach."""

import mmap
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.setting import GIB, Row, Setting, groups_of
from learner.engine import open_store
from learner.rank_worker import RankWorker
from volley.checksum import WeightsDigest
from volley.objectives import MaxAtK
from volley.refs import Ref

Arrays = tuple[NDArray[np.uint8], ...]


class SharedMemory:
    """Stands in for Ray's object store, which keeps what it is given in shared memory. Holds the newest objects."""

    def __init__(self, kept: int) -> None:
        self.kept, self.objects = kept, list[mmap.mmap]()

    def put(self, value: Arrays, /) -> Ref[Arrays]:
        memory = mmap.mmap(-1, max(1, sum(each.nbytes for each in value)))
        start = 0
        for each in value:
            np.frombuffer(memory, np.uint8, each.nbytes, start)[:] = each
            start += each.nbytes
        self.objects = [*self.objects[1 - self.kept :], memory]
        done: Future[Arrays] = Future()
        return done  # type: ignore[return-value]  # nobody awaits it here


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this section."""
    yield from _copies(setting)
    yield from _published(setting)


def _row(what: str, figure: str) -> Row:
    return Row("publishing", what, figure)


def _copies(setting: Setting) -> Iterator[Row]:
    """Rates of the parts that storing a bucket consists of."""
    size = (1 << 20) if setting.small else (1 << 30)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=setting.device)

    def rate(seconds: float) -> str:
        return f"{size / seconds / 1e9:.1f} GB/s"

    yield _row("device to pageable memory", rate(setting.seconds(source.cpu)) if setting.cuda else "no device")
    if setting.cuda:
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        yield _row("device to pinned memory", rate(setting.seconds(lambda: pinned.copy_(source))))
    host = source.cpu().numpy()
    store = SharedMemory(1)
    yield _row("host into new shared memory", rate(setting.seconds(lambda: store.put((host,)))))
    used = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    yield _row("host into shared memory used before", rate(setting.seconds(lambda: np.copyto(used, host))))
    header = _as_file(size)
    yield _row("digest", rate(setting.seconds(lambda: WeightsDigest().add(np.concatenate([header, host])))))


def _as_file(size: int) -> NDArray[np.uint8]:
    """The head of a safetensors file that holds one tensor of ``size`` bytes."""
    text = f'{{"weight":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'.encode()
    text += b" " * (-len(text) % 8)
    return np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)


def _published(setting: Setting) -> Iterator[Row]:
    """A version published by a rank that goes on training, as in a run."""
    config = setting.config(dtype="bfloat16")
    nbytes = sum(file.stat().st_size for file in Path(config.model.folder).glob("*.safetensors"))
    store = open_store("127.0.0.1", 0, 1)
    buckets = max(4, 2 * nbytes // (config.learner.bucket_mb * 2**20))
    worker = RankWorker.start(config, 0, store, object_store=SharedMemory(int(buckets)))
    prompt, lengths = (16, (4, 9)) if setting.small else (256, (400, 601))
    groups, columns = groups_of(setting, 4, n=8, prompt=prompt, lengths=lengths)

    def step() -> None:
        worker.step(columns, groups, 0, MaxAtK(k=4), None)

    alone = setting.seconds(step)
    blocked, stored, beside = [], [], []
    for version in range(1, 4):
        begun = time.perf_counter()
        worker.publish(version)
        setting.settle()
        blocked.append(time.perf_counter() - begun)
        step()
        setting.settle()
        beside.append(time.perf_counter() - begun - blocked[-1])
        stored.append(worker.publisher.update(version).gather_seconds)
    yield _row(
        f"{setting.size}, {nbytes / GIB:.2f} GiB: blocked before the next step may begin",
        f"{np.median(blocked):.3f} s; stored after {np.median(stored):.2f} s",
    )
    yield _row(
        "a step while the version is stored",
        f"{np.median(beside):.2f} s; alone {alone:.2f} s",
    )
