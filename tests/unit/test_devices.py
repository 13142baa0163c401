"""Actors and learner that take turns: never both awake, whatever happens in which order."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from actors.config import BroadcastReport
from learner.records import ScoredGroup, StepReport
from services.coordinator.devices import Devices
from tests.unit.fake_roles import FakeActors, FakeLearner, coordinator, job
from volley.job import RLJob
from volley.records import WeightUpdate


@dataclass
class Watched(FakeLearner):
    """A learner that fails a test if it works while the actors are awake."""

    actors: FakeActors = field(default_factory=lambda: FakeActors(random.Random(0)))

    def check(self) -> None:
        assert self.actors.asleep
        assert not self.asleep

    async def wake(self) -> None:
        assert self.actors.asleep
        await super().wake()

    async def score(self, group: object) -> Any:
        self.check()
        await asyncio.sleep(0.001)
        self.check()
        return np.zeros(1)

    async def step(self, batch: Sequence[ScoredGroup], **options: Any) -> StepReport:
        self.check()
        report = await super().step(batch, **options)
        self.check()
        return report

    async def begin_publish(self, version: int) -> None:
        self.check()


class WatchedActors(FakeActors):
    learner: FakeLearner

    async def wake(self) -> None:
        assert self.learner.asleep
        await super().wake()

    async def broadcast(self, update: WeightUpdate) -> BroadcastReport:
        assert self.asleep
        assert self.learner.asleep != update.lent
        assert self.learner.lending == update.lent
        return await super().broadcast(update)


def pair(seed: int, *, lends: bool = False) -> tuple[WatchedActors, Watched]:
    actors = WatchedActors(random.Random(seed))
    actors.learner = learner = Watched(actors=actors, asleep=True, lends=lends)
    return actors, learner


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
async def test_a_run_whose_roles_take_turns_trains_every_group_once(max_lag: int, lends: bool) -> None:
    spec = job(
        max_lag=max_lag,
        placement="colocated",
        checkpoint={"every": 7},
        evaluation={"data": {"path": "h"}, "every": 5, "at_start": True},
    )
    actors, learner = pair(max_lag, lends=lends)

    async def evaluation(version: int) -> None:
        for _ in range(3):
            assert learner.asleep
            assert not actors.asleep
            await asyncio.sleep(0.002)

    made, _, recorded, evaluated = coordinator(spec, actors, learner=learner, during_evaluation=evaluation)
    assert await made.run()
    assert sorted(learner.trained) == list(range(100))
    assert max(learner.lags) <= max_lag
    assert (max(learner.lags) > 0) == (max_lag > 0), "samples that fell asleep are trained on later, with a lag only"
    assert evaluated == [0, 5, 10, 15, 20, 25]
    assert [step for step, _ in recorded.checkpoints] == [7, 14, 21, 25]
    assert all(finished.report.metrics["seconds_hand_over"] > 0 for finished in recorded.steps)


async def test_a_stop_while_the_learner_has_the_devices_ends_at_a_checkpoint() -> None:
    stop = asyncio.Event()
    actors, learner = pair(0)
    spec = job(placement="colocated", checkpoint={"every": None})
    made, *_, recorded, _ = coordinator(spec, actors, learner=learner, stop_requested=stop)
    stopping = asyncio.create_task(made.run())
    while len(learner.trained) < 12:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.001)
    stop.set()
    assert not await stopping
    assert recorded.checkpoints[-1][0] == made.version < spec.steps


@pytest.mark.parametrize("seed", range(20))
async def test_any_order_of_hand_overs_leaves_one_of_them_awake(seed: int) -> None:
    rng = random.Random(seed)
    actors, learner = pair(seed, lends=seed % 2 == 1)
    devices = Devices(actors, learner, shared=True)

    async def publish() -> None:
        await devices.to_learner()
        report = await devices.deliver(await learner.published(actors.version + 1))
        assert (report.version, learner.asleep, learner.lending) == (actors.version, True, False)

    async def replace() -> None:
        learner.asleep, learner.lending = True, False  # it has ended, and with it what it held
        await devices.learner_ended()
        assert actors.asleep
        learner.asleep = False
        devices.learner = learner

    async def borrow() -> None:
        async with devices.borrowed():
            learner.check()

    async def score() -> None:
        assert (await devices.score(object())).shape == (1,)  # type: ignore[arg-type]

    for _ in range(30):
        await rng.choice([publish, replace, borrow, score, devices.to_learner])()
        assert actors.asleep != learner.asleep
    assert devices.take_metrics()["seconds_hand_over"] > 0
    assert devices.take_metrics()["seconds_hand_over"] == 0


async def test_roles_with_devices_of_their_own_never_sleep() -> None:
    actors, learner = pair(0)
    learner.asleep = False
    devices = Devices(actors, learner, shared=False)
    await devices.to_learner()
    await devices.learner_ended()
    async with devices.borrowed():
        assert not actors.asleep
    assert not actors.asleep
    assert not learner.asleep
    assert devices.take_metrics() == {}


ON_GPUS: dict[str, Any] = {"actors": {"gpus": 0.5}, "learner": {"gpus_per_rank": 0.5}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        ON_GPUS,
        {"actors": {"count": 3}, "learner": {"ranks": 2}},
        {"actors": {"gpus": 0.4}, "learner": {"gpus_per_rank": 0.6}},
        {"actors": {"gpus": 0.7}, "learner": {"gpus_per_rank": 0.3}},
    ],
)
def test_what_can_take_turns(changes: dict[str, Any]) -> None:
    assert job(placement="colocated", **changes).placement == "colocated"


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"broadcast": {"transport": "collective"}}, "transport: shared_memory"),
        ({"actors": {"gpus": 1}}, "both a share of one GPU"),
        ({"learner": {"gpus_per_rank": 0.5}}, "both a share of one GPU"),
        ({"actors": {"gpus": 0.5}, "learner": {"gpus_per_rank": 0.6}}, "add up to 1"),
        ({**ON_GPUS, "actors": {"gpus": 0.5, "count": 2}}, "actors.count: 1"),
        ({**ON_GPUS, "actors": {"gpus": 0.5, "max_count": 2}}, "actors.count: 1"),
        ({**ON_GPUS, "learner": {"gpus_per_rank": 0.6, "ranks": 2}}, "learner.ranks: 1"),
        (
            {
                **ON_GPUS,
                "learner": {
                    "gpus_per_rank": 0.5,
                    "deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
                },
            },
            "remove offload_optimizer",
        ),
    ],
)
def test_what_cannot_take_turns_is_refused_with_advice(changes: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        job(placement="colocated", **changes)
    assert isinstance(job(**changes), RLJob), "each may have devices of its own"


def test_only_roles_that_take_turns_share_memory() -> None:
    shared = {"broadcast": {"transport": "shared_memory"}}
    assert job(placement="colocated", **shared).broadcast.transport == "shared_memory"
    with pytest.raises(ValidationError, match=r"write placement: colocated, or broadcast: \{transport: object_store\}"):
        job(**shared)
    with pytest.raises(ValidationError, match="shared_memory cannot carry adapters"):
        job(placement="colocated", model={"path": "m", "lora": {"rank": 4}}, **shared)
