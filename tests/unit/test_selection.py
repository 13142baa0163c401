"""The selection of prompts by solve rate: which are taken, how often, and the same ones in a resumed run."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from services.coordinator.records import Batch, ReadyGroup, ResumePoint, SelectionState
from services.coordinator.selection import PromptSelection
from services.coordinator.solve_rates import SolveRates
from services.data.tokens import EncodedPrompt
from tests.unit.fake_roles import FakeActors, FakeRewards, Recorded, coordinator, job
from tests.unit.ready_groups import ready, scores_of
from tests.unit.test_refill import Watching
from volley.job import RLJob
from volley.objectives import SolveRate
from volley.objectives.signal import PromptSignal
from volley.records import Prompt, Scores

PROMPTS = [EncodedPrompt(Prompt(f"p{i}", "x"), np.arange(3, dtype=np.int32)) for i in range(10)]
SELECTING: dict[str, Any] = {"sampling": {"n": 4, "selection": {}}}


def selection(spec: RLJob, rates: dict[str, SolveRate], resume: SelectionState | None = None) -> PromptSelection:
    return PromptSelection(spec, PROMPTS, SolveRates(spec, rates), resume or SelectionState())


def rows(chosen: PromptSelection, spec: RLJob, groups: Sequence[int]) -> list[int]:
    return [chosen.row(group_id, spec.objective) for group_id in groups]


def test_without_selection_a_group_has_the_prompt_of_its_position() -> None:
    plain = job()
    assert rows(selection(plain, {}), plain, range(20)) == rows(selection(plain, {}), plain, range(20))
    assert sorted(rows(selection(plain, {}), plain, range(10))) == list(range(10))


def test_prompts_not_met_yet_are_all_taken_in_the_order() -> None:
    spec = job(**SELECTING)
    assert rows(selection(spec, {}), spec, range(10)) == rows(selection(job(), {}), job(), range(10))


@pytest.mark.parametrize("floor", [0.1, 0.5])
def test_a_prompt_is_taken_as_often_as_its_signal_says(floor: float) -> None:
    spec = job(sampling={"n": 4, "selection": {"floor": floor}})
    rates = {f"p{i}": SolveRate(8.0 * i / 9, 8.0) for i in range(10)}
    chosen = selection(spec, rates)
    counts = Counter(rows(chosen, spec, range(6000)))
    passes = chosen.state([])["position"] / len(PROMPTS)
    signal = PromptSignal(spec.objective, 4)
    for i in range(10):
        chance = floor + (1 - floor) * signal.share(rates[f"p{i}"])
        assert counts[i] / passes == pytest.approx(chance, abs=5 * (0.25 / passes) ** 0.5)
        assert counts[i] / passes > floor - 5 * (0.25 / passes) ** 0.5, "no prompt starves"
    assert counts[3] > 1.5 * counts[9], "max@2: a third solved is worth more than all solved"


def test_a_floor_of_one_takes_every_prompt() -> None:
    spec = job(sampling={"n": 4, "selection": {"floor": 1.0}})
    always = {f"p{i}": SolveRate(400.0, 400.0) for i in range(10)}
    assert rows(selection(spec, always), spec, range(30)) == rows(selection(job(), {}), job(), range(30))


def test_another_seed_takes_others_and_the_objective_may_change() -> None:
    rates = {f"p{i}": SolveRate(1.0, 8.0) for i in range(5)} | {f"p{i}": SolveRate(6.0, 8.0) for i in range(5, 10)}
    spec, other = job(**SELECTING), job(**SELECTING, seed=1)
    found = rows(selection(spec, rates), spec, range(400))
    assert found != rows(selection(other, rates), other, range(400))
    hard = sum(row < 5 for row in found)
    mean = job(**SELECTING, objective={"kind": "mean"})
    assert hard > sum(row < 5 for row in rows(selection(mean, rates), mean, range(400))) + 20


def test_a_resumed_selection_goes_on_and_open_groups_keep_their_prompts() -> None:
    spec = job(**SELECTING)
    rates = {f"p{i}": SolveRate(i / 9 * 8.0, 8.0) for i in range(10)}
    whole = selection(spec, rates)
    found = rows(whole, spec, range(40))
    first = selection(spec, rates)
    rows(first, spec, range(20))
    state = first.state([17, 19])
    assert state["rows"] == {"17": found[17], "19": found[19]}
    resumed = selection(spec, rates, SelectionState.of(state))
    assert rows(resumed, spec, [17, 19, *range(20, 40)]) == [found[17], found[19], *found[20:]]


def test_replaced_groups_count_as_visits() -> None:
    spec = job(**SELECTING)
    rates = SolveRates(spec, {})
    batch = Batch((ready([1.0, 0.0, 0.0, 0.0], group_id=1),), replaced=(ready([0.0] * 4, group_id=0),))
    rates.columns(batch, spec.objective)
    assert rates.of("p0") == SolveRate(0.0, 4.0)
    assert rates.of("p1") == SolveRate(1.0, 4.0)


class ByDifficulty(FakeRewards):
    """The first prompts are always solved, the last never; between, one sample of four is right."""

    async def score(self, group: Any, prompt: Prompt) -> Scores:
        number = int(prompt.id.removeprefix("p"))
        return scores_of([1.0] * 4 if number < 4 else [0.0] * 4 if number > 6 else [1.0, 0.0, 0.0, 0.0])


async def trained(
    spec: RLJob, seed: int, resume: ResumePoint | None = None, ready_groups: Sequence[ReadyGroup] = ()
) -> tuple[Watching, Recorded]:
    actors = FakeActors(random.Random(seed), version=resume.step if resume else 0)
    learner = Watching()
    made, _, recorded, _ = coordinator(spec, actors, ByDifficulty(), learner, resume=resume)
    assert await made.run()
    return learner, recorded


@pytest.mark.parametrize("refill", [0.0, 0.75])
async def test_a_run_selects_the_same_prompts_when_it_is_repeated_or_resumed(refill: float) -> None:
    sampling = {"n": 4, "refill": refill, "selection": {}}
    spec = job(sampling=sampling, max_lag=0, checkpoint={"every": 10})
    learner, recorded = await trained(spec, 0)
    again, _ = await trained(spec, 1)
    assert learner.batches == again.batches
    step, state = recorded.checkpoints[0]
    assert step == 10
    later, _ = await trained(spec, 2, ResumePoint.of(step, state))
    assert later.batches == learner.batches[step:]
    assert later.trained == learner.trained[step * 4 :]


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_selection_raises_the_share_of_live_groups_and_leaves_no_prompt_out(max_lag: int) -> None:
    def live_share(recorded: Recorded) -> float:
        return float(np.mean([finished.report.metrics["live_group_fraction"] for finished in recorded.steps[10:]]))

    _, plain = await trained(job(steps=60, max_lag=max_lag), 0)
    learner, selected = await trained(job(steps=60, max_lag=max_lag, **SELECTING), 0)
    assert live_share(plain) == pytest.approx(0.3, abs=0.03)
    assert live_share(selected) > 0.45
    met = Counter(prompt for groups, _ in learner.batches for _, prompt in groups)
    assert len(met) == 10
    assert min(met.values()) >= 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": {"adaptive_k": {}}}, "remove one of them"),
        ({"sampling": {"n": 2000, "selection": {}}}, "at most 1024 samples"),
        ({"sampling": {"n": 4, "selection": {"floor": 0}}}, "greater than or equal to 0.01"),
    ],
)
def test_a_selection_without_grounds_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(**{**SELECTING, **changes})
