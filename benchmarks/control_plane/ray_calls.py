"""What Ray's own calls cost the coordinator's process: the real pools over trivial Ray actors.

    python -m benchmarks.control_plane.ray_calls [--actors 2] [--groups 2000] [--in-flight 64] [--n 16]

`simulate.py` replaces Ray's handles; this measures what they add per group: one call that generates, whose arrays stay
in the object store, and one that scores, whose verdicts are returned. CPU time is that of the whole process, including
Ray's threads.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import ray

from actors import handle as member_module
from actors.config import ActorConfig, ActorInfo, GenerateRequest
from actors.pool import ActorPool
from benchmarks.control_plane.cluster import group_of, verdicts
from benchmarks.local_ray import local_ray
from benchmarks.objectives.report import print_table
from reward_servers import pool as reward_pool_module
from reward_servers.pool import RewardConfig, RewardPool
from volley.job import ActorsSpec, RewardWorkersSpec
from volley.model import ModelSpec
from volley.records import Group, GroupMeta, Prompt, Scores
from volley.scoring import ExactScorer

TOKENS = 4096  # in one group


class TrivialActor:
    """Returns a group of random tokens immediately."""

    def __init__(self, *_: object) -> None:
        self._group: Group | None = None

    async def start(self) -> ActorInfo:
        return ActorInfo("actor", 1, (2,), 4096, 32_000, 0.0)

    async def ping(self) -> None:
        """Return, which shows that the actor is alive."""

    async def stop(self) -> None:
        """Nothing to stop."""

    async def generate(self, request: GenerateRequest) -> tuple[Group, GroupMeta]:
        if self._group is None:
            meta = GroupMeta(0, "p", "actor", request.n, len(request.prompt_p), TOKENS, 0.0, 0, 0, 0, 0.0, request.n)
            self._group = group_of(meta)
        return self._group, self._group.meta()


class TrivialWorker:
    """Returns verdicts immediately."""

    def __init__(self, *_: object) -> None:
        """Ignore the real worker's arguments."""

    def ready(self) -> tuple[int, str]:
        return 1, ""

    def close(self) -> None:
        """Nothing to close."""

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
    with local_ray(cpus=16, store_bytes=512 << 20), tempfile.TemporaryDirectory() as logs:
        asyncio.run(measure(options, Path(logs)))


async def measure(options: argparse.Namespace, logs: Path) -> None:
    """Print CPU time and rate of both calls, separately and one after the other."""
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
        await cost_of(call, options.in_flight, options.in_flight)  # warm-up
        rows.append([name, *await cost_of(call, options.groups, options.in_flight)])
    print_table(["calls of a group", "CPU ms/group", "groups/s"], rows)
    await rewards.stop()
    await actors.stop()


async def cost_of(call: Callable[[], Awaitable[None]], groups: int, in_flight: int) -> tuple[float, float]:
    """CPU milliseconds per group in this process, and groups per second, with ``in_flight`` calls at a time."""
    left = iter(range(groups))

    async def call_in_turn() -> None:
        for _ in left:
            await call()

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(call_in_turn() for _ in range(in_flight)))
    return (time.process_time() - cpu) * 1e3 / groups, groups / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
