"""The real pool over fake actors: assignment of groups, deaths, new weights, scaling."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from actors import pool as pool_module
from actors.config import ActorConfig, ActorInfo, ActorUpdate, GenerateRequest
from actors.late_weights import LateWeights
from actors.pool import ActorPool
from volley.errors import DeadlineExceeded, HostError, JobError, WeightsGone, WorkerDied
from volley.job import ActorsSpec
from volley.model import ModelSpec
from volley.records import GroupMeta, WeightUpdate


@dataclass(eq=False)
class FakeMember:
    """Stands in for a Ray actor and its engine; groups finish when the test allows it."""

    config: ActorConfig
    index: int
    name: str = ""
    samples: int = 0
    version: int = 0
    info: ActorInfo | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    state: str = "new"
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    death: WorkerDied | None = None
    on_start: Exception | None = None
    hung: bool = False
    received: list[int] = field(default_factory=list)
    gone: tuple[WeightUpdate, ...] = ()
    update_gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.name = f"actor-{self.index}"
        self.idle.set()
        self.update_gate.set()

    async def start(self) -> None:
        await asyncio.sleep(0)
        if self.on_start is not None:
            raise self.on_start
        self.info, self.state = ActorInfo(self.name, 1, (2,), 16, 40, 0.1), "serving"

    async def generate(self, request: GenerateRequest) -> tuple[str, GroupMeta]:
        self.samples += request.n
        self.idle.clear()
        try:
            await self.may_end.wait()
            if self.death is not None:
                raise self.death
            return f"group of {self.name}", GroupMeta(
                request.group_id,
                request.prompt_id,
                self.name,
                request.n,
                2,
                9,
                -9.0,
                self.version,
                self.version,
                0,
                0.1,
                request.n,
            )
        finally:
            self.samples -= request.n
            if self.samples == 0:
                self.idle.set()

    async def update(self, update: WeightUpdate) -> ActorUpdate:
        await self.update_gate.wait()
        if self.death is not None:
            raise self.death
        if any(update is gone for gone in self.gone):
            raise WeightsGone(f"weights {update.version} are gone")
        self.version = update.version
        self.received.append(update.version)
        return ActorUpdate(self.name, update.version, 10, 0.0, 0.0, 0.0)

    async def served_weights(self) -> NDArray[np.uint8]:
        return np.array([self.version], dtype=np.uint8)

    async def ping(self, seconds: float) -> None:
        if self.death is None and self.hung:
            raise DeadlineExceeded("actor pool", f"{self.name}: a sign of life", seconds)

    async def stop(self) -> None:
        self.state = "stopped"

    def kill(self) -> None:
        self.die()
        self.state = "killed"

    def die(self) -> None:
        self.death = WorkerDied(self.name, "killed by the test")
        self.may_end.set()


class Fakes(list[FakeMember]):
    """Every fake the pool has created, in order, and settings for those it creates next."""

    def __init__(self) -> None:
        super().__init__()
        self.on_start: dict[int, Exception] = {}
        self.gated: set[int] = set()
        self.gone: tuple[WeightUpdate, ...] = ()

    def make(self, config: ActorConfig, index: int, late_weights: LateWeights) -> FakeMember:
        member = FakeMember(config, index, on_start=self.on_start.get(index), gone=self.gone)
        if index in self.gated:
            member.update_gate.clear()
        self.append(member)
        return member


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    made = Fakes()
    monkeypatch.setattr(pool_module, "ActorHandle", made.make)
    monkeypatch.setattr(pool_module, "PING_EVERY", 0.01)
    return made


def config(count: int, max_replacements: int = 0) -> ActorConfig:
    spec = ActorsSpec(count=count, max_replacements=max_replacements)
    return ActorConfig(ModelSpec(path=Path("m")), spec, 16, 0, Path("logs"))


def request(group_id: int = 0, n: int = 4, prompt_tokens: int = 2) -> GenerateRequest:
    prompt_p = np.ones(prompt_tokens, dtype=np.int32)
    return GenerateRequest(group_id, f"p{group_id}", prompt_p, n, 1.0, 1.0, 8)


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version, (), None, 0.0)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_group_goes_to_the_actor_with_the_fewest_samples_in_flight(fakes: Fakes) -> None:
    pool = await ActorPool.start(config(2))
    sizes = [8, 2, 2, 2, 4]
    tasks = [asyncio.create_task(pool.generate(request(i, n))) for i, n in enumerate(sizes)]
    await settle()
    assert sorted(member.samples for member in fakes) == [8, 10]
    for member in fakes:
        member.may_end.set()
    await asyncio.gather(*tasks)
    assert [member.samples for member in fakes] == [0, 0]


async def test_a_prompt_the_model_cannot_take_is_a_job_error(fakes: Fakes) -> None:
    pool = await ActorPool.start(config(1))
    with pytest.raises(
        JobError, match="prompt 'p0' has 16 tokens, but the model takes 1 to 15: change it or remove it"
    ):
        await pool.generate(request(prompt_tokens=16))
    with pytest.raises(JobError, match="prompt 'p0' has 0 tokens"):
        await pool.generate(request(prompt_tokens=0))
    with pytest.raises(JobError, match=r"prompt 'p0' contains token 40, but the model has only 40 tokens"):
        await pool.generate(replace(request(), prompt_p=np.array([1, 40], dtype=np.int32)))


async def test_an_actor_that_may_not_be_replaced_fails_its_groups_and_later_ones(fakes: Fakes) -> None:
    pool = await ActorPool.start(config(1))
    tasks = [asyncio.create_task(pool.generate(request(i))) for i in range(3)]
    await settle()
    fakes[0].die()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(result) for result in results] == ["actor-0 died: killed by the test"] * 3
    with pytest.raises(WorkerDied):
        await asyncio.wait_for(pool.generate(request()), 10)
    assert (pool.count, len(fakes), fakes[0].state) == (0, 1, "killed")


async def test_groups_of_a_dead_actor_are_generated_again_and_it_is_replaced_once(fakes: Fakes) -> None:
    pool = await ActorPool.start(config(2, max_replacements=1))
    await pool.broadcast(update(5))
    tasks = [asyncio.create_task(pool.generate(request(i))) for i in range(6)]
    await settle()
    fakes[0].die()
    await settle()
    fakes[1].may_end.set()
    fakes[2].may_end.set()
    metas = [meta for _, meta in await asyncio.gather(*tasks)]
    assert sorted(meta.group_id for meta in metas) == list(range(6))
    assert {meta.actor for meta in metas} <= {"actor-1", "actor-2"}
    assert [str(death) for death in pool.deaths] == ["actor-0 died: killed by the test"]
    assert (pool.count, len(fakes), fakes[2].received) == (2, 3, [5])


async def test_a_replacement_serves_only_with_the_newest_weights(fakes: Fakes) -> None:
    fakes.gated = {1}
    pool = await ActorPool.start(config(1, max_replacements=1))
    await pool.broadcast(update(1))
    group = asyncio.create_task(pool.generate(request()))
    await settle()
    fakes[0].die()
    await settle()
    assert (pool.count, pool.version) == (0, 1)
    await pool.broadcast(update(2))  # while the replacement is still loading version 1
    fakes[1].update_gate.set()
    fakes[1].may_end.set()
    _, meta = await asyncio.wait_for(group, 10)
    assert (meta.oldest_version, pool.version) == (2, 2)
    assert fakes[1].received[-1] == 2


async def test_a_replacement_that_does_not_start_fails_waiting_groups(fakes: Fakes) -> None:
    fakes.on_start = {1: HostError("no memory"), 2: AssertionError("unreachable")}
    pool = await ActorPool.start(config(1, max_replacements=5))
    group = asyncio.create_task(pool.generate(request()))
    await settle()
    fakes[0].die()
    with pytest.raises(HostError, match="no memory"):
        await asyncio.wait_for(group, 10)
    assert [member.state for member in fakes] == ["killed", "killed"]


async def test_lost_weights_fail_waiting_groups_until_new_ones_are_published(fakes: Fakes) -> None:
    lost, again = update(1), update(1)  # the learner restarted from a checkpoint and publishes the version again
    pool = await ActorPool.start(config(1, max_replacements=5))
    await pool.broadcast(lost)
    group = asyncio.create_task(pool.generate(request()))
    await settle()
    fakes.gone = (lost,)
    fakes[0].die()
    with pytest.raises(WeightsGone):
        await asyncio.wait_for(group, 10)
    with pytest.raises(WeightsGone):
        await asyncio.wait_for(pool.generate(request()), 10)
    assert (pool.count, len(fakes)) == (0, 2)
    await pool.broadcast(again)
    group = asyncio.create_task(pool.generate(request()))
    await settle()
    fakes[2].may_end.set()
    _, meta = await asyncio.wait_for(group, 10)
    assert (meta.actor, fakes[2].received, len(pool.deaths)) == ("actor-2", [1], 1)


async def test_a_replacement_loads_newer_weights_if_older_ones_are_lost(fakes: Fakes) -> None:
    lost = update(1)
    pool = await ActorPool.start(config(1, max_replacements=1))
    await pool.broadcast(lost)
    fakes.gated, fakes.gone = {1}, (lost,)
    fakes[0].die()
    group = asyncio.create_task(pool.generate(request()))
    await settle()
    await pool.broadcast(update(2))
    fakes[1].update_gate.set()
    fakes[1].may_end.set()
    _, meta = await asyncio.wait_for(group, 10)
    assert (meta.oldest_version, fakes[1].received) == (2, [2])


async def test_a_hung_actor_is_killed_and_its_groups_are_generated_again(fakes: Fakes) -> None:
    pool = await ActorPool.start(config(1, max_replacements=1))
    group = asyncio.create_task(pool.generate(request()))
    await settle()
    fakes[0].hung = True
    async with asyncio.timeout(10):
        while len(fakes) < 2:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
    fakes[1].may_end.set()
    _, meta = await asyncio.wait_for(group, 10)
    assert (meta.actor, fakes[0].state) == ("actor-1", "killed")
    assert [str(death) for death in pool.deaths] == ["actor pool waited 120 s for actor-0: a sign of life"]
    await pool.stop()


async def test_a_slow_actor_does_not_delay_others(fakes: Fakes) -> None:
    fakes.gated = {1}
    pool = await ActorPool.start(config(2))
    broadcast = asyncio.create_task(pool.broadcast(update(3)))
    await settle()
    assert ([member.version for member in fakes], pool.version) == ([3, 0], 0)
    fakes[1].update_gate.set()
    report = await asyncio.wait_for(broadcast, 10)
    assert (pool.version, report.version, report.nbytes) == (3, 3, 20)
    assert [done.actor for done in report.actors] == ["actor-0", "actor-1"]


async def test_an_actor_that_dies_while_loading_weights_is_not_in_the_report(fakes: Fakes) -> None:
    pool = await ActorPool.start(config(2, max_replacements=1))
    fakes[0].die()
    report = await pool.broadcast(update(1))
    await settle()
    assert [done.actor for done in report.actors] == ["actor-1"]
    assert (pool.count, fakes[2].version) == (2, 1)


async def test_scaling_up_keeps_serving_and_scaling_down_drains(fakes: Fakes) -> None:
    pool = await ActorPool.start(config(1))
    await pool.broadcast(update(4))
    busy = asyncio.create_task(pool.generate(request(0)))
    await settle()
    await pool.scale(2)
    assert ([member.version for member in fakes], pool.count) == ([4, 4], 2)
    down = asyncio.create_task(pool.scale(0))
    await settle()
    assert (fakes[1].state, fakes[0].state, down.done()) == ("stopped", "serving", False)
    paused = asyncio.create_task(pool.generate(request(1)))
    await settle()
    fakes[0].may_end.set()
    _, meta = await busy
    await asyncio.wait_for(down, 10)
    assert (meta.actor, fakes[0].state, pool.count, paused.done()) == ("actor-0", "stopped", 0, False)
    up = asyncio.create_task(pool.scale(1))
    await settle()
    fakes[2].may_end.set()
    _, meta = await asyncio.wait_for(paused, 10)
    await up
    assert (meta.actor, meta.oldest_version) == ("actor-2", 4)


async def test_a_failed_start_ends_all_actors(fakes: Fakes) -> None:
    fakes.on_start = {1: JobError("the model does not load")}
    with pytest.raises(JobError, match="the model does not load"):
        await ActorPool.start(config(3))
    assert {member.state for member in fakes} <= {"stopped", "killed"}


async def test_stop_ends_every_actor(fakes: Fakes) -> None:
    pool = await ActorPool.start(config(3))
    await pool.stop()
    assert ([member.state for member in fakes], pool.count) == (["stopped"] * 3, 0)
