"""The replacement of dead groups: which groups a batch has, and how large its step is."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest

from actors.config import GenerateRequest
from learner.records import ScoredGroup, StepReport
from services.coordinator.admission import Admission
from services.coordinator.buffer import SlotBuffer
from services.coordinator.ledger import Ledger
from services.coordinator.records import ReadyGroup, ResumePoint
from services.coordinator.refill import REPLACED, step_weight
from tests.unit.fake_roles import FakeActors, FakeLearner, FakeRewards, Recorded, coordinator, job, until
from tests.unit.ready_groups import ready, scores_of
from volley.job import RLJob
from volley.objectives import Objective, advantages
from volley.records import GroupMeta, Prompt, Scores
from volley.state import Desired


def small_job(prompts: int, refill: float, **changes: Any) -> RLJob:
    return job(prompts_per_step=prompts, sampling={"n": 4, "refill": refill}, max_lag=0, **changes)


def finish_all(spec: RLJob, live: Sequence[bool], order: Sequence[int]) -> tuple[tuple[int, ...], int, float]:
    """The ids of the first batch, the groups made for it and its weight, if group i is live as ``live[i]`` says.

    Args:
        order: of the groups under way, the first in this order finishes first.
    """
    buffer: SlotBuffer[ReadyGroup] = SlotBuffer(spec.prompts_per_step, 0)
    resume = ResumePoint.start()
    made = Admission(spec, resume.ledger, buffer, resume, lambda group: not live[group.meta.group_id])
    under_way: set[int] = set()
    while True:
        while made.may_admit(Desired(), served=0, version=0):
            under_way.add(made.admit(served=0))
        if not under_way:
            break
        first = next(group_id for group_id in order if group_id in under_way)
        under_way.remove(first)
        group = ready([1.0, 0.0], group_id=first)
        made.scored(first, group.scores)
        made.ready(group)
    batch = made.take(0)
    assert batch is not None
    ledger = resume.ledger
    assert ledger.dropped[REPLACED] == len(batch.replaced) == made.refills == ledger.dead
    assert ledger.in_flight == {group.meta.group_id for group in batch.groups}
    assert not any(live[group.meta.group_id] for group in batch.replaced)
    ledger.check()
    return tuple(group.meta.group_id for group in batch.groups), ledger.admitted, batch.weight


@pytest.mark.parametrize(("prompts", "refill"), [(2, 0.5), (2, 1.0), (2, 1.5), (3, 0.67)])
def test_the_batch_does_not_depend_on_which_groups_finish_first(prompts: int, refill: float) -> None:
    spec, most = small_job(prompts, refill), prompts + int(refill * prompts)
    for live in product((False, True), repeat=most):
        found = {finish_all(spec, live, order) for order in permutations(range(most))}
        assert len(found) == 1
        ((ids, admitted, _),) = found
        assert len(ids) == prompts
        assert admitted == most or sum(live[:admitted]) == prompts, "until all are live, or the limit"
        assert {i for i in range(admitted) if live[i]} <= set(ids)


@pytest.mark.parametrize(("prompts", "refill"), [(2, 0.5), (2, 2.0), (3, 1.0), (4, 0.5)])
def test_the_expected_step_is_that_of_a_batch_without_refill(prompts: int, refill: float) -> None:
    """Exactly, over all outcomes; a live group's gradient is 1 or 4, and its divisor the learner's, P."""
    spec, most = small_job(prompts, refill), prompts + int(refill * prompts)
    chances = {0: Fraction(1, 2), 1: Fraction(1, 3), 4: Fraction(1, 6)}
    expected = sum(gradient * chance for gradient, chance in chances.items())
    total = Fraction(0)
    for gradients in product(chances, repeat=most):
        ids, admitted, weight = finish_all(spec, [gradient != 0 for gradient in gradients], range(most))
        exact = Fraction(weight).limit_denominator(1000)
        assert float(exact) == pytest.approx(weight, rel=1e-15)
        chance = prod(chances[gradient] for gradient in gradients)
        total += chance * exact * Fraction(sum(gradients[i] for i in ids), prompts)
        assert admitted <= most
    assert total == expected


def test_a_batch_without_replaced_groups_has_the_usual_step() -> None:
    assert step_weight(4, live=4, replaced=0) == step_weight(4, live=1, replaced=0) == 1.0
    assert step_weight(4, live=4, replaced=2) == 3 / 5
    assert step_weight(4, live=3, replaced=2) == 4 / 6


def test_groups_aside_count_again_in_a_resumed_run_and_do_not_count_as_planned() -> None:
    spec = small_job(2, 0.5, steps=2)
    ledger = Ledger(admitted=3, in_flight={0, 1, 2})
    waiting = (ready([1.0, 1.0], group_id=0), ready([1.0, 0.0], group_id=1))
    resume = ResumePoint(0, ledger, 0, 0, {}, waiting, aside=frozenset({0}))
    buffer: SlotBuffer[ReadyGroup] = SlotBuffer(2, 0)
    made = Admission(spec, ledger, buffer, resume, lambda _: False)
    assert (made.finished, buffer.ready, len(buffer)) == (2, 1, 1)
    assert [group.meta.group_id for group in made.waiting()] == [0, 1]
    assert made.admit(served=0) == 2, "the interrupted group, which is group 0's replacement"
    assert not made.may_admit(Desired(), served=0, version=0)


def test_a_resumed_run_takes_the_batch_that_it_would_have_taken() -> None:
    """Which groups were dead is in the checkpoint, whatever the objective says of them when the run is resumed."""
    spec = small_job(2, 0.5, steps=2)
    live = (False, False, True)

    def admission(resume: ResumePoint, is_dead: Callable[[ReadyGroup], bool]) -> Admission:
        return Admission(spec, resume.ledger, SlotBuffer(2, 0), resume, is_dead)

    made = admission(ResumePoint.start(), lambda group: not live[group.meta.group_id])
    for group_id in range(3):
        assert made.admit(served=0) == group_id
        made.scored(group_id, scores_of([1.0, 0.0]))
        made.ready(ready([1.0, 0.0], group_id=group_id))
    state = json.loads(json.dumps(made.state()))
    assert state == {"refills": 0, "aside": [0], "dead": [1]}
    ledger = Ledger(admitted=3, in_flight={0, 1, 2})
    known = {"ledger": ledger.state(), "solve_rates": {}, "dead_batches": 0, **state}
    again = admission(ResumePoint.of(0, known, made.waiting()), lambda _: False)
    assert again.state() == state
    assert again.take(0) == made.take(0) is not None


# ---- whole runs ------------------------------------------------------------------------------------------------


@dataclass
class SomeDead(FakeRewards):
    """Groups whose id leaves a small remainder are dead, whichever prompt they have."""

    live_of_ten: int = 6

    async def score(self, group: Any, prompt: Prompt) -> Scores:
        group_id = int(str(group).removeprefix("ref "))
        live = (group_id * 7 + group_id // 10) % 10 < self.live_of_ten
        return scores_of([1.0, 0.0, 0.0, 0.0] if live else [0.0, 0.0, 0.0, 0.0])


@dataclass
class Watching(FakeLearner):
    """Remembers what it was given, and reports real advantages."""

    batches: list[tuple[list[tuple[int, str]], float]] = field(default_factory=list)

    async def step(self, batch: Sequence[ScoredGroup], **options: Any) -> StepReport:
        report = await super().step(batch, **options)
        objective: Objective = options["objective"]
        found = {scored.meta.group_id: advantages(scored.rewards_n, objective) for scored in batch}
        live = [bool(a_n.any()) for a_n in found.values()]
        samples = np.concatenate(list(found.values()))
        self.batches.append(
            ([(scored.meta.group_id, scored.meta.prompt_id) for scored in batch], batch[0].weight),
        )
        metrics = {"live_group_fraction": float(np.mean(live)), "live_sample_fraction": float((samples != 0).mean())}
        return replace(report, metrics={**report.metrics, **metrics}, advantages=found)


async def trained(
    spec: RLJob, seed: int, resume: ResumePoint | None = None, slowest: float = 0.004
) -> tuple[list[tuple[list[tuple[int, str]], float]], Recorded, Ledger, FakeLearner]:
    actors = FakeActors(random.Random(seed), slowest=slowest, version=resume.step if resume else 0)
    made, learner, recorded, _ = coordinator(spec, actors, SomeDead(), Watching(), resume=resume)
    assert await made.run()
    assert isinstance(learner, Watching)
    return learner.batches, recorded, made.ledger, learner


async def test_a_run_with_refill_is_repeated_and_resumed_exactly() -> None:
    spec = job(sampling={"n": 4, "refill": 0.75}, max_lag=0, checkpoint={"every": 10})
    batches, recorded, ledger, _ = await trained(spec, 0)
    again, other, same, _ = await trained(spec, 1)
    assert batches == again
    assert len({weight for _, weight in batches}) > 2, "steps differ in how many groups were made for them"
    assert ledger == same
    rows = [finished.report.metrics["live_sample_fraction_made"] for finished in recorded.steps]
    assert rows == [finished.report.metrics["live_sample_fraction_made"] for finished in other.steps]
    step, state = recorded.checkpoints[0]
    later, _, ended, _ = await trained(spec, 2, ResumePoint.of(step, state))
    assert batches[step:] == later
    assert ended == ledger


@pytest.mark.parametrize("says", [True, False], ids=["it says which", "it does not say"])
async def test_groups_aside_of_a_checkpoint_do_not_stall_the_resumed_run(says: bool) -> None:
    """Group 1 is still generated when the run is stopped; groups 0 and 2 are aside, and 3 is in the buffer.

    Where the checkpoint says so, they stay aside under an objective that makes them live.
    """
    tries = {"kind": "max_at_k", "k": 3}
    spec = job(prompts_per_step=2, steps=2, sampling={"n": 4, "refill": 1.0}, max_lag=0, objective=tries)

    class DeadForThree(FakeRewards):
        async def score(self, group: Any, prompt: Prompt) -> Scores:
            return scores_of([1.0, 1.0, 1.0, 0.0] if group in ("ref 0", "ref 2") else [1.0, 0.0, 0.0, 0.0])

    made, _, recorded, _ = coordinator(spec, FakeActors(random.Random(0), hangs_at=1), DeadForThree(), Watching())
    run = asyncio.create_task(made.run())
    await until(lambda: made.admission.finished == 3)
    await made.apply(Desired(stopped=True))
    assert not await run
    ((step, state),) = recorded.checkpoints
    assert (state["aside"], [group.meta.group_id for group in recorded.ready]) == ([0, 2], [0, 2, 3])
    again, learner, _, _ = coordinator(
        spec,
        FakeActors(random.Random(0)),
        DeadForThree(),
        Watching(),
        resume=ResumePoint.of(step, state if says else without_places(state), recorded.ready),
        desired=Desired(objective={"k": 2} if says else {}),
    )
    assert await asyncio.wait_for(again.run(), 5)
    assert learner.trained == [1, 3, 4, 5]


def without_places(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in ("aside", "dead")}


async def test_a_refilled_run_counts_every_group_and_has_more_live_ones() -> None:
    _, plain, without, _ = await trained(job(max_lag=0), 0)
    spec = job(sampling={"n": 4, "refill": 1.0}, max_lag=0)
    _, recorded, ledger, _ = await trained(spec, 0)
    counts = ledger.counts()
    replaced = [len(finished.batch.replaced) for finished in recorded.steps]
    assert [finished.report.metrics["replaced_groups"] for finished in recorded.steps] == replaced
    assert 0 < max(replaced) <= 4
    assert (counts["trained"], counts["dropped"], counts["admitted"]) == (100, sum(replaced), 100 + sum(replaced))
    dead = sum((group_id * 7 + group_id // 10) % 10 >= 6 for group_id in range(counts["admitted"]))
    assert counts["dead"] == dead
    assert without.counts()["dead"] > counts["dead"] - counts["dropped"]
    before = np.mean([finished.report.metrics["live_group_fraction"] for finished in plain.steps])
    after = np.mean([finished.report.metrics["live_group_fraction"] for finished in recorded.steps])
    assert after > before + 0.2


@pytest.mark.parametrize("max_lag", [1, 3])
async def test_with_lag_refill_keeps_the_bound_and_trains_each_group_once(max_lag: int) -> None:
    spec = job(sampling={"n": 4, "refill": 0.5}, max_lag=max_lag)
    _, recorded, ledger, learner = await trained(spec, max_lag)
    assert max(learner.lags) <= max_lag
    assert len(set(learner.trained)) == 100
    assert sum(len(finished.batch.replaced) for finished in recorded.steps) == ledger.dropped[REPLACED] > 0
    assert ledger.counts()["in_flight"] == 0


async def test_dead_groups_in_a_row_are_progress_for_the_wait_for_a_batch() -> None:
    """Six groups one after another take longer than the bound, but each ends within it."""
    brief = {"group_deadline_s": 0.3, "start_deadline_s": 0.05}
    spec = job(
        prompts_per_step=2,
        steps=1,
        sampling={"n": 4, "refill": 4},
        max_lag=0,
        actors=brief,
        reward_workers={"group_deadline_s": 0.1, "start_deadline_s": 0.05},
    )

    class Slow(FakeActors):
        async def generate(self, request: GenerateRequest) -> tuple[Any, GroupMeta]:
            await asyncio.sleep(0.2)
            return await super().generate(request)

    class Dead(FakeRewards):
        async def score(self, group: Any, prompt: Prompt) -> Scores:
            return scores_of([0.0] * 4)

    made, learner, _, _ = coordinator(spec, Slow(random.Random(0)), Dead(), Watching())
    assert await made.run()
    assert len(learner.trained) == 2
    assert made.ledger.counts()["dropped"] == 8


# ---- the job ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"update": {"value_model": {}}}, "replaces groups without a gradient, but a value model"),
        ({"update": {"entropy_bonus": 0.1}}, "write refill: 0"),
        ({"update": {"kl": {"coefficient": 0.1, "estimator": "k2"}}}, "write refill: 0"),
        ({"prompts_per_step": 1}, "write prompts_per_step: 2 or more"),
        ({"prompts_per_step": 3, "sampling": {"n": 4, "refill": 0.3}}, "less than one group: write refill: 0.34 or"),
    ],
)
def test_a_refill_that_replaces_nothing_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(**{"sampling": {"n": 4, "refill": 0.5}, **changes})


def test_the_limit_is_not_lost_to_rounding() -> None:
    assert job(sampling={"n": 4, "refill": 0.1}, prompts_per_step=30).sampling.most_replaced(30) == 3
    assert job(sampling={"n": 4, "refill": 0.34}, prompts_per_step=3).sampling.most_replaced(3) == 1
