"""The real coordinator loops with small fakes at the three heavy seams: engine, scorer, learner."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.config import ActorUpdate, BroadcastReport, GenerateRequest
from learner.records import ScoredGroup, StepReport
from services.buffer import SlotBuffer
from services.coordinator import Coordinator
from services.state import Desired
from services.steps import FinishedStep, ReadyGroup, ResumePoint
from services.tokens import EncodedPrompt
from volley.errors import DeadlineExceeded, NoSignal, WorkerDied
from volley.job import RLJob
from volley.objectives import MaxAtK, Objective
from volley.records import GroupMeta, Prompt, Scores, Verdict, VerdictStatus, WeightUpdate


@dataclass
class FakeActors:
    """Generates in a random time; serves new weights after another."""

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
    """Right and wrong by turns; ``unscored`` says for which prompts scoring fails."""

    unscored: Callable[[str], bool] = lambda _prompt: False

    async def score(self, group: Any, prompt: Prompt) -> Scores:
        if self.unscored(prompt.id):
            return Scores.pack([Verdict(VerdictStatus.INFRA_ERROR, None, detail="boom")] * 4)
        return Scores.pack(
            [Verdict(VerdictStatus.PASSED, 1.0), *[Verdict(VerdictStatus.WRONG_ANSWER, 0.0, answer="x")] * 3]
        )


@dataclass
class FakeLearner:
    """Takes a moment for each step; remembers the lag of every group it was given."""

    live: float = 1.0
    lags: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    told: list[tuple[Objective | None, float | None, int | None]] = field(default_factory=list)

    async def step(
        self,
        batch: Sequence[ScoredGroup],
        *,
        version: int,
        objective: Objective | None = None,
        learning_rate: float | None = None,
        max_lag: int | None = None,
    ) -> StepReport:
        self.told.append((objective, learning_rate, max_lag))
        await asyncio.sleep(0.001)
        self.lags += [version - scored.meta.oldest_version for scored in batch]
        self.trained += [scored.meta.group_id for scored in batch]
        return StepReport(metrics={"live_group_fraction": self.live}, lag_histogram={}, advantages={}, dropped={})

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
    ending: asyncio.Event | None = None,
) -> tuple[Coordinator, FakeLearner, Recorded, list[int]]:
    learner, recorded, evaluated = learner or FakeLearner(), Recorded(), []

    async def evaluate(version: int) -> None:
        assert actors.version == version, "evaluation is of one version"
        await asyncio.sleep(evaluation_seconds)
        assert actors.version == version, "from its beginning to its end"
        evaluated.append(version)

    async def checkpoint(step: int, state: dict[str, Any], ready: list[ReadyGroup]) -> None:
        done = resume.step if resume else 0
        assert len(learner.trained) == (step - done) * spec.prompts_per_step, "between steps"
        assert [finished.step for finished in recorded.steps] == list(range(done, step)), "the rows of its steps"
        recorded.checkpoints.append((step, json.loads(json.dumps(state))))
        recorded.ready = ready

    prompts = [EncodedPrompt(Prompt(f"p{i}", "x"), np.arange(3, dtype=np.int32)) for i in range(10)]
    made = Coordinator(
        spec,
        prompts,
        actors=actors,
        rewards=rewards or FakeRewards(),
        learner=learner,
        recorder=recorded,
        evaluate=evaluate,
        checkpoint=checkpoint,
        resume=resume,
        desired=desired,
        ending=ending,
    )
    return made, learner, recorded, evaluated


@pytest.mark.parametrize("max_lag", [0, 1, 2, 5])
async def test_every_step_is_trained_within_the_lag_and_the_ledger_is_exact(max_lag: int) -> None:
    actors = FakeActors(random.Random(max_lag))
    made, learner, recorded, _ = coordinator(job(max_lag=max_lag), actors)
    await made.run()
    assert [finished.step for finished in recorded.steps] == list(range(25))
    assert max(learner.lags) <= max_lag
    assert (max(learner.lags) > 0) == (max_lag > 0), "asynchronous mode overlaps, synchronous mode does not"
    assert sorted(learner.trained) == list(range(100)), "each group once"
    assert made.ledger.counts() == {"admitted": 100, "trained": 100, "dropped": 0, "in_flight": 0}
    assert actors.version == 25


async def test_a_group_that_can_not_be_scored_is_dropped_and_replaced() -> None:
    rewards = FakeRewards(unscored=lambda prompt: prompt == "p3")
    made, learner, recorded, _ = coordinator(job(), FakeActors(random.Random(0)), rewards)
    await made.run()
    counts = made.ledger.counts()
    assert counts["trained"] == 100
    assert counts["dropped"] == recorded.events.count("group_dropped") >= 9
    assert made.ledger.dropped == {"0 of 4 samples could be scored": counts["dropped"]}
    assert len(set(learner.trained)) == 100


async def test_a_drop_that_makes_a_batch_possible_wakes_the_learner() -> None:
    """With the last group it waited for gone, the batch is there: no further group is needed."""
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


async def test_evaluations_are_at_the_start_every_so_often_and_at_the_end() -> None:
    plan = {"data": {"path": "h"}, "every": 10}
    made, _, _, evaluated = coordinator(job(evaluation=plan), FakeActors(random.Random(0)))
    await made.run()
    assert evaluated == [0, 10, 20, 25]


async def test_a_dead_actor_ends_the_run_with_its_name() -> None:
    made, _, _, _ = coordinator(job(), FakeActors(random.Random(0), fails_at=17))
    with pytest.raises(WorkerDied, match="actor-0 died: killed by signal 9"):
        await asyncio.wait_for(made.run(), 10)


async def test_a_wait_is_bounded_and_names_the_group_it_was_for() -> None:
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


async def test_seeds_of_groups_differ_and_repeat() -> None:
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
async def test_a_resumed_run_trains_what_is_left_and_nothing_twice(max_lag: int) -> None:
    spec = job(checkpoint={"every": 10}, max_lag=max_lag)
    made, learner, recorded, _ = coordinator(spec, FakeActors(random.Random(0)))
    await made.run()
    step, state = recorded.checkpoints[0]
    before = learner.trained[: step * spec.prompts_per_step]
    point = ResumePoint.of(step, state)
    actors = FakeActors(random.Random(1), version=step)
    again, learner, recorded, _ = coordinator(spec, actors, resume=point)
    await again.run()
    assert sorted(before + learner.trained) == list(range(100)), "each group once over both lives"
    assert [finished.step for finished in recorded.steps] == list(range(10, 25))
    assert max(learner.lags) <= max_lag
    assert again.ledger.counts() == {"admitted": 100, "trained": 100, "dropped": 0, "in_flight": 0}


async def test_the_objective_follows_its_schedule_and_k_adapts_to_the_prompt() -> None:
    seen: list[tuple[int, set[int | None]]] = []

    class Watching(FakeLearner):
        async def step(self, batch: Sequence[ScoredGroup], **told: Any) -> StepReport:
            assert isinstance(told["objective"], MaxAtK)
            seen.append((told["objective"].k, {scored.k for scored in batch}))
            return await super().step(batch, **told)

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


async def test_objective_and_learning_rate_change_while_the_run_is_live() -> None:
    made, learner, recorded, _ = coordinator(job(max_lag=0), FakeActors(random.Random(0)))
    run = asyncio.create_task(made.run())
    await _until(lambda: made.version >= 9)
    await made.want(Desired(revision=1, objective={"k": 4}, learning_rate=0.5))
    changed_at = made.version
    await asyncio.wait_for(run, 10)
    ks = [objective.k for objective, _, _ in learner.told if isinstance(objective, MaxAtK)]
    assert ks in ([2] * at + [4] * (25 - at) for at in (changed_at, changed_at + 1))
    assert [rate for _, rate, _ in learner.told] == [None if k == 2 else 0.5 for k in ks]
    assert recorded.events == ["objective_changed"]


async def test_a_paused_run_admits_nothing_and_goes_on_when_it_may() -> None:
    brief = {"group_deadline_s": 0.03, "start_deadline_s": 0.02}
    spec = job(actors=brief, reward_workers=brief)
    made, learner, _, _ = coordinator(spec, FakeActors(random.Random(0)))
    run = asyncio.create_task(made.run())
    await _until(lambda: made.version >= 5)
    for wanted in (Desired(paused=True), Desired(actors=0)):
        await made.want(wanted)
        await asyncio.sleep(0.2)  # longer than the bound of every wait: a pause is no hang
        admitted, version = made.ledger.admitted, made.version
        assert made.held
        await asyncio.sleep(0.1)
        assert (made.ledger.admitted, made.version) == (admitted, version)
    assert any("the run is held, no actors are desired" in words for words in made.waits.words(0))
    await made.want(Desired())
    assert await asyncio.wait_for(run, 10)
    assert sorted(learner.trained) == list(range(100))


async def test_a_run_told_to_end_does_so_at_a_checkpoint_whatever_holds_it() -> None:
    ending = asyncio.Event()
    made, learner, recorded, _ = coordinator(job(), FakeActors(random.Random(0)), ending=ending)
    run = asyncio.create_task(made.run())
    await _until(lambda: made.version >= 5)
    await made.want(Desired(revision=1, paused=True))
    await _until(lambda: "learner" in made.waits)
    ending.set()
    assert not await asyncio.wait_for(run, 5)
    ((step, _),) = recorded.checkpoints
    assert len(learner.trained) == step * 4


@pytest.mark.parametrize(
    ("plan", "version"),
    [({"every": 10}, 0), ({"every": 10, "at_start": False}, 10), ({"at_start": False}, 25)],
    ids=["the first", "one between", "the last"],
)
async def test_an_evaluation_does_not_hold_up_the_end_and_is_made_by_the_resumed_run(
    plan: dict[str, Any], version: int
) -> None:
    spec, ending, actors = (
        job(evaluation={"data": {"path": "h"}, **plan}),
        asyncio.Event(),
        FakeActors(random.Random(0)),
    )
    made, learner, recorded, evaluated = coordinator(spec, actors, ending=ending, evaluation_seconds=3600)
    run = asyncio.create_task(made.run())
    await _until(lambda: made.pinned.version == version and "learner" in made.waits)
    ending.set()
    assert not await asyncio.wait_for(run, 5), "it is not done: an evaluation is missing"
    assert not evaluated
    ((step, state),) = recorded.checkpoints
    assert version <= step <= version + 2, "the learner went on while it could"
    before = list(learner.trained)
    again, learner, _, evaluated = coordinator(spec, actors, resume=ResumePoint.of(step, state, recorded.ready))
    assert await again.run()
    assert evaluated == [step, *(due for due in (10, 20, 25) if due > step)]
    assert sorted(before + learner.trained) == list(range(100))


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_a_stopped_run_ends_at_a_checkpoint_from_which_nothing_is_lost_or_repeated(max_lag: int) -> None:
    spec = job(max_lag=max_lag)
    made, learner, recorded, _ = coordinator(spec, FakeActors(random.Random(0)))
    run = asyncio.create_task(made.run())
    await _until(lambda: made.version >= 7)
    await made.want(Desired(stopped=True))
    assert not await asyncio.wait_for(run, 10)
    ((step, state),) = recorded.checkpoints
    assert 7 <= step < 25
    before, kept = list(learner.trained), [ready.meta.group_id for ready in recorded.ready]
    actors = FakeActors(random.Random(1), version=step)
    point = ResumePoint.of(step, state, recorded.ready)
    again, learner, _, _ = coordinator(spec, actors, resume=point)
    assert await again.run()
    assert sorted(before + learner.trained) == list(range(100))
    assert not set(kept) & set(actors.asked), "what was ready is not generated again"
    assert max(learner.lags) <= max_lag


async def test_the_lag_bound_changes_while_the_run_is_live() -> None:
    made, learner, _, _ = coordinator(job(steps=60, max_lag=0), FakeActors(random.Random(0)))
    run = asyncio.create_task(made.run())
    await _until(lambda: made.version >= 10)
    assert max(learner.lags) == 0
    await made.want(Desired(max_lag=3))
    await _until(lambda: made.version >= 30)
    assert 0 < max(learner.lags) <= 3
    await made.want(Desired(max_lag=0))
    await _until(lambda: made.version >= 45)  # those admitted before are gone by now
    fresh = len(learner.lags)
    await asyncio.wait_for(run, 10)
    assert max(learner.lags[fresh:]) == 0
    assert sorted(learner.trained) == list(range(240))


async def test_a_scorer_that_fails_pauses_the_run_until_it_is_mended() -> None:
    broken = [True]
    rewards = FakeRewards(unscored=lambda _prompt: broken[0])
    spec = job(infra_errors={"window": 4, "probe_every_s": 0.05})
    made, learner, recorded, _ = coordinator(spec, FakeActors(random.Random(0)), rewards)
    run = asyncio.create_task(made.run())
    await _until(lambda: "paused" in recorded.events)
    assert "100% of the samples of the last 4 groups could not be scored, the last because: boom" in made.held
    dropped = made.ledger.counts()["dropped"]
    await asyncio.sleep(1.0)
    assert made.ledger.counts()["dropped"] - dropped <= made.buffer.slots + 4, "while paused, groups are only probed"
    broken[0] = False
    await asyncio.wait_for(run, 20)
    assert recorded.events[-1] == "unpaused"
    assert not made.held
    assert len(learner.trained) == 100


async def test_a_scorer_that_never_scores_ends_the_run_and_says_why() -> None:
    rewards = FakeRewards(unscored=lambda _prompt: True)
    spec = job(infra_errors={"window": 4, "give_up_s": 0})
    made, learner, _, _ = coordinator(spec, FakeActors(random.Random(0)), rewards)
    with pytest.raises(NoSignal, match=r"could not be scored for 0 s .* the last because: boom"):
        await asyncio.wait_for(made.run(), 10)
    assert learner.trained == []


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - there is no event for every state
            await asyncio.sleep(0.001)


async def test_training_goes_on_while_a_version_is_evaluated() -> None:
    plan = {"data": {"path": "held"}, "every": 5, "sampling": {"n": 8}, "ks": [1, 8]}
    actors = FakeActors(random.Random(0), slowest=0.001)
    made, learner, recorded, evaluated = coordinator(job(evaluation=plan), actors, evaluation_seconds=0.2)
    ahead: dict[int, int] = {}

    async def step(batch: Sequence[ScoredGroup], *, version: int, **told: Any) -> StepReport:
        if (under := made.pinned.version) is not None:
            ahead[under] = max(ahead.get(under, 0), version + 1 - under)
        return await FakeLearner.step(learner, batch, version=version, **told)

    learner.step = step  # type: ignore[method-assign]
    assert await made.run()
    assert evaluated == [0, 5, 10, 15, 20, 25]
    assert ahead == {0: 2, 5: 2, 10: 2, 15: 2, 20: 2}  # one step's weights wait to be sent, and the next is learned
    assert max(learner.lags) <= 2
    assert [finished.step for finished in recorded.steps] == list(range(25))


async def test_without_lag_the_learner_waits_for_an_evaluation_however_long() -> None:
    plan = {"data": {"path": "held"}, "every": 1, "sampling": {"n": 8}, "ks": [1, 8]}
    brief = {"group_deadline_s": 0.03, "start_deadline_s": 0.02}
    deadlines = {"actors": brief, "reward_workers": brief}
    spec = job(max_lag=0, steps=3, evaluation=plan, **deadlines)
    made, learner, _, evaluated = coordinator(spec, FakeActors(random.Random(0), slowest=0.001), evaluation_seconds=0.5)
    assert await made.run()
    assert evaluated == [0, 1, 2, 3]
    assert set(learner.lags) == {0}


async def test_a_checkpoint_comes_after_the_evaluation_of_its_version() -> None:
    plan = {"data": {"path": "h"}, "every": 10}
    spec = job(evaluation=plan, checkpoint={"every": 10})
    made, _, _, evaluated = coordinator(spec, FakeActors(random.Random(0)))
    seen: list[tuple[int, list[int]]] = []
    save = made.checkpoint

    async def watched(step: int, state: dict[str, Any], ready: list[ReadyGroup]) -> None:
        seen.append((step, list(evaluated)))
        await save(step, state, ready)

    made.checkpoint = watched
    await made.run()
    assert seen == [(10, [0, 10]), (20, [0, 10, 20]), (25, [0, 10, 20, 25])]


async def test_solve_rates_are_taken_up_again() -> None:
    spec = job(schedule={"adaptive_k": {}}, checkpoint={"every": 10}, max_lag=0)
    made, _, recorded, _ = coordinator(spec, FakeActors(random.Random(0)))
    await made.run()
    point = ResumePoint.of(*recorded.checkpoints[0])
    assert {prompt: rate.value for prompt, rate in point.solve_rates.items()} == {f"p{i}": 0.25 for i in range(10)}
