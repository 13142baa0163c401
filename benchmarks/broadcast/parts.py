"""The parties of a broadcast: random models, a publishing rank, receivers with and without an engine."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from actors.actor import Actor
from learner.rank import Rank
from volley.model import ModelSpec
from volley.records import WeightUpdate
from volley.weight_files import WeightFile, closing_all

# Llama-shaped: width, inner width, layers, heads, key-value heads, vocabulary.
SHAPES = {
    "3M": (192, 640, 6, 6, 2, 512),
    "100M": (768, 2048, 12, 12, 4, 16_384),
    "1B": (2048, 5632, 22, 32, 4, 32_000),
}


def shape_of(size: str) -> dict[str, int]:
    """The fields of ``LlamaConfig`` for a model of this size."""
    width, inner, layers, heads, kv_heads, vocabulary = SHAPES[size]
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
    }


@dataclass(frozen=True, slots=True)
class Published:
    """What publishing one version took.

    Attributes:
        update: the update that the actors receive.
        gather: seconds for gathering the shards alone.
        blocked: seconds until the learner could continue.
        serial: seconds if each bucket is stored before the next one is gathered.
        stored: seconds until the actors could fetch the whole version.
        private: peak growth of the publisher's private memory, bytes.
    """

    update: WeightUpdate
    gather: float
    blocked: float
    serial: float
    stored: float
    private: float


class Publisher(Rank):
    """A learner rank without an optimiser: the model in ZeRO-3 shards, and the real ``publish``."""

    def start_sharded(self, size: str) -> int:
        """Make a random bfloat16 model under ZeRO-3; returns its size in bytes."""
        self.process = self.open()
        import deepspeed
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from learner.engine import join_ranks
        from learner.publishing import Publisher
        from learner.rank_worker import RankWorker
        from learner.staging import Staging

        join_ranks(0, 1, self._store, cuda=False, deadline_s=600)
        with deepspeed.zero.Init(dtype=torch.bfloat16):  # shards each parameter as it is created
            model = LlamaForCausalLM(LlamaConfig(**shape_of(size), tie_word_embeddings=False))
        engine: Any = SimpleNamespace(module=SimpleNamespace(lm=model))
        pack: Any = None  # takes no steps
        staging = Staging(torch.device("cpu"), int(self._config.learner.bucket_mb * 2**20))
        publisher = Publisher(ray, verify=False, deadline_s=600, staging=staging)
        self._worker = RankWorker(self._config, 0, engine, pack, publisher=publisher)
        return sum(parameter.ds_numel * parameter.element_size() for parameter in model.parameters())

    def rendezvous(self) -> tuple[str, int]:
        """Host and port at which weight groups rendezvous."""
        return self.process.host, self.process.port

    def timed_publish(self, version: int) -> Published:
        """Time ``publish`` until its storing thread has stored every bucket.

        For comparison, it then times gathering alone, and storing each bucket before the next one is gathered.
        """
        import deepspeed
        import torch

        from learner.weights import buckets, file_parts, gathered_views

        worker = self._started
        with private_peak() as peak:
            begun = time.perf_counter()
            self.publish(version)
            blocked = time.perf_counter() - begun
            update = worker.publisher.update(version)
            stored = time.perf_counter() - begun
        begun = time.perf_counter()
        for bucket in buckets(worker._lm.named_parameters(), worker._bucket_bytes):
            with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
                pass
        gather = time.perf_counter() - begun
        begun = time.perf_counter()
        for bucket in buckets(worker._lm.named_parameters(), worker._bucket_bytes):
            ray.put(torch.cat(file_parts(gathered_views(bucket))).numpy())
        serial = time.perf_counter() - begun
        return Published(update, gather, blocked, serial, stored, peak[0])

    def save_to_disk(self, source: Path, folder: Path) -> float:
        """Seconds to export a checkpoint in Hugging Face format, as the learner does; files are not fsynced."""
        from learner.weights import export

        begun = time.perf_counter()
        export(self._started._lm, ModelSpec(path=source), folder, self._started._bucket_bytes, write=True)
        return time.perf_counter() - begun


class Receiver:
    """An actor without an engine: it fetches weights to the point where an engine would load them."""

    def receive(self, update: WeightUpdate) -> float:
        """Fetch an update from the object store; seconds."""
        begun = time.perf_counter()
        with closing_all() as files:
            for bucket in update.buckets:
                files.append(WeightFile(*ray.get(bucket.ref, timeout=600)))
        return time.perf_counter() - begun

    def read(self, folder: Path) -> float:
        """Read a checkpoint from disk; seconds."""
        begun = time.perf_counter()
        with closing_all() as files:
            for file in folder.glob("*.safetensors"):
                files.append(WeightFile(np.fromfile(file, dtype=np.uint8)))
        return time.perf_counter() - begun


class DiskActor(Actor):
    """An actor that can also reload its engine's weights from disk."""

    async def reload(self, folder: Path) -> float:
        """Reload the weights with generation paused; returns the seconds it was paused."""
        llm: Any = self._running._llm
        begun = time.perf_counter()
        await llm.pause_generation(mode="keep", clear_cache=False)
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        await llm.resume_generation()
        return time.perf_counter() - begun


@contextmanager
def private_peak(every: float = 0.001) -> Iterator[list[float]]:
    """Track the peak growth of this process's private memory (without the object store), bytes; yields it in a list."""
    before, peak, ended = _private(), [0.0], threading.Event()

    def look() -> None:
        while not ended.wait(every):
            peak[0] = max(peak[0], _private() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _private() -> float:
    with open(f"/proc/{os.getpid()}/status", encoding="ascii") as file:  # noqa: PTH123
        line = next(line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024.0


def cpu_seconds(pid: int) -> float:
    """CPU time used so far by a process's main thread, which in an engine generates and loads weights."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def copy_seconds(nbytes: int) -> float:
    """Seconds to copy ``nbytes`` within memory that is already mapped; the best of three."""
    source, target = np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun)
    return min(times)
