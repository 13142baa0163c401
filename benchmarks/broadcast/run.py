"""Time to broadcast new weights to the actors, compared with a checkpoint on disk and with a plain copy in memory.

    python -m benchmarks.broadcast.run [--sizes 3M 100M 1B] [--receivers 1 2 4] [--rounds 5] [--out docs/figures]

The publisher is a learner rank with a random Llama-shaped model in ZeRO-3 shards. At 3M and 100M, up to two receivers
are real actors with vLLM engines, over the object store and over the weight group (gloo on CPU). More receivers than
that, and all receivers at 1B, have no engine: they only fetch the weights from the object store (``fetch only`` in the
table). Weights are sent in bfloat16; engines compute in float32. For the comparison with a disk, the learner saves a
Hugging Face folder and each engine reloads it in place, or a new engine starts from it; the files stay in the page
cache, which is the best case for a checkpoint.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors import handle as member_module
from actors.config import ActorConfig, GenerateRequest
from actors.pool import ActorPool
from benchmarks.broadcast.parts import DiskActor, Published, Publisher, Receiver, copy_seconds, cpu_seconds, shape_of
from benchmarks.broadcast.rows import UPDATE_EVERY, Row, Share, keep, report
from benchmarks.local_ray import local_ray
from learner.config import LearnerConfig
from learner.rank_actors import CONCURRENCY
from tests.models import tiny_llama
from volley.job import ActorsSpec
from volley.memory import available_memory
from volley.model import ModelSpec
from volley.update import LearnerSpec, Optimizer
from volley.weight_group import WeightGroupTerms

ENGINES = {"3M": 2, "100M": 2, "1B": 0}  # the most receivers that are real actors
BUCKET_MB = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=["3M", "100M", "1B"], default=["3M", "100M", "1B"])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stall-seconds", type=float, default=20.0, help="length of the stall measurement at 3M")
    parser.add_argument("--out", type=Path, help="folder for broadcast.json")
    options = parser.parse_args()
    for size in options.sizes:
        rows, shares = asyncio.run(measure(size, options))
        report(rows, shares)
        if options.out is not None:
            keep(options.out / "broadcast.json", size, rows, shares)


async def measure(size: str, options: argparse.Namespace) -> tuple[list[Row], dict[str, Share]]:
    """All rows of one size; at 3M also the stall share of each way to send."""
    nbytes = 2.3e9 if size == "1B" else 4.5e8
    with tempfile.TemporaryDirectory() as scratch, local_ray(cpus=16, store_bytes=int(3.2 * nbytes)):
        bench = Bench(size, Path(scratch), options.rounds)
        try:
            return await bench.rows(options.receivers, options.stall_seconds)
        finally:
            await bench.stop()


class Bench:
    """The publisher of one size, and its receivers."""

    def __init__(self, size: str, scratch: Path, rounds: int) -> None:
        self.size, self.scratch, self.rounds = size, scratch, rounds
        self.version = self.formed = 0
        self.pool: ActorPool | None = None
        model = ModelSpec(path=scratch / "model", dtype="bfloat16")
        config = LearnerConfig(model, LearnerSpec(bucket_mb=BUCKET_MB), Optimizer(), 1, 0, scratch / "logs")
        self.publisher: Any = ray.remote(num_cpus=1, concurrency_groups=CONCURRENCY)(Publisher).remote(
            config, 0, scratch / "logs" / "rank.log"
        )
        self.nbytes = 0

    async def rows(self, counts: list[int], stall_seconds: float) -> tuple[list[Row], dict[str, Share]]:
        self.nbytes = await self.publisher.start_sharded.remote(self.size)
        real = [count for count in counts if count <= ENGINES[self.size]]
        rows: list[Row] = []
        shares: dict[str, Share] = {}
        tiny_llama(self.scratch / "model", **(shape_of(self.size) if real else {}))
        for count in sorted(real, reverse=True):
            if not self._room(count, 3 * count + 2):
                continue
            await self._engines(count)
            for way in ("object store", "weight group"):
                if way == "weight group":
                    await self._form()
                rows.append(await self._row(count, way))
                if self.size == "3M" and count == min(real):
                    shares[way] = await self._stall_share(stall_seconds)
        if self.pool is not None:
            await self.pool.stop()
            self.pool = None
        for count in counts:
            if count not in real and self._room(count, count + 2.5):
                rows.append(await self._row(count, "fetch only"))
        return sorted(rows, key=lambda row: row.receivers), shares

    def _room(self, count: int, copies: float) -> bool:
        """Whether memory suffices for ``copies`` more copies of the weights; prints a line if it does not."""
        free, needed = available_memory() or 0, copies * self.nbytes
        if free < needed:
            needed_gb, free_gb = needed / 1e9, free / 1e9
            print(f"{self.size}, {count} receivers: skipped, {needed_gb:.1f} GB needed, {free_gb:.1f} GB free")
        return free >= needed

    async def stop(self) -> None:
        if self.pool is not None:
            await self.pool.stop()

    async def _engines(self, count: int) -> None:
        """Start ``count`` actors, or scale the pool to ``count``."""
        if self.pool is not None:
            return await self.pool.scale(count)
        member_module._RemoteActor = ray.remote(max_restarts=0, max_task_retries=0)(DiskActor)
        spec = ActorsSpec(count=count, cpus=1, kv_cache_gb=0.25, max_num_seqs=64, start_deadline_s=600)
        model = ModelSpec(path=self.scratch / "model")
        self.pool = await ActorPool.start(ActorConfig(model, spec, 256, 0, self.scratch / "logs"))
        return None

    async def _form(self) -> None:
        """Form a weight group of the publisher and all actors."""
        if self.pool is None:
            raise RuntimeError("the engines must be started first")
        self.formed += 1
        name, members = str(self.formed), self.pool.weight_group_members
        host, port = await self.publisher.rendezvous.remote()
        terms = WeightGroupTerms(host, port, name, members, cuda=False, digests=False, deadline_s=60)
        _, formed = await asyncio.gather(
            self.pool.join_weight_group(terms), self.publisher.join_weight_group.remote(terms)
        )
        if not formed:
            raise RuntimeError(f"weight group {name} was not formed")

    async def _row(self, count: int, way: str) -> Row:
        engines = way != "fetch only"
        receivers = [] if engines else [ray.remote(Receiver).options(num_cpus=0.1).remote() for _ in range(count)]
        samples = []
        for number in range(self.rounds + 1):
            sample = await (self._engine_round(way, number) if engines else self._plain_round(receivers))
            if number:  # the first round is a warm-up
                samples.append(sample)
        for receiver in receivers:
            ray.kill(receiver)
        gather, blocked, serial, total, private, stall, cpu, save, reload = map(
            statistics.median, zip(*samples, strict=True)
        )
        start = max((info.start_seconds for info in self.pool.infos), default=0.0) if self.pool else 0.0
        return Row(
            size=self.size,
            receivers=count,
            way=way,
            mb=self.nbytes / 1e6,
            gather=gather,
            blocked=blocked,
            serial=serial,
            total=total,
            stall=stall,
            stall_cpu=cpu,
            reload=save + reload,
            restart=save + start if engines else 0.0,
            copy=count * copy_seconds(self.nbytes),
            private_mb=private / 1e6,
        )

    async def _publish(self) -> Published:
        self.version += 1
        published: Published = await self.publisher.timed_publish.remote(self.version)
        return published

    async def _save(self) -> tuple[Path, float]:
        folder = self.scratch / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        return folder, await self.publisher.save_to_disk.remote(self.scratch / "model", folder)

    async def _engine_round(self, way: str, number: int) -> tuple[float, ...]:
        if self.pool is None:
            raise RuntimeError("the engines must be started first")
        made = await self._publish()
        engines = [info.engine_pids[0] for info in self.pool.infos]
        before = [cpu_seconds(pid) for pid in engines]
        report = await self.pool.broadcast(made.update)
        cpu = max(cpu_seconds(pid) - was for pid, was in zip(engines, before, strict=True))
        if number and any(done.grouped != (way == "weight group") for done in report.actors):
            raise RuntimeError(f"not all actors received version {self.version} over the {way}")
        folder, save = await self._save()
        begun = time.perf_counter()
        await asyncio.gather(*(member._handle.reload.remote(folder) for member in self.pool._serving))
        reload = time.perf_counter() - begun
        total = made.stored + report.seconds
        return made.gather, made.blocked, made.serial, total, made.private, report.stall_seconds, cpu, save, reload

    async def _plain_round(self, receivers: list[Any]) -> tuple[float, ...]:
        made = await self._publish()
        begun = time.perf_counter()
        await asyncio.gather(*(receiver.receive.remote(made.update) for receiver in receivers))
        total = made.stored + time.perf_counter() - begun
        times = made.gather, made.blocked, made.serial, total, made.private, 0.0, 0.0
        del made
        folder, save = await self._save()
        begun = time.perf_counter()
        await asyncio.gather(*(receiver.read.remote(folder) for receiver in receivers))
        return *times, save, time.perf_counter() - begun

    async def _stall_share(self, seconds: float) -> Share:
        """Generate for ``seconds`` with an update every `UPDATE_EVERY` seconds; return how long the engine stalled."""
        if self.pool is None:
            raise RuntimeError("the engines must be started first")
        pool, ends = self.pool, time.perf_counter() + seconds
        prompt_p = np.arange(3, 15, dtype=np.int32)

        async def generate(first: int) -> None:
            number = first
            while time.perf_counter() < ends:
                await pool.generate(GenerateRequest(number, str(number), prompt_p, 16, 1.0, 1.0, 128))
                number += 4

        begun = time.perf_counter()
        stalls = []
        async with asyncio.TaskGroup() as tasks:
            for first in range(4):
                tasks.create_task(generate(first))
            while time.perf_counter() < ends:
                due = time.perf_counter() + UPDATE_EVERY
                stalls.append((await pool.broadcast((await self._publish()).update)).stall_seconds)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return Share(sum(stalls) / (time.perf_counter() - begun), statistics.median(stalls), os.getloadavg()[0])


if __name__ == "__main__":
    main()
