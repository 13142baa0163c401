"""Small fakes at the three heavy seams of the coordinator: engine, scorer, learner."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from actors.config import ActorUpdate, BroadcastReport, GenerateRequest
from learner.records import ScoredGroup, StepReport
from services.coordinator.devices import Devices
from services.coordinator.loop import Coordinator
from services.coordinator.records import FinishedStep, Hooks, ReadyGroup, ResumePoint
from services.coordinator.roles import Roles
from services.data.tokens import EncodedPrompt
from volley.errors import WorkerDied
from volley.job import RLJob
from volley.objectives import Objective
from volley.records import GroupMeta, Prompt, Scores, Verdict, VerdictStatus, WeightBucket, WeightUpdate
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
    asleep: bool = False

    async def sleep(self) -> None:
        await asyncio.sleep(self.rng.random() * self.slowest)
        self.asleep = True

    async def wake(self) -> None:
        await asyncio.sleep(self.rng.random() * self.slowest)
        self.asleep = False

    async def generate(self, request: GenerateRequest) -> tuple[Any, GroupMeta]:
        started = self.version
        self.asked.append(request.group_id)
        if request.group_id == self.fails_at:
            raise WorkerDied("actor-0", "killed by signal 9")
        if request.group_id == self.hangs_at:
            await asyncio.sleep(3600)
        await asyncio.sleep(self.rng.random() * self.slowest)
        while self.asleep:  # noqa: ASYNC110 - so is the real one's engine
            await asyncio.sleep(0.001)
        n, versions = request.n, (started, self.version)
        meta = GroupMeta(request.group_id, request.prompt_id, "actor-0", n, 3, 8, -8.0, *versions, 0, 0.0, n)
        return f"ref {request.group_id}", meta

    async def broadcast(self, update: WeightUpdate) -> BroadcastReport:
        await asyncio.sleep(self.rng.random() * self.slowest)
        self.version, self.asleep = update.version, update.lent
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
    asleep: bool = False
    lends: bool = False
    lending: bool = False

    async def lend(self) -> None:
        await asyncio.sleep(0.001)
        self.lending = True

    async def sleep(self) -> None:
        await asyncio.sleep(0.001)
        self.asleep, self.lending = True, False

    async def wake(self) -> None:
        await asyncio.sleep(0.001)
        self.asleep = False

    async def score(self, group: object) -> Any:
        raise AssertionError("the coordinator does not score")

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
        return WeightUpdate(version, (WeightBucket(None, 1, "file"),) if self.lends else (), None, 0.0)

    async def begin_save(
        self,
        folder: Path,
        extra: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
        *,
        background: bool = True,
    ) -> None:
        raise AssertionError("the coordinator does not save")

    async def saved(self) -> None:
        raise AssertionError("the coordinator does not save")


@dataclass
class Recorded:
    steps: list[FinishedStep] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    checkpoints: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    stored: list[tuple[int, int]] = field(default_factory=list)  # of each checkpoint: its step, and the version then
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
    during_evaluation: Callable[[int], Awaitable[object]] | None = None,
    stop_requested: asyncio.Event | None = None,
    on_checkpoint: Callable[[Checkpoint], Checkpoint] | None = None,
    while_storing: Callable[[int], Awaitable[object]] | None = None,
) -> tuple[Coordinator, FakeLearner, Recorded, list[int]]:
    """A coordinator over the fakes, with what they saw.

    Args:
        during_evaluation: lasts as long as the evaluation of the version that it is called with.
        while_storing: lasts as long as it takes to store the checkpoint of the step that it is called with.
    """
    learner, recorded, evaluated = learner or FakeLearner(), Recorded(), []

    async def evaluate(version: int) -> None:
        assert actors.version == version, "the actors serve the evaluated version"
        if during_evaluation:
            await during_evaluation(version)
        assert actors.version == version, "until the evaluation ends"
        evaluated.append(version)

    async def checkpoint(step: int, state: dict[str, Any], ready: list[ReadyGroup]) -> None:
        done = resume.step if resume else 0
        assert len(learner.trained) == (step - done) * spec.prompts_per_step, "a checkpoint is written between steps"
        assert [finished.step for finished in recorded.steps] == list(range(done, step)), "after the rows of its steps"
        recorded.checkpoints.append((step, json.loads(json.dumps(state))))
        recorded.ready = ready

    async def stored() -> None:
        step, _ = recorded.checkpoints[-1]
        if while_storing:
            await while_storing(step)
        assert recorded.checkpoints[-1][0] == step, "one checkpoint is stored before another begins"
        recorded.stored.append((step, made.version))

    async def check_served() -> float:
        assert actors.version == made.version, "actors and learner hold the same version"
        recorded.served_checks.append(made.version)
        return 1e-6 * made.version

    prompts = [EncodedPrompt(Prompt(f"p{i}", "x"), np.arange(3, dtype=np.int32)) for i in range(10)]
    devices = Devices(actors, learner, shared=spec.placement == "colocated")
    made = Coordinator(
        spec,
        prompts,
        Roles(actors, rewards or FakeRewards(), learner, devices),
        Hooks(recorded, evaluate, on_checkpoint(checkpoint) if on_checkpoint else checkpoint, stored, check_served),
        resume=resume,
        desired=desired,
        stop_requested=stop_requested,
    )
    return made, learner, recorded, evaluated


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - there is no event for every state
            await asyncio.sleep(0.001)
