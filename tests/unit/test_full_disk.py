"""A full disk pauses a run of every kind, wherever it writes, and the run goes on once there is space."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.pool import LearnerPool
from learner.records import SFTRow, StepReport
from services.coordinator.devices import Devices
from services.data.mixture import Order
from services.evaluation.sample_log import SampleLog
from services.jobs.needs import needs_of
from services.recording import disk_space
from services.recording.recorder import RunRecorder
from services.runs import rl, supervised
from services.runs.context import Context
from services.runs.sampling import log_samples
from services.runs.supervised import Plan, fine_tune
from tests.unit.fake_roles import FakeActors, FakeLearner, job, until
from tests.unit.fake_runs import SmallFolder, context_in
from volley.errors import DiskFull, HostError, JobError
from volley.job import SFTJob
from volley.records import Group, Prompt, Scores, Verdict, VerdictStatus, WeightUpdate
from volley.state import Desired


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallFolder:
    monkeypatch.setattr(disk_space, "RETRY_SECONDS", 0.001)
    for name in ("checkpoints", "plots"):
        (tmp_path / name).mkdir()
    return SmallFolder(tmp_path)


def paused(context: Context) -> Callable[[], bool]:
    return lambda: context.status.observed.state == "paused"


# ---- sft and rft -----------------------------------------------------------------------------------------------


class SmallLearner:
    """A learner of an sft job, whose checkpoints need ``space``."""

    failure = None

    def __init__(self) -> None:
        self.space = True
        self.begun: list[str] = []
        self.saves = 0
        self.exported = False

    async def sft_step(self, _rows: object) -> StepReport:
        return StepReport({"loss": 1.0}, {}, {}, {})

    async def begin_save(self, path: Path, *_: object, **__: object) -> None:
        self._check(path.name)
        self.begun.append(path.name)

    async def saved(self) -> None:
        self._check("checkpoint")
        self.saves += 1

    async def export(self, folder: Path) -> None:
        self._check(folder.name)
        self.exported = True

    async def stop(self) -> None:
        self.space = True

    def _check(self, what: str) -> None:
        if not self.space:
            raise DiskFull(what)


def sft(**changes: Any) -> SFTJob:
    tree = {"kind": "sft", "name": "s", "steps": 3, "rows_per_step": 1, "model": {"path": "/m"}, "data": {"path": "/d"}}
    return SFTJob.model_validate({**tree, **changes})


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> SmallLearner:
    made = SmallLearner()

    async def start(_config: object) -> SmallLearner:
        return made

    @contextlib.asynccontextmanager
    async def start_turn(*_: object) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(LearnerPool, "start", start)
    monkeypatch.setattr(supervised, "start_turn", start_turn)
    return made


def tuning(spec: SFTJob, context: Context) -> asyncio.Task[None]:
    ids = np.arange(3, dtype=np.int32)
    plan = Plan([SFTRow(prompt_p=ids, answer_a=ids)], Order(1, seed=0, shuffle=False), spec.steps or 0, 1)
    return asyncio.create_task(fine_tune(spec, plan, needs_of(spec), context))


async def test_rows_of_supervised_steps_wait_for_space(folder: SmallFolder, learner: SmallLearner) -> None:
    spec = sft()
    context, outbox = context_in(folder, spec)
    folder.full.append(True)
    run = tuning(spec, context)
    await until(paused(context))
    assert "the disk is full" in context.status.observed.problem
    folder.full.clear()
    await asyncio.wait_for(run, 20)
    assert [row["step"] for row in folder.read("metrics")] == [row["step"] for row in outbox.steps] == [0, 1, 2]
    assert outbox.states == ["running", "paused", "running"]
    assert context.status.observed.problem == ""
    assert learner.begun == ["step-3"]


async def test_checkpoints_of_supervised_runs_wait_for_space(folder: SmallFolder, learner: SmallLearner) -> None:
    spec = sft(checkpoint={"every": 2})
    context, _ = context_in(folder, spec)
    learner.space = False
    run = tuning(spec, context)
    await until(paused(context))
    assert [row["step"] for row in folder.read("metrics")] == [0, 1]
    learner.space = True
    await asyncio.wait_for(run, 20)
    assert (learner.begun, learner.saves) == (["step-2", "step-3"], 2)
    assert context.status.observed.checkpoint == 3


async def test_the_model_of_a_supervised_run_waits_for_space(folder: SmallFolder, learner: SmallLearner) -> None:
    spec = sft()
    context, _ = context_in(folder, spec)
    saved = learner.saved

    async def last_checkpoint() -> None:
        await saved()
        learner.space = False

    learner.saved = last_checkpoint  # type: ignore[method-assign]
    run = tuning(spec, context)
    await until(paused(context))
    assert (learner.saves, learner.exported) == (1, False)
    learner.space = True
    await asyncio.wait_for(run, 20)
    assert learner.exported


async def test_a_supervised_run_that_fails_does_not_wait_for_its_checkpoint(
    folder: SmallFolder, learner: SmallLearner
) -> None:
    spec = sft(steps=9, checkpoint={"every": 2})
    context, _ = context_in(folder, spec)

    async def begin_save(*_: object, **__: object) -> None:
        learner.space = False

    learner.begin_save = begin_save  # type: ignore[method-assign]
    sft_step = learner.sft_step

    async def step(_rows: object) -> StepReport:
        if not learner.space:
            await until(paused(context))
            raise JobError("a broken row")
        return await sft_step(_rows)

    learner.sft_step = step  # type: ignore[method-assign]
    with pytest.raises(JobError, match="a broken row"):
        await asyncio.wait_for(tuning(spec, context), 20)
    assert learner.saves == 0


# ---- eval and rft: samples -------------------------------------------------------------------------------------

PROMPT = Prompt("p", "?")
SCORES = Scores.pack([Verdict(VerdictStatus.PASSED, 1.0)])
GROUP = Group(
    group_id=-1,
    prompt_id="p",
    prompt_p=np.zeros(1, np.int32),
    tokens_T=np.zeros(1, np.int32),
    logprobs_T=np.zeros(1, np.float32),
    versions_T=np.zeros(1, np.int32),
    lengths_n=np.ones(1, np.int32),
    stopped_n=np.ones(1, np.bool_),
    texts=("7",),
    actor="actor-0",
    seconds=0.1,
)


async def test_samples_wait_for_space(folder: SmallFolder) -> None:
    context, _ = context_in(folder, sft())
    context.status.set(state="running")
    folder.full.append(True)
    writing = asyncio.create_task(log_samples(SampleLog(folder), context, 0, PROMPT, GROUP, SCORES, None))
    await until(paused(context))
    folder.full.clear()
    await writing
    assert [row["sample"] for row in folder.read("samples")] == ["7"]
    assert context.status.observed.state == "running"


async def test_samples_that_cannot_be_written_for_another_reason_end_the_run(folder: SmallFolder) -> None:
    context, _ = context_in(folder, sft())
    (folder.path / "samples.jsonl").mkdir()
    with pytest.raises(HostError, match="samples cannot be written: Is a directory"):
        await log_samples(SampleLog(folder), context, 0, PROMPT, GROUP, SCORES, None)


# ---- rl: a resumed run -----------------------------------------------------------------------------------------


class SavedLearner(FakeLearner):
    """A learner whose checkpoint, of step 5, says that the evaluation is missing."""

    async def load(self, _checkpoint: Path) -> dict[str, Any]:
        ledger = {"admitted": 20, "trained": 20, "dropped": {}, "in_flight": []}
        return {"step": 5, "ledger": ledger, "refills": 0, "dead_batches": 0, "solve_rates": {}, "evaluated": False}

    async def publish(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, (), None, 0.0)


def session(context: Context) -> rl.RLSession:
    actors, learner = FakeActors(random.Random(0)), SavedLearner()
    roles: dict[str, Any] = {"actors": actors, "rewards": None, "learner": learner, "environments": None}
    pools = rl.Pools(**roles, episodes=None, devices=Devices(actors, learner, shared=False))
    recorder = RunRecorder(context.folder, context.outbox, context.display, samples_kept=0)
    run = rl.RLRun(job(), [], [], 0, None)
    return rl.RLSession(run, context, recorder, contextlib.AsyncExitStack(), pools, Desired())


async def test_a_resumed_run_waits_for_space_to_remove_rows(folder: SmallFolder) -> None:
    context, outbox = context_in(folder, job())
    for step in range(7):
        folder.append("metrics", [{"step": step}])
    folder.full.append(True)
    loading = asyncio.create_task(session(context)._load(folder.checkpoints / "step-5"))
    await until(paused(context))
    folder.full.clear()
    assert (await loading).step == 5
    assert [row["step"] for row in folder.read("metrics")] == [0, 1, 2, 3, 4]
    assert outbox.states == ["paused", "starting"]


@pytest.mark.parametrize(("versions", "evaluated"), [([0, 5, 10], True), ([0, 10], False)])
async def test_an_evaluation_that_followed_the_checkpoint_is_not_repeated(
    folder: SmallFolder, versions: list[int], evaluated: bool
) -> None:
    context, _ = context_in(folder, job())
    folder.append("evaluations", [{"version": version} for version in versions])
    resume = await session(context)._load(folder.checkpoints / "step-5")
    assert resume.evaluated == evaluated
    assert [row["version"] for row in folder.read("evaluations")] == [each for each in versions if each <= 5]
