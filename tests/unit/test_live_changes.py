"""The real coordinator loops while users change, pause and stop a run, and while scoring fails."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from learner.records import ScoredGroup, StepReport
from services.coordinator.ledger import Ledger
from services.coordinator.pinned_evaluation import PinnedEvaluation
from services.coordinator.records import ResumePoint
from tests.unit.fake_roles import FakeActors, FakeLearner, FakeRewards, coordinator, job, until
from volley.errors import NoSignal
from volley.objectives import MaxAtK
from volley.state import Desired


async def test_objective_and_learning_rate_change_while_the_run_is_live() -> None:
    made, learner, _, _ = coordinator(job(max_lag=0), FakeActors(random.Random(0)))
    run = asyncio.create_task(made.run())
    await until(lambda: made.version >= 9)
    await made.apply(Desired(revision=1, objective={"k": 4}, learning_rate=0.5))
    changed_at = made.version
    await asyncio.wait_for(run, 10)
    ks = [objective.k or 0 for objective, _, _ in learner.options if isinstance(objective, MaxAtK)]
    assert ks in ([2] * at + [4] * (25 - at) for at in (changed_at, changed_at + 1))
    assert [rate for _, rate, _ in learner.options] == [None if k == 2 else 0.5 for k in ks]


async def test_a_paused_run_admits_nothing_and_continues_when_it_is_unpaused() -> None:
    brief = {"group_deadline_s": 0.15, "start_deadline_s": 0.1}
    spec = job(actors=brief, reward_workers=brief)
    made, learner, _, _ = coordinator(spec, FakeActors(random.Random(0)))
    run = asyncio.create_task(made.run())
    await until(lambda: made.version >= 5)
    for desired in (Desired(paused=True), Desired(actors=0)):
        await made.apply(desired)
        await asyncio.sleep(0.7)  # longer than every bound: a pause is not a hang
        admitted, version = made.ledger.admitted, made.version
        assert made.pause_reason
        await asyncio.sleep(0.1)
        assert (made.ledger.admitted, made.version) == (admitted, version)
    assert any("the run is paused, no actors are desired" in sentence for sentence in made.waits.sentences(0))
    await made.apply(Desired())
    assert await asyncio.wait_for(run, 10)
    assert sorted(learner.trained) == list(range(100))


async def test_a_stop_request_ends_even_a_paused_run_at_a_checkpoint() -> None:
    stop_requested = asyncio.Event()
    made, learner, recorded, _ = coordinator(job(), FakeActors(random.Random(0)), stop_requested=stop_requested)
    run = asyncio.create_task(made.run())
    await until(lambda: made.version >= 5)
    await made.apply(Desired(revision=1, paused=True))
    await until(lambda: "learner" in made.waits)
    stop_requested.set()
    assert not await asyncio.wait_for(run, 5)
    ((step, _),) = recorded.checkpoints
    assert len(learner.trained) == step * 4


@pytest.mark.parametrize(
    ("plan", "version"),
    [({"every": 10}, 0), ({"every": 10, "at_start": False}, 10), ({"at_start": False}, 25)],
    ids=["the first", "one between", "the last"],
)
async def test_a_stop_cancels_an_evaluation_which_the_resumed_run_then_makes(
    plan: dict[str, Any], version: int
) -> None:
    spec, stop_requested, actors = (
        job(evaluation={"data": {"path": "h"}, **plan}),
        asyncio.Event(),
        FakeActors(random.Random(0)),
    )
    made, learner, recorded, evaluated = coordinator(
        spec, actors, stop_requested=stop_requested, during_evaluation=lambda _: asyncio.sleep(3600)
    )
    run = asyncio.create_task(made.run())
    await until(lambda: made.pinned.version == version and "learner" in made.waits)
    stop_requested.set()
    assert not await asyncio.wait_for(run, 5), "the run is not done, because an evaluation is missing"
    assert not evaluated
    ((step, state),) = recorded.checkpoints
    assert version <= step <= version + 2, "the learner continued while there were slots"
    before = list(learner.trained)
    again, learner, _, evaluated = coordinator(spec, actors, resume=ResumePoint.of(step, state, recorded.ready))
    assert await again.run()
    assert evaluated == [step, *(due for due in (10, 20, 25) if due > step)]
    assert sorted(before + learner.trained) == list(range(100))


async def test_a_stop_that_is_withdrawn_within_a_step_costs_no_evaluation() -> None:
    """The learner notices nothing, and the next step's version is evaluated in place of the cancelled one."""
    spec = job(evaluation={"data": {"path": "h"}, "every": 20}, checkpoint={"every": 15}, max_lag=4)
    learner, inside, go_on = FakeLearner(), asyncio.Event(), asyncio.Event()

    async def held(version: int) -> None:
        if version == 0:
            await asyncio.sleep(3600)

    async def step(batch: Sequence[ScoredGroup], *, version: int, **options: Any) -> StepReport:
        if version == 1:
            inside.set()
            await go_on.wait()
        return await FakeLearner.step(learner, batch, version=version, **options)

    learner.step = step  # type: ignore[method-assign]
    made, _, recorded, evaluated = coordinator(
        spec, FakeActors(random.Random(0)), learner=learner, during_evaluation=held
    )
    run = asyncio.create_task(made.run())
    await inside.wait()
    await made.apply(Desired(revision=1, stopped=True))
    await until(lambda: made.pinned.owed)
    await made.apply(Desired(revision=2))
    go_on.set()
    assert await asyncio.wait_for(run, 10)
    assert evaluated == [2, 20, 25]
    assert [state["evaluated"] for _, state in recorded.checkpoints] == [True, True]


async def test_a_resumed_run_that_only_lacks_its_last_evaluation_can_be_stopped_meanwhile() -> None:
    spec, stop_requested = job(evaluation={"data": {"path": "h"}}), asyncio.Event()
    last = ResumePoint(25, Ledger(admitted=100, trained=100), 0, 0, {}, evaluated=False)
    actors = FakeActors(random.Random(0), version=25)
    made, _, recorded, evaluated = coordinator(
        spec, actors, resume=last, stop_requested=stop_requested, during_evaluation=lambda _: asyncio.sleep(3600)
    )
    run = asyncio.create_task(made.run())
    await until(lambda: made.pinned.version == 25)
    stop_requested.set()
    assert not await asyncio.wait_for(run, 5)
    assert not evaluated
    assert not recorded.checkpoints, "the one that it started from says that the evaluation is missing"


async def test_an_evaluation_that_is_made_is_not_owed_though_a_stop_cancels_what_follows() -> None:
    ended = asyncio.Event()

    async def on_end() -> None:
        if not ended.is_set():
            ended.set()
            await asyncio.sleep(3600)

    async def evaluate(_version: int) -> None:
        await asyncio.sleep(0)

    pinned = PinnedEvaluation(evaluate, on_end, stopping=lambda: False, owed=True)
    async with asyncio.TaskGroup() as tasks:
        pinned.begin(tasks, 5)
        await ended.wait()
        await pinned.cancel()
    assert not pinned.owed


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_resuming_a_stopped_run_loses_and_repeats_no_group(max_lag: int) -> None:
    spec = job(max_lag=max_lag)
    made, learner, recorded, _ = coordinator(spec, FakeActors(random.Random(0)))
    run = asyncio.create_task(made.run())
    await until(lambda: made.version >= 7)
    await made.apply(Desired(stopped=True))
    assert not await asyncio.wait_for(run, 10)
    ((step, state),) = recorded.checkpoints
    assert 7 <= step < 25
    before, kept = list(learner.trained), [ready.meta.group_id for ready in recorded.ready]
    actors = FakeActors(random.Random(1), version=step)
    point = ResumePoint.of(step, state, recorded.ready)
    again, learner, _, _ = coordinator(spec, actors, resume=point)
    assert await again.run()
    assert sorted(before + learner.trained) == list(range(100))
    assert not set(kept) & set(actors.asked), "groups that were ready are not generated again"
    assert max(learner.lags) <= max_lag


async def test_the_lag_bound_changes_while_the_run_is_live() -> None:
    made, learner, _, _ = coordinator(job(steps=60, max_lag=0), FakeActors(random.Random(0)))
    run = asyncio.create_task(made.run())
    await until(lambda: made.version >= 10)
    assert max(learner.lags) == 0
    await made.apply(Desired(max_lag=3))
    await until(lambda: made.version >= 30)
    assert 0 < max(learner.lags) <= 3
    await made.apply(Desired(max_lag=0))
    await until(lambda: made.version >= 45)  # the groups admitted before have ended by now
    fresh = len(learner.lags)
    await asyncio.wait_for(run, 10)
    assert max(learner.lags[fresh:]) == 0
    assert sorted(learner.trained) == list(range(240))


async def test_failing_scores_pause_the_run_until_scoring_works_again() -> None:
    broken = [True]
    rewards = FakeRewards(unscored=lambda _prompt: broken[0])
    spec = job(infra_errors={"window": 4, "probe_every_s": 0.05})
    made, learner, recorded, _ = coordinator(spec, FakeActors(random.Random(0)), rewards)
    run = asyncio.create_task(made.run())
    await until(lambda: "paused" in recorded.events)
    assert "100% of the samples of the last 4 groups could not be scored, the last because: boom" in made.pause_reason
    dropped = made.ledger.counts()["dropped"]
    await asyncio.sleep(1.0)
    assert made.ledger.counts()["dropped"] - dropped <= made.buffer.slots + 4, "only single groups probe the scorer"
    broken[0] = False
    await asyncio.wait_for(run, 20)
    assert recorded.events[-1] == "unpaused"
    assert not made.pause_reason
    assert len(learner.trained) == 100


async def test_a_scorer_that_never_works_ends_the_run_with_its_reason() -> None:
    rewards = FakeRewards(unscored=lambda _prompt: True)
    spec = job(infra_errors={"window": 4, "give_up_s": 0})
    made, learner, _, _ = coordinator(spec, FakeActors(random.Random(0)), rewards)
    with pytest.raises(NoSignal, match=r"could not be scored for 0 s .* the last because: boom"):
        await asyncio.wait_for(made.run(), 10)
    assert learner.trained == []
