"""The real coordinator loops with small fakes at the three heavy seams: engine, scorer, learner."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.config import ActorUpdate, BroadcastReport, GenerateRequest
from learner.records import ScoredGroup, StepReport
from services.coordinator.buffer import SlotBuffer
from services.coordinator.loop import Coordinator
from services.coordinator.records import FinishedStep, Hooks, ReadyGroup, ResumePoint
from services.coordinator.roles import Roles
from services.data.tokens import EncodedPrompt
from volley.errors import DeadlineExceeded, JobError, NoSignal, ServedWeightsDiffer, WorkerDied
from volley.job import RLJob
from volley.objectives import MaxAtK, Objective
from volley.records import GroupMeta, Prompt, Scores, Verdict, VerdictStatus, WeightUpdate
from volley.state import Desired

Checkpoint = Callable[[int, dict[str, Any], list[ReadyGroup]], Awaitable[None]]


@dataclass
class FakeActors:
    """Takes a random time to generate, and another to take new weights."""

    rng: random.Random
    slowest: float = 0.004
    version: int = 0
    asked: list[int] = field(default_factory=list)
    fails_at: int | None = None
    hangs_at: int | None = None

    async def generate(self, request: GenerateRequest) -> tuple[Any, GroupMeta]:
        started = self.version
        self.asked.append(request.group_id)
        if request.group_id == self.fails_at:
            raise WorkerDied("actor-0", "killed by signal 9")
        if request.group_id == self.hangs_at:
            await asyncio.sleep(3600)
        await asyncio.sleep(self.rng.random() * self.slowest)
        n, versions = request.n, (started, self.version)
        meta = GroupMeta(request.group_id, request.prompt_id, "actor-0", n, 3, 8, -8.0, *versions, 0, 0.0, n)
        return f"ref {request.group_id}", meta

    async def broadcast(self, update: WeightUpdate) -> BroadcastReport:
        await asyncio.sleep(self.rng.random() * self.slowest)
        self.version = update.version
        return BroadcastReport(update.version, (ActorUpdate("actor-0", update.version, 1, 0.0, 0.0, 0.0),), 0.0)


@dataclass
class FakeRewards:
    """One sample of four passes; ``unscored`` says for which prompts scoring fails."""

    unscored: Callable[[str], bool] = lambda _prompt: False

    async def score(self, group: Any, prompt: Prompt) -> Scores:
        if self.unscored(prompt.id):
            return Scores.pack([Verdict(VerdictStatus.INFRA_ERROR, None, detail="boom")] * 4)
        return Scores.pack(
            [Verdict(VerdictStatus.PASSED, 1.0), *[Verdict(VerdictStatus.WRONG_ANSWER, 0.0, answer="x")] * 3]
        )


@dataclass
class FakeLearner:
    """Takes a moment for each step, and remembers the lag of every group and the options of every step."""

    live: float = 1.0
    clipped: float = 0.0
    lags: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    options: list[tuple[Objective | None, float | None, int | None]] = field(default_factory=list)

    async def step(
        self,
        batch: Sequence[ScoredGroup],
        *,
        version: int,
        objective: Objective | None = None,
        learning_rate: float | None = None,
        max_lag: int | None = None,
    ) -> StepReport:
        self.options.append((objective, learning_rate, max_lag))
        await asyncio.sleep(0.001)
        self.lags += [version - scored.meta.oldest_version for scored in batch]
        self.trained += [scored.meta.group_id for scored in batch]
        return StepReport(
            metrics={"live_group_fraction": self.live, "clipped_share": self.clipped, "grad_norm": 3.0},
            lag_histogram={},
            advantages={},
            dropped={},
        )

    async def begin_publish(self, version: int) -> None:
        await asyncio.sleep(0)

    async def published(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, (), None, 0.0)

    async def save(self, folder: Path, extra: Mapping[str, Any], files: Mapping[str, bytes] | None = None) -> None:
        raise AssertionError("the coordinator does not save")


@dataclass
class Recorded:
    steps: list[FinishedStep] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    checkpoints: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    ready: list[ReadyGroup] = field(default_factory=list)
    served_checks: list[int] = field(default_factory=list)

    async def step(self, finished: FinishedStep) -> None:
        self.steps.append(finished)

    async def event(self, kind: str, **details: Any) -> None:
        self.events.append(kind)

    async def dropped(self, group_id: int, prompt_id: str, step: int, reason: str, detail: str) -> None:
        self.events.append("group_dropped")


def job(**changes: Any) -> RLJob:
    return RLJob.model_validate(
        {
            "name": "fake",
            "steps": 25,
            "prompts_per_step": 4,
            "max_lag": 2,
            "sampling": {"n": 4},
            "model": {"path": "m"},
            "data": {"path": "d"},
            "scorer": {"kind": "countdown"},
            "objective": {"kind": "max_at_k", "k": 2},
            **changes,
        }
    )


def coordinator(
    spec: RLJob,
    actors: FakeActors,
    rewards: FakeRewards | None = None,
    learner: FakeLearner | None = None,
    resume: ResumePoint | None = None,
    desired: Desired | None = None,
    evaluation_seconds: float = 0.0,
    stop_requested: asyncio.Event | None = None,
    on_checkpoint: Callable[[Checkpoint], Checkpoint] | None = None,
) -> tuple[Coordinator, FakeLearner, Recorded, list[int]]:
    learner, recorded, evaluated = learner or FakeLearner(), Recorded(), []

    async def evaluate(version: int) -> None:
        assert actors.version == version, "the actors serve the evaluated version"
        await asyncio.sleep(evaluation_seconds)
        assert actors.version == version, "until the evaluation ends"
        evaluated.append(version)

    async def checkpoint(step: int, state: dict[str, Any], ready: list[ReadyGroup]) -> None:
        done = resume.step if resume else 0
        assert len(learner.trained) == (step - done) * spec.prompts_per_step, "a checkpoint is written between steps"
        assert [finished.step for finished in recorded.steps] == list(range(done, step)), "after the rows of its steps"
        recorded.checkpoints.append((step, json.loads(json.dumps(state))))
        recorded.ready = ready

    async def check_served() -> float:
        assert actors.version == made.version, "actors and learner hold the same version"
        recorded.served_checks.append(made.version)
        return 1e-6 * made.version

    prompts = [EncodedPrompt(Prompt(f"p{i}", "x"), np.arange(3, dtype=np.int32)) for i in range(10)]
    made = Coordinator(
        spec,
        prompts,
        Roles(actors, rewards or FakeRewards(), learner),
        Hooks(recorded, evaluate, on_checkpoint(checkpoint) if on_checkpoint else checkpoint, check_served),
        resume=resume,
        desired=desired,
        stop_requested=stop_requested,
    )
    return made, learner, recorded, evaluated


@pytest.mark.parametrize(
    ("changes", "seconds", "earliest"),
    [
        ({}, 0.0, 1),
        ({"steps": 1}, 0.0, 1),
        ({"evaluation": {"data": {"path": "h"}}}, 0.3, 2),  # the learner does not wait for the start's evaluation
        ({"steps": 1, "evaluation": {"data": {"path": "h"}}}, 0.3, 1),
    ],
)
async def test_what_the_actors_serve_is_checked_after_the_first_update(
    changes: dict[str, Any], seconds: float, earliest: int
) -> None:
    spec = job(**changes, checkpoint={"every": None})
    made, _, recorded, _ = coordinator(spec, FakeActors(random.Random(0)), evaluation_seconds=seconds)
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

    made.hooks = replace(made.hooks, check_served=differ)
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


async def test_objective_and_learning_rate_change_while_the_run_is_live() -> None:
    made, learner, recorded, _ = coordinator(job(max_lag=0), FakeActors(random.Random(0)))
    run = asyncio.create_task(made.run())
    await _until(lambda: made.version >= 9)
    await made.apply(Desired(revision=1, objective={"k": 4}, learning_rate=0.5))
    changed_at = made.version
    await asyncio.wait_for(run, 10)
    ks = [objective.k or 0 for objective, _, _ in learner.options if isinstance(objective, MaxAtK)]
    assert ks in ([2] * at + [4] * (25 - at) for at in (changed_at, changed_at + 1))
    assert [rate for _, rate, _ in learner.options] == [None if k == 2 else 0.5 for k in ks]
    assert recorded.events == ["objective_changed"]


async def test_a_paused_run_admits_nothing_and_continues_when_it_is_unpaused() -> None:
    brief = {"group_deadline_s": 0.15, "start_deadline_s": 0.1}
    spec = job(actors=brief, reward_workers=brief)
    made, learner, _, _ = coordinator(spec, FakeActors(random.Random(0)))
    run = asyncio.create_task(made.run())
    await _until(lambda: made.version >= 5)
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
    await _until(lambda: made.version >= 5)
    await made.apply(Desired(revision=1, paused=True))
    await _until(lambda: "learner" in made.waits)
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
        spec, actors, stop_requested=stop_requested, evaluation_seconds=3600
    )
    run = asyncio.create_task(made.run())
    await _until(lambda: made.pinned.version == version and "learner" in made.waits)
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


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_resuming_a_stopped_run_loses_and_repeats_no_group(max_lag: int) -> None:
    spec = job(max_lag=max_lag)
    made, learner, recorded, _ = coordinator(spec, FakeActors(random.Random(0)))
    run = asyncio.create_task(made.run())
    await _until(lambda: made.version >= 7)
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
    await _until(lambda: made.version >= 10)
    assert max(learner.lags) == 0
    await made.apply(Desired(max_lag=3))
    await _until(lambda: made.version >= 30)
    assert 0 < max(learner.lags) <= 3
    await made.apply(Desired(max_lag=0))
    await _until(lambda: made.version >= 45)  # the groups admitted before have ended by now
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
    await _until(lambda: "paused" in recorded.events)
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


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - there is no event for every state
            await asyncio.sleep(0.001)


async def test_training_continues_while_a_version_is_evaluated() -> None:
    plan = {"data": {"path": "held"}, "every": 5, "sampling": {"n": 8}, "ks": [1, 8]}
    actors = FakeActors(random.Random(0), slowest=0.001)
    made, learner, recorded, evaluated = coordinator(job(evaluation=plan), actors, evaluation_seconds=0.2)
    steps_ahead: dict[int, int] = {}

    async def step(batch: Sequence[ScoredGroup], *, version: int, **options: Any) -> StepReport:
        if (under := made.pinned.version) is not None:
            steps_ahead[under] = max(steps_ahead.get(under, 0), version + 1 - under)
        return await FakeLearner.step(learner, batch, version=version, **options)

    learner.step = step  # type: ignore[method-assign]
    assert await made.run()
    assert evaluated == [0, 5, 10, 15, 20, 25]
    # The weights of one step wait to be sent while the next step is taken.
    assert steps_ahead == {0: 2, 5: 2, 10: 2, 15: 2, 20: 2}
    assert max(learner.lags) <= 2
    assert [finished.step for finished in recorded.steps] == list(range(25))


async def test_without_lag_the_learner_waits_for_an_evaluation_beyond_every_bound() -> None:
    plan = {"data": {"path": "held"}, "every": 1, "sampling": {"n": 8}, "ks": [1, 8]}
    brief = {"group_deadline_s": 0.03, "start_deadline_s": 0.02}
    deadlines = {"actors": brief, "reward_workers": brief}
    spec = job(max_lag=0, steps=3, evaluation=plan, **deadlines)
    made, learner, _, evaluated = coordinator(spec, FakeActors(random.Random(0), slowest=0.001), evaluation_seconds=0.5)
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


async def test_a_resumed_run_has_the_solve_rates_of_its_checkpoint() -> None:
    spec = job(schedule={"adaptive_k": {}}, checkpoint={"every": 10}, max_lag=0)
    made, _, recorded, _ = coordinator(spec, FakeActors(random.Random(0)))
    await made.run()
    point = ResumePoint.of(*recorded.checkpoints[0])
    assert {prompt: rate.value for prompt, rate in point.solve_rates.items()} == {f"p{i}": 0.25 for i in range(10)}
