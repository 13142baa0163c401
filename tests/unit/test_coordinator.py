"""The real coordinator loops with small fakes at the three heavy seams."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from actors.config import GenerateRequest
from learner.records import ScoredGroup, StepReport
from services.coordinator.buffer import SlotBuffer
from services.coordinator.records import ReadyGroup, ResumePoint
from services.coordinator.served import ServedChecks
from tests.unit.fake_roles import Checkpoint, FakeActors, FakeLearner, FakeRewards, coordinator, job, until
from volley.errors import DeadlineExceeded, HostError, JobError, NoSignal, ServedWeightsDiffer, WorkerDied
from volley.objectives import MaxAtK
from volley.records import GroupMeta, Prompt, Scores


@pytest.mark.parametrize(
    ("changes", "earliest"),
    [
        ({}, 1),
        ({"steps": 1}, 1),
        ({"evaluation": {"data": {"path": "h"}}}, 2),  # the learner does not wait for the start's evaluation
        ({"steps": 1, "evaluation": {"data": {"path": "h"}}}, 1),
    ],
)
async def test_what_the_actors_serve_is_checked_after_the_first_update(changes: dict[str, Any], earliest: int) -> None:
    spec, learner = job(**changes, checkpoint={"every": None}), FakeLearner()

    async def steps(version: int) -> None:
        if version == 0:
            await until(lambda: len(learner.trained) >= earliest * spec.prompts_per_step)

    actors = FakeActors(random.Random(0))
    made, _, recorded, _ = coordinator(spec, actors, learner=learner, during_evaluation=steps)
    assert await made.run()
    (checked,) = recorded.served_checks
    assert earliest <= checked <= earliest + 2


async def test_served_weights_are_checked_at_every_checkpoint_and_the_next_step_reports_it() -> None:
    made, _, recorded, _ = coordinator(job(checkpoint={"every": 10}), FakeActors(random.Random(0)))
    await made.run()
    assert recorded.served_checks[1:] == [10, 20]
    reported = {f.step: f.report.metrics.get("served_mismatch_max") for f in recorded.steps}
    assert {step: value for step, value in reported.items() if value} == {
        version: pytest.approx(1e-6 * version) for version in recorded.served_checks
    }


async def test_a_run_whose_actors_serve_something_else_ends() -> None:
    made, learner, _, _ = coordinator(job(), FakeActors(random.Random(0)))

    async def differ() -> float:
        raise ServedWeightsDiffer("actor-0 serves something else")

    made._served = ServedChecks(differ, made.waits)
    with pytest.raises(ServedWeightsDiffer, match="actor-0"):
        await made.run()
    assert len(learner.trained) == made.job.prompts_per_step, "no second step"


@pytest.mark.parametrize("max_lag", [0, 1, 2, 5])
async def test_every_step_is_trained_within_the_lag_and_the_ledger_is_exact(max_lag: int) -> None:
    actors = FakeActors(random.Random(max_lag))
    made, learner, recorded, _ = coordinator(job(max_lag=max_lag), actors)
    await made.run()
    assert [finished.step for finished in recorded.steps] == list(range(25))
    assert max(learner.lags) <= max_lag
    assert (max(learner.lags) > 0) == (max_lag > 0), "steps and generation overlap with a lag, and only then"
    assert sorted(learner.trained) == list(range(100)), "each group once"
    assert made.ledger.counts() == {"admitted": 100, "trained": 100, "dropped": 0, "in_flight": 0, "dead": 0}
    assert actors.version == 25


async def test_a_group_that_cannot_be_scored_is_dropped_and_replaced() -> None:
    rewards = FakeRewards(unscored=lambda prompt: prompt == "p3")
    made, learner, recorded, _ = coordinator(job(), FakeActors(random.Random(0)), rewards)
    await made.run()
    counts = made.ledger.counts()
    assert counts["trained"] == 100
    assert counts["dropped"] == recorded.events.count("group_dropped") >= 9
    assert made.ledger.dropped == {"0 of 4 samples could be scored": counts["dropped"]}
    assert len(set(learner.trained)) == 100


async def test_a_drop_that_completes_a_batch_wakes_the_learner() -> None:
    """Once the late group is gone, the two ready ones make a batch; no further group is needed."""
    buffer = SlotBuffer[str](2, 1)
    for group_id in (1, 2, 3):
        buffer.admit(group_id, started_at=0)
    for group_id in (1, 2):
        buffer.put(group_id, "ready", oldest_version=0)
    assert not buffer.can_take(1)
    assert buffer.take(1) is None
    buffer.drop(3)
    assert buffer.can_take(1)
    assert buffer.take(1) == [(1, "ready"), (2, "ready")]


async def test_groups_do_not_wait_for_space_to_record_what_went_wrong_with_them() -> None:
    """A full disk holds the records up for longer than the learner waits for a group."""
    brief = {"group_deadline_s": 0.2, "start_deadline_s": 0.05}
    spec = job(steps=3, actors=brief, reward_workers=brief)
    made, learner, recorded, _ = coordinator(spec, FakeActors(random.Random(0)), FakeRewards(lambda name: name == "p1"))
    space, dropped, event = asyncio.Event(), recorded.dropped, recorded.event

    async def event_with_space(kind: str, **details: Any) -> None:
        await space.wait()
        await event(kind, **details)

    async def dropped_with_space(*told: Any, **more: Any) -> None:
        await space.wait()
        await dropped(*told, **more)

    recorded.event = event_with_space  # type: ignore[method-assign]
    recorded.dropped = dropped_with_space  # type: ignore[method-assign]
    run = asyncio.create_task(made.run())
    await until(lambda: len(recorded.steps) == 3 or run.done())
    assert not run.done(), "nothing is lost: the run ends once all of it is recorded"
    assert not recorded.events
    space.set()
    assert await asyncio.wait_for(run, 5)
    assert recorded.events.count("group_dropped") == made.ledger.dropped.total() > 0
    assert recorded.events.count("trouble") == 1
    assert len(learner.trained) == 12


async def test_evaluations_are_made_at_the_start_periodically_and_at_the_end() -> None:
    plan = {"data": {"path": "h"}, "every": 10}
    made, _, _, evaluated = coordinator(job(evaluation=plan), FakeActors(random.Random(0)))
    await made.run()
    assert evaluated == [0, 10, 20, 25]


async def test_a_dead_actor_ends_the_run_with_its_name() -> None:
    made, _, _, _ = coordinator(job(), FakeActors(random.Random(0), fails_at=17))
    with pytest.raises(WorkerDied, match="actor-0 died: killed by signal 9"):
        await asyncio.wait_for(made.run(), 10)


async def test_the_wait_for_a_batch_is_bounded_and_its_error_names_the_missing_group() -> None:
    actors, workers = ({"group_deadline_s": each, "start_deadline_s": each} for each in (0.1, 0.05))
    spec = job(actors=actors, reward_workers=workers, max_lag=1)
    made, _, _, _ = coordinator(spec, FakeActors(random.Random(0), hangs_at=6))
    expected = r"learner waited 0.3 s for step \d+: \d of 4 groups ready, groups \[6\]"
    with pytest.raises(DeadlineExceeded, match=expected):
        await asyncio.wait_for(made.run(), 10)


async def test_batches_without_signal_end_the_run_with_advice() -> None:
    made, _, recorded, _ = coordinator(
        job(max_dead_batches=3), FakeActors(random.Random(0)), learner=FakeLearner(live=0.0)
    )
    with pytest.raises(NoSignal, match=r"3 batches in a row .* Take easier or harder prompts"):
        await made.run()
    assert len(recorded.steps) <= 3


async def test_a_run_whose_steps_are_clipped_warns_once() -> None:
    clipped = job(optimizer={"clip_norm": 1.0})
    made, _, recorded, _ = coordinator(clipped, FakeActors(random.Random(0)), learner=FakeLearner(clipped=1.0))
    await made.run()
    assert len(recorded.steps) == 25
    assert recorded.events.count("trouble") == 1


async def test_each_group_has_its_own_seed_and_another_run_has_the_same_ones() -> None:
    seen: list[int | None] = []

    class Watching(FakeActors):
        async def generate(self, request: GenerateRequest) -> tuple[Any, GroupMeta]:
            seen.append(request.seed)
            return await super().generate(request)

    spec = job(steps=3, sampling={"n": 4, "seeded": True})
    for _ in range(2):
        made, _, _, _ = coordinator(spec, Watching(random.Random(0)))
        await made.run()
    assert len(set(seen[:12])) == 12
    assert sorted(map(str, seen[:12])) == sorted(map(str, seen[12:]))


async def test_checkpoints_are_between_steps_and_account_for_every_group() -> None:
    made, _, recorded, _ = coordinator(job(checkpoint={"every": 10}), FakeActors(random.Random(0)))
    await made.run()
    assert [step for step, _ in recorded.checkpoints] == [10, 20, 25]


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_a_resumed_run_trains_the_remaining_groups_and_none_twice(max_lag: int) -> None:
    spec = job(checkpoint={"every": 10}, max_lag=max_lag)
    made, learner, recorded, _ = coordinator(spec, FakeActors(random.Random(0)))
    await made.run()
    step, state = recorded.checkpoints[0]
    before = learner.trained[: step * spec.prompts_per_step]
    point = ResumePoint.of(step, state)
    actors = FakeActors(random.Random(1), version=step)
    again, learner, recorded, _ = coordinator(spec, actors, resume=point)
    await again.run()
    assert sorted(before + learner.trained) == list(range(100)), "each group once over both runs"
    assert [finished.step for finished in recorded.steps] == list(range(10, 25))
    assert max(learner.lags) <= max_lag
    assert again.ledger.counts() == {"admitted": 100, "trained": 100, "dropped": 0, "in_flight": 0, "dead": 0}


async def test_the_objective_follows_its_schedule_and_k_adapts_to_the_prompt() -> None:
    seen: list[tuple[int | None, set[int | None]]] = []

    class Watching(FakeLearner):
        async def step(self, batch: Sequence[ScoredGroup], **options: Any) -> StepReport:
            assert isinstance(options["objective"], MaxAtK)
            seen.append((options["objective"].k, {scored.k for scored in batch}))
            return await super().step(batch, **options)

    stages = [{"at": 10, "set": {"k": 3}}]
    made, _, _, _ = coordinator(
        job(schedule={"stages": stages}, max_lag=0), FakeActors(random.Random(0)), learner=Watching()
    )
    await made.run()
    assert [k for k, _ in seen] == [2] * 10 + [3] * 15
    assert {k for _, ks in seen for k in ks} == {None}
    seen.clear()
    made, _, _, _ = coordinator(
        job(schedule={"adaptive_k": {}}, max_lag=0), FakeActors(random.Random(0)), learner=Watching()
    )
    await made.run()
    assert seen[0][1] == {2}, "a prompt not seen before uses the objective's k"
    assert seen[-1][1] == {4}, "one sample of four is right: k is 4"


@dataclass
class RankingRewards(FakeRewards):
    """Ranks the passing sample of each group last; ``unranked`` says for which prompts it gives no ranks."""

    unranked: Callable[[str], bool] = lambda _prompt: False

    async def score(self, group: Any, prompt: Prompt) -> Scores:
        verdicts = (await super().score(group, prompt)).verdicts
        ranked = [replace(verdict, rank=float(place)) for place, verdict in enumerate(verdicts)]
        return Scores.pack(verdicts if self.unranked(prompt.id) else ranked)


async def test_best_of_k_passes_ranks_on_and_ends_the_run_if_a_sample_has_none() -> None:
    ranks: list[list[float]] = []

    class Watching(FakeLearner):
        async def step(self, batch: Sequence[ScoredGroup], **options: Any) -> StepReport:
            ranks.extend(scored.ranks_n.tolist() for scored in batch if scored.ranks_n is not None)
            return await super().step(batch, **options)

    spec = job(objective={"kind": "best_of_k", "k": 2}, scorer={"kind": "code"}, steps=2)
    made, _, _, _ = coordinator(spec, FakeActors(random.Random(0)), RankingRewards(), learner=Watching())
    await made.run()
    assert ranks == [[0.0, 1.0, 2.0, 3.0]] * 8
    made, learner, _, _ = coordinator(spec, FakeActors(random.Random(0)), RankingRewards(unranked=lambda _: True))
    with pytest.raises(JobError, match=r'return \{"reward": ..., "rank": ...\} for every sample'):
        await made.run()
    assert learner.trained == []


async def test_training_continues_while_a_version_is_evaluated() -> None:
    plan = {"data": {"path": "held"}, "every": 5, "sampling": {"n": 8}, "ks": [1, 8]}
    actors = FakeActors(random.Random(0), slowest=0.001)
    steps_ahead: dict[int, int] = {}

    async def two_steps(evaluated: int) -> None:
        if evaluated < 25:
            await until(lambda: steps_ahead.get(evaluated) == 2)
            await asyncio.sleep(0.05)  # time for one step too many

    made, learner, recorded, evaluated = coordinator(job(evaluation=plan), actors, during_evaluation=two_steps)

    async def step(batch: Sequence[ScoredGroup], *, version: int, **options: Any) -> StepReport:
        if (under := made.pinned.version) is not None:
            steps_ahead[under] = max(steps_ahead.get(under, 0), version + 1 - under)
        return await FakeLearner.step(learner, batch, version=version, **options)

    async def begin_publish(version: int) -> None:
        ahead_of_actors.add(version - actors.version)

    ahead_of_actors: set[int] = set()
    learner.step, learner.begin_publish = step, begin_publish  # type: ignore[method-assign]
    assert await made.run()
    assert evaluated == [0, 5, 10, 15, 20, 25]
    assert ahead_of_actors == {1}, "the object store has room for two versions"
    assert steps_ahead == {0: 2, 5: 2, 10: 2, 15: 2, 20: 2}
    assert max(learner.lags) <= 2
    assert [finished.step for finished in recorded.steps] == list(range(25))


async def test_without_lag_the_learner_waits_for_an_evaluation_beyond_every_bound() -> None:
    plan = {"data": {"path": "held"}, "every": 1, "sampling": {"n": 8}, "ks": [1, 8]}
    brief = {"group_deadline_s": 0.1, "start_deadline_s": 0.05}
    deadlines = {"actors": brief, "reward_workers": brief}
    spec = job(max_lag=0, steps=3, evaluation=plan, **deadlines)
    made, learner, _, evaluated = coordinator(
        spec, FakeActors(random.Random(0), slowest=0.001), during_evaluation=lambda _: asyncio.sleep(0.5)
    )
    assert await made.run()
    assert evaluated == [0, 1, 2, 3]
    assert set(learner.lags) == {0}


async def test_a_checkpoint_is_written_after_the_evaluation_of_its_version() -> None:
    plan = {"data": {"path": "h"}, "every": 10}
    spec = job(evaluation=plan, checkpoint={"every": 10})
    seen: list[tuple[int, list[int]]] = []

    def watched(save: Checkpoint) -> Checkpoint:
        async def checkpoint(step: int, state: dict[str, Any], ready: list[ReadyGroup]) -> None:
            seen.append((step, list(evaluated)))
            await save(step, state, ready)

        return checkpoint

    made, _, _, evaluated = coordinator(spec, FakeActors(random.Random(0)), on_checkpoint=watched)
    await made.run()
    assert seen == [(10, [0, 10]), (20, [0, 10, 20]), (25, [0, 10, 20, 25])]


async def test_steps_go_on_while_a_checkpoint_is_stored_and_the_run_ends_after_it() -> None:
    async def three_steps(step: int) -> None:
        await until(lambda: made.version >= min(step + 3, 25))

    actors = FakeActors(random.Random(0), slowest=0.001)
    made, learner, recorded, _ = coordinator(job(checkpoint={"every": 10}), actors, while_storing=three_steps)
    assert await made.run()
    assert [step for step, _ in recorded.stored] == [10, 20, 25]
    assert all(version >= min(step + 3, 25) for step, version in recorded.stored)
    assert len(learner.trained) == 100


async def test_a_checkpoint_that_cannot_be_stored_ends_the_run() -> None:
    made, learner, _, _ = coordinator(job(checkpoint={"every": 10}), FakeActors(random.Random(0), slowest=0.001))

    async def broken() -> None:
        await asyncio.sleep(0.01)
        raise HostError("checkpoint step-10: read-only file system")

    made.hooks = replace(made.hooks, checkpoint_stored=broken)
    with pytest.raises(HostError, match="read-only"):
        await made.run()
    assert len(learner.trained) < 100


async def test_a_resumed_run_has_the_solve_rates_of_its_checkpoint() -> None:
    spec = job(schedule={"adaptive_k": {}}, checkpoint={"every": 10}, max_lag=0)
    made, _, recorded, _ = coordinator(spec, FakeActors(random.Random(0)))
    await made.run()
    point = ResumePoint.of(*recorded.checkpoints[0])
    assert {prompt: rate.value for prompt, rate in point.solve_rates.items()} == {f"p{i}": 0.25 for i in range(10)}
