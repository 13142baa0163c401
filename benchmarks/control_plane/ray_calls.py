"""What Ray itself costs the coordinator's process: the real pools over trivial Ray actors.

    python -m benchmarks.control_plane.ray_calls [--actors 2] [--groups 2000] [--in-flight 64] [--n 16]

`simulate.py` leaves Ray's handles out; this is what they add to a group: one call that generates, whose arrays stay in
the object store, and one that scores, whose verdicts come back. CPU is that of the whole process with all of Ray in it.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import ray

from actors import member as member_module
from actors.config import ActorConfig, ActorInfo, GenerateRequest
from actors.pool import ActorPool
from benchmarks.control_plane.cluster import group_of, verdicts
from benchmarks.objectives.report import print_table
from reward_servers import pool as reward_pool_module
from reward_servers.pool import RewardConfig, RewardPool
from volley.job import ActorsSpec, ModelSpec, RewardWorkersSpec
from volley.records import Group, GroupMeta, Prompt, Scores
from volley.scoring import ExactScorer

TOKENS = 4096  # of one group


class TrivialActor:
    """Answers at once with a group of random tokens."""

    def __init__(self, *_: object) -> None:
        self._group: Group | None = None

    async def start(self) -> ActorInfo:
        return ActorInfo("actor", 1, (2,), 4096, 32_000, 0.0)

    async def ping(self) -> None:
        """It lives."""

    async def stop(self) -> None:
        """It has nothing to end."""

    async def generate(self, request: GenerateRequest) -> tuple[Group, GroupMeta]:
        if self._group is None:
            meta = GroupMeta(0, "p", "actor", request.n, len(request.prompt_p), TOKENS, 0.0, 0, 0, 0, 0.0, request.n)
            self._group = group_of(meta)
        return self._group, self._group.meta()


class TrivialWorker:
    """Answers at once with verdicts."""

    def __init__(self, *_: object) -> None:
        """It needs nothing."""

    def ready(self) -> tuple[int, str]:
        return 1, ""

    def close(self) -> None:
        """It has nothing to end."""

    def score(self, group: Group, _prompt: Prompt) -> Scores:
        return verdicts(group.n, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--n", type=int, default=16)
    options = parser.parse_args()
    member_module._RemoteActor = ray.remote(max_restarts=0, max_task_retries=0)(TrivialActor)
    reward_pool_module.RewardWorker = TrivialWorker  # type: ignore[misc,assignment,attr-defined,unused-ignore]
    ray.init(
        address="local",
        num_cpus=16,
        object_store_memory=512 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    with tempfile.TemporaryDirectory() as logs:
        asyncio.run(measure(options, Path(logs)))
    ray.shutdown()


async def measure(options: argparse.Namespace, logs: Path) -> None:
    """Print CPU and rate of both calls, together and apart."""
    actors_spec = ActorsSpec(count=options.actors, cpus=0.1)
    actors = await ActorPool.start(ActorConfig(ModelSpec(path=logs), actors_spec, 4096, 0, logs))
    workers = RewardWorkersSpec(count=options.actors)
    rewards = await RewardPool.start(RewardConfig(ExactScorer(), workers, logs))
    prompt_p, prompt = np.arange(64, dtype=np.int32), Prompt("p", "What is 6 times 7?", {"answer": "42"})
    request = GenerateRequest(0, "p", prompt_p, options.n, 1.0, 1.0, 256)
    stored, _ = await actors.generate(request)

    async def generate() -> None:
        await actors.generate(request)

    async def score() -> None:
        await rewards.score(stored, prompt)

    async def both() -> None:
        group, _ = await actors.generate(request)
        await rewards.score(group, prompt)

    rows = []
    for name, call in (("generate", generate), ("score", score), ("generate, then score", both)):
        await spend(call, options.in_flight, options.in_flight)
        rows.append([name, *await spend(call, options.groups, options.in_flight)])
    print_table(["calls of a group", "CPU ms/group", "groups/s"], rows)
    await rewards.stop()
    await actors.stop()


async def spend(call: Callable[[], Awaitable[None]], groups: int, in_flight: int) -> tuple[float, float]:
    """CPU milliseconds of a group in this process, and groups per second, ``in_flight`` at a time."""
    left = iter(range(groups))

    async def one_after_the_other() -> None:
        for _ in left:
            await call()

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
    return (time.process_time() - cpu) * 1e3 / groups, groups / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
