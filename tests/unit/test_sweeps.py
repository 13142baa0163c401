"""Making the runs of a sweep: over a runner whose runs live in a dict, as real ones do in folders."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from services.recording.display import Display
from services.signals import StopSignal, run_in_foreground
from services.sweeps import conduct as conducting
from services.sweeps.conduct import SweepStop, conduct
from services.sweeps.plan import Found, Records, plan
from services.sweeps.results import gather
from services.sweeps.spec import Member, Sweep, load_sweep
from services.sweeps.statistics import metrics_of
from tests.unit.test_sweep_files import write
from volley.errors import HostError, JobError, VolleyError
from volley.job import RLJob


@dataclass
class DictRunner:
    """Runs of a few steps, with a checkpoint after each second one.

    Attributes:
        runs: what is left of each run, like folders that outlive the process.
        failing: what a run raises at its second step.
        tick: called before each step.
        steps: the steps that were made, by run.
    """

    runs: dict[str, Found] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    steps: dict[str, list[int]] = field(default_factory=dict)
    failing: dict[str, Exception] = field(default_factory=dict)
    tick: Callable[[], None] = lambda: None
    graceful: bool = True
    most: int = 0
    live: set[str] = field(default_factory=set)
    readied: list[str] = field(default_factory=list)

    async def find(self, sweep: Sweep) -> dict[str, Found]:
        return dict(self.runs)

    @contextlib.asynccontextmanager
    async def ready(self, members: Sequence[Member]) -> AsyncIterator[None]:
        self.readied += [member.name for member in members]
        yield

    async def run(self, member: Member, found: Found | None, stop_signal: StopSignal) -> Found:
        name = member.name
        assert found == self.runs.get(name)
        self.live.add(name)
        self.most = max(self.most, len(self.live))
        try:
            with stop_signal.grace_period(60 if self.graceful else 0):
                await self._steps(member, stop_signal)
        except Exception as error:
            self._leave(member, "failed", str(error))
            raise
        finally:
            self.live.remove(name)
        return self._leave(member, "done")

    async def _steps(self, member: Member, stop_signal: StopSignal) -> None:
        name = member.name
        self._leave(member, "running")
        assert isinstance(member.job, RLJob)
        for step in range(self.checkpoints.get(name, 0), member.job.steps):
            if step == 1 and name in self.failing:
                raise self.failing[name]
            self.steps.setdefault(name, []).append(step)
            self.tick()
            await asyncio.sleep(0)
            if (step + 1) % 2 == 0 or stop_signal.requested.is_set():
                self.checkpoints[name] = step + 1
            if stop_signal.requested.is_set() and step + 1 < member.job.steps:
                self._leave(member, "stopped")
                raise asyncio.CancelledError

    def _leave(self, member: Member, state: str, problem: str = "") -> Found:
        self.runs[member.name] = Found(state, problem, member.job, member.name)
        return self.runs[member.name]

    async def progress(self, member: Member) -> str:
        return "works"

    async def records(self, member: Member, found: Found) -> Records:
        rows = [{"step": step, "reward_mean": member.seed + step} for step in range(4)]
        return Records(metrics_of(rows), [])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conducting, "POLL_SECONDS", 0.001)


def sweep_of(folder: Path, ks: Sequence[int] = (2, 4), at_once: int = 1, steps: int = 4) -> Sweep:
    return load_sweep(write(folder, grid={"objective.k": list(ks)}, seeds=[0, 1], at_once=at_once), {"steps": steps})


def conducted(sweep: Sweep, runner: DictRunner, stop: SweepStop | None = None, **options: bool) -> dict[str, Found]:
    stop = stop or SweepStop()
    return run_in_foreground(conduct(sweep, runner, Display(quiet=True), stop, **options), stop)


def states(found: dict[str, Found]) -> dict[str, str]:
    return {name: run.state for name, run in found.items()}


def test_all_runs_are_made_and_a_repeated_sweep_makes_no_more(tmp_path: Path) -> None:
    sweep, runner = sweep_of(tmp_path), DictRunner()
    found = conducted(sweep, runner)
    assert states(found) == {each.name: "done" for each in sweep.members}
    assert runner.readied == [each.name for each in sweep.members]
    assert conducted(sweep, runner) == found
    assert len(runner.readied) == 4, "nothing is started for a sweep that is complete"


@pytest.mark.parametrize("at_once", [1, 3, 9])
def test_as_many_run_at_once_as_the_file_says(tmp_path: Path, at_once: int) -> None:
    runner = DictRunner()
    conducted(sweep_of(tmp_path, ks=(2, 3, 4), at_once=at_once), runner)
    assert runner.most == min(at_once, 6)


@pytest.mark.parametrize("graceful", [True, False], ids=["at a checkpoint", "at once"])
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_a_sweep_resumes_from_wherever_it_was_interrupted(tmp_path: Path, at_once: int, graceful: bool) -> None:
    """Whenever the signal comes: no step is left out, none that a checkpoint has is made twice, no more is begun."""
    sweep = sweep_of(tmp_path, at_once=at_once)
    for moment in range(1, 17):
        runner, stop, ticks = DictRunner(graceful=graceful), SweepStop(), [0]

        def tick(stop: SweepStop = stop, ticks: list[int] = ticks, moment: int = moment) -> None:
            ticks[0] += 1
            if ticks[0] == moment:
                stop.handle(lambda: None)

        runner.tick = tick
        with pytest.raises(asyncio.CancelledError):
            conducted(sweep, runner, stop)
        assert runner.live == set()
        begun = len(runner.runs)
        assert begun <= (moment + 3) // 4 - 1 + at_once
        before = dict(runner.checkpoints)
        done = {name for name, run in runner.runs.items() if run.state == "done"}
        runner.steps, runner.tick = {}, lambda: None
        assert set(states(conducted(sweep, runner)).values()) == {"done"}
        for member in sweep.members:
            first = 4 if member.name in done else before.get(member.name, 0)
            assert runner.steps.get(member.name, []) == list(range(first, 4)), (moment, member.name)


def test_a_second_signal_does_not_wait_for_checkpoints(tmp_path: Path) -> None:
    sweep, runner, stop = sweep_of(tmp_path, at_once=2), DictRunner(), SweepStop()
    held = asyncio.Event

    async def run(member: Member, found: Found | None, stop_signal: StopSignal) -> Found:
        with stop_signal.grace_period(60):
            if len(stop.running) == 2 and member is sweep.members[1]:
                asyncio.get_running_loop().call_soon(lambda: [stop.handle(lambda: None) for _ in range(2)])
            await held().wait()
        raise AssertionError("it was not cancelled")

    runner.run = run  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        conducted(sweep, runner, stop)
    assert not stop.running


def test_a_signal_before_any_run_cancels_the_work() -> None:
    cancelled: list[int] = []
    assert SweepStop().handle(lambda: cancelled.append(1)) == "stopping"
    assert cancelled == [1]


@pytest.mark.parametrize(
    ("error", "problem"),
    [(HostError("no room"), "no room"), (KeyError("k"), "unexpected KeyError: 'k'")],
    ids=["an error", "a bug"],
)
def test_a_run_that_fails_ends_no_other_and_is_made_again_only_on_request(
    tmp_path: Path, error: Exception, problem: str
) -> None:
    sweep, runner = sweep_of(tmp_path, at_once=2), DictRunner()
    bad = sweep.members[1].name
    runner.failing = {bad: error}
    found = conducted(sweep, runner)
    assert found[bad].problem == problem
    assert states(found) == {each.name: "failed" if each.name == bad else "done" for each in sweep.members}
    runner.readied, runner.failing = [], {}
    assert conducted(sweep, runner)[bad].state == "failed"
    assert runner.readied == []
    assert set(states(conducted(sweep, runner, retry=True)).values()) == {"done"}
    assert runner.readied == [bad]


def test_a_sweep_grows_by_new_runs_and_leaves_those_alone_that_it_no_longer_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = DictRunner()
    conducted(sweep_of(tmp_path), runner)
    runner.readied = []
    wider = sweep_of(tmp_path, ks=(4, 8))
    stop = SweepStop()
    run_in_foreground(conduct(wider, runner, Display(), stop), stop)
    assert runner.readied == ["k-8-s0", "k-8-s1"]
    out = capsys.readouterr().out
    assert "4 runs: 2 done, 0 to resume, 2 to start" in out
    assert "new: k-8-s0, k-8-s1" in out
    assert "no longer in the file, left alone: k-2-s0, k-2-s1" in out


def test_a_changed_file_is_refused_before_anything_starts_and_says_what_changed(tmp_path: Path) -> None:
    runner = DictRunner()
    conducted(sweep_of(tmp_path), runner)
    runner.readied = []
    with pytest.raises(JobError, match=r"k-2-s0: steps was 4, is 5\n"):
        conducted(sweep_of(tmp_path, steps=5), runner)
    assert runner.readied == []


def test_a_failed_run_may_have_another_job_when_it_is_made_again(tmp_path: Path) -> None:
    sweep, runner = sweep_of(tmp_path), DictRunner()
    runner.failing = {each.name: HostError("no room") for each in sweep.members}
    conducted(sweep, runner)
    runner.failing = {}
    changed = sweep_of(tmp_path, steps=6)
    with pytest.raises(JobError, match="steps was 4, is 6"):
        plan(changed, runner.runs)
    assert set(states(conducted(changed, runner, retry=True)).values()) == {"done"}


def test_results_are_those_of_runs_that_are_done(tmp_path: Path) -> None:
    sweep, runner = sweep_of(tmp_path), DictRunner()
    runner.failing = {"k-2-s1": VolleyError("no"), "k-4-s0": VolleyError("no"), "k-4-s1": VolleyError("no")}
    found = conducted(sweep, runner)
    (only,) = asyncio.run(gather(sweep, found, runner)).groups
    assert (only.name, only.seeds) == ("k=2", (0,))


@pytest.mark.parametrize(
    ("key", "values", "shown"),
    [
        ("objective.k", [2, 4], True),
        ("model.path", ["a", "b"], False),
        ("model.lora", [None, {"rank": 2}], True),
        ("evaluation.data.path", ["x", "y"], False),
    ],
)
def test_the_start_is_a_row_only_if_all_runs_start_alike(
    tmp_path: Path, key: str, values: list[object], shown: bool
) -> None:
    class Evaluating(DictRunner):
        async def records(self, member: Member, found: Found) -> Records:
            made = [{"version": version, "estimates": [{"k": 1, "mean": 0.5}]} for version in (0, 4)]
            return Records(metrics_of([{"step": 0, "reward_mean": 0.5}]), made)

    held_out = {"evaluation.data.path": "held-out.jsonl", "evaluation.ks": [1], "evaluation.sampling.n": 4}
    file = write(tmp_path, set=held_out, grid={key: values}, seeds=[0, 1], start_once=True)
    sweep, runner = load_sweep(file, {"steps": 4}), Evaluating()
    results = asyncio.run(gather(sweep, conducted(sweep, runner), runner))
    assert list(results.start) == ([1] if shown else [])


def maybe_stop(stop: SweepStop, chance: random.Random) -> None:
    if chance.random() < 0.1:
        stop.handle(lambda: None)


def test_any_history_of_interruptions_and_failures_gives_the_same_runs(tmp_path: Path) -> None:
    """Sessions that are cut at random steps, with runs that fail at random, until nothing is left to do."""
    sweep = sweep_of(tmp_path, ks=(2, 3, 4), at_once=2)
    for seed in range(10):
        chance, runner, sessions = random.Random(seed), DictRunner(), 0
        while set(states(runner.runs).values()) != {"done"} or len(runner.runs) < 6:
            stop = SweepStop()
            runner.graceful = chance.random() < 0.5
            runner.failing = {each.name: HostError("x") for each in sweep.members if chance.random() < 0.2}
            runner.tick = partial(maybe_stop, stop, chance)
            with contextlib.suppress(asyncio.CancelledError):
                conducted(sweep, runner, stop, retry=True)
            sessions += 1
            assert sessions < 200
        for steps in runner.steps.values():
            assert sorted(set(steps)) == [0, 1, 2, 3]
