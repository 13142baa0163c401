"""A real learner and real engines in one process group: weights arrive bitwise, even if members join, hang or die."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import ray
from numpy.typing import NDArray
from safetensors.numpy import load

from actors.config import BroadcastReport
from actors.pool import ActorPool
from learner.config import LearnerConfig
from learner.pool import LearnerPool
from learner.records import SFTRow
from services.runs.weight_groups import WeightGroups
from tests.integration.test_actors import configuration, generate, request
from tests.integration.waiting import until
from tests.models import tiny_llama
from volley.job import RLJob
from volley.model import ModelSpec
from volley.records import WeightUpdate
from volley.update import LearnerSpec, Optimizer, PolicyUpdate

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
DEADLINE = 4.0
ROW = SFTRow(prompt_p=np.arange(3, 6, dtype=np.int32), answer_a=np.arange(6, 12, dtype=np.int32))


@dataclass
class Run:
    """A learner and a pool of initially two actors, with their weight group. No two versions have equal weights."""

    pool: ActorPool
    learner: LearnerPool
    groups: WeightGroups
    version: int = 0
    _compared: tuple[int, dict[str, NDArray[np.float32]]] = (0, {})

    async def publish(self) -> tuple[WeightUpdate, BroadcastReport]:
        """Publish another version to every actor."""
        update = await self.learner.publish(await self.train())
        return update, await self.pool.broadcast(update)

    async def train(self) -> int:
        """Change the learner's weights; returns the number of the version to publish them as."""
        await self.learner.sft_step([ROW])
        self.version += 1
        return self.version

    async def serves_bitwise(self, update: WeightUpdate) -> bool:
        """Whether every actor serves this version, whose weights must differ from those of the one compared before."""
        published: dict[str, NDArray[np.float32]] = {}
        for bucket in (await self.learner.store(update.version)).buckets:
            published |= load(b"".join(part.tobytes() for part in ray.get(bucket.ref)))
        before, self._compared = self._compared, (update.version, published)
        if before[0] not in (0, update.version):
            assert not any(np.array_equal(published[name], before[1][name]) for name in published)
        served = [load(file.tobytes()) for file in (await self.pool.served_weights()).values()]
        return all(np.array_equal(weights[name], published[name]) for weights in served for name in published)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Run]:
    """The learner's weights have a different seed than those the engines start with."""
    folder = tmp_path_factory.mktemp("weight_groups")
    served, trained = tiny_llama(folder / "served"), tiny_llama(folder / "trained", seed=1)
    spec = LearnerSpec(bucket_mb=0.05, verify_weights=True, step_deadline_s=60)
    config = LearnerConfig(
        ModelSpec(path=trained), spec, Optimizer(), 10, 0, folder / "logs", PolicyUpdate(), prefix="groups-"
    )
    actors = configuration(served, folder / "logs", count=2, max_replacements=3)
    pool, learner = await asyncio.gather(ActorPool.start(actors), LearnerPool.start(config))
    pool.late_weights.store = learner.store
    yield Run(pool, learner, WeightGroups(job(served), pool, learner))
    await asyncio.gather(pool.stop(), learner.stop())


def job(model: Path, deadline_s: float = DEADLINE) -> RLJob:
    return RLJob.model_validate(
        {
            "name": "groups",
            "steps": 1,
            "model": {"path": model},
            "data": {"path": "none"},
            "scorer": {"kind": "countdown"},
            "objective": {"kind": "mean"},
            "learner": {"verify_weights": True},
            "broadcast": {"transport": "collective", "deadline_s": deadline_s},
        }
    )


async def test_without_a_group_weights_go_through_the_object_store(run: Run) -> None:
    update, report = await run.publish()
    assert (update.received, [done.grouped for done in report.actors]) == (frozenset(), [False, False])
    assert await run.serves_bitwise(update)


async def test_a_group_delivers_weights_in_the_middle_of_samples(run: Run) -> None:
    assert await run.groups.form()
    assert run.groups.complete
    before = run.version
    long = [asyncio.create_task(generate(run.pool, request(n=32, max_tokens=240))) for _ in range(4)]
    await asyncio.sleep(0.2)
    for _ in range(2):
        update, report = await run.publish()
        assert update.received == {"actor-0", "actor-1"}
        assert [done.grouped for done in report.actors] == [True, True]
        assert len(update.buckets) > 2
        assert not update.stored, "nobody needed it there"
    for group in await asyncio.gather(*long):
        assert set(group.versions_T) <= {before, before + 1, before + 2}
    assert await run.serves_bitwise(update)


async def test_an_engine_killed_while_it_receives_does_not_affect_the_others(run: Run) -> None:
    victim = run.pool.infos[1]
    os.kill(victim.engine_pids[0], signal.SIGSTOP)  # it is a member of the group, but receives nothing
    begun = time.monotonic()
    publishing = asyncio.create_task(run.learner.publish(await run.train()))
    await asyncio.sleep(0.5)
    assert not publishing.done()
    os.kill(victim.engine_pids[0], signal.SIGKILL)
    update = await publishing
    assert time.monotonic() - begun < DEADLINE
    assert "actor-1" not in update.received
    assert update.lost_group is not None
    assert not run.groups.complete
    report = await run.pool.broadcast(update)
    assert "actor-0" in [done.actor for done in report.actors]
    await until_count(run.pool, 2)
    assert [info.name for info in run.pool.infos] == ["actor-0", "actor-2"]
    assert await run.serves_bitwise(update)  # the replacement got the weights from the object store


async def test_a_new_actor_takes_what_the_group_delivered_from_the_learner_and_is_in_the_next_group(run: Run) -> None:
    assert await run.groups.form()
    update, _ = await run.publish()
    assert (sorted(update.received), update.stored) == (["actor-0", "actor-2"], False)
    await run.pool.scale(3)
    assert await run.serves_bitwise(update)
    async with run.groups.maintained():
        await until(lambda: run.groups.complete)
    update, report = await run.publish()
    assert update.received == {"actor-0", "actor-2", "actor-3"}
    assert all(done.grouped for done in report.actors)
    assert await run.serves_bitwise(update)


async def test_a_hung_member_delays_the_others_until_the_deadline_only(run: Run) -> None:
    await run.pool.scale(2)
    assert await run.groups.form()
    victim = run.pool.infos[0]
    os.kill(victim.engine_pids[0], signal.SIGSTOP)
    version, begun = await run.train(), time.monotonic()
    await run.learner.begin_publish(version)
    assert time.monotonic() - begun < DEADLINE / 2  # the learner continues
    update = await run.learner.published(version)
    assert time.monotonic() - begun < 3 * DEADLINE
    assert victim.name not in update.received
    os.kill(victim.engine_pids[0], signal.SIGCONT)
    report = await run.pool.broadcast(update)
    assert {done.actor: done.grouped for done in report.actors}[victim.name] is False
    assert await run.serves_bitwise(update)


async def until_count(pool: ActorPool, count: int) -> None:
    await until(lambda: pool.count == count, seconds=120)
