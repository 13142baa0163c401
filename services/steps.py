"""What the coordinator keeps of groups and steps, and whom it tells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actors.config import BroadcastReport
from learner.records import ScoredGroup, StepReport
from services.ledger import Ledger
from volley.objectives import SolveRate
from volley.records import GroupMeta, Prompt, Scores


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group that is generated and scored: metadata, and a reference to its arrays.

    Attributes:
        max_lag: the bound it was admitted under.
        generated: when its generation began and ended, seconds since 1970.
        scored: when its scores were there.
    """

    group: Any
    meta: GroupMeta
    prompt: Prompt
    scores: Scores
    max_lag: int
    generated: tuple[float, float]
    scored: float

    def columns(self) -> ScoredGroup:
        """What the learner takes."""
        return ScoredGroup(
            group=self.group,
            meta=self.meta,
            rewards_n=self.scores.rewards_n,
            valid_n=self.scores.valid_n,
            answers_n=self.scores.answers_n,
        )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step began, had its batch, was learned, was gathered and was published: seconds since 1970.

    From ``gathered`` on the learner is free for the next step.
    """

    begun: float
    waited: float
    learned: float
    gathered: float
    published: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """All that is known of one step once the actors serve its weights."""

    step: int
    batch: tuple[ReadyGroup, ...]
    report: StepReport
    broadcast: BroadcastReport
    times: StepTimes
    nbytes: int
    ledger: dict[str, int]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Between two steps: ``step`` are done, where every group was, and what schedules go by.

    ``ready`` are those of the groups in flight that only wait to be trained on; the others are made again. ``refills``
    counts the groups that were dropped before a batch took them, each of which another one replaced. ``evaluated`` says
    whether the evaluation of these weights, if one is due, was made.
    """

    step: int
    ledger: Ledger
    refills: int
    dead_batches: int
    solve_rates: dict[str, SolveRate]
    ready: tuple[ReadyGroup, ...] = ()
    evaluated: bool = False

    @classmethod
    def of(cls, step: int, state: Mapping[str, Any], ready: Sequence[ReadyGroup] = ()) -> "ResumePoint":
        """From what `Coordinator` gave its checkpoint."""
        rates = {prompt: SolveRate(*rate) for prompt, rate in state["solve_rates"].items()}
        ledger, refills = Ledger.of(state["ledger"]), int(state["refills"])
        dead_batches, evaluated = int(state["dead_batches"]), bool(state.get("evaluated", True))
        return cls(step, ledger, refills, dead_batches, rates, tuple(ready), evaluated)

    @classmethod
    def start(cls) -> "ResumePoint":
        """Before the first step."""
        return cls(0, Ledger(), 0, 0, {})


class Recorder(Protocol):
    """Told of everything that happens; writes files, streams and the progress display."""

    async def step(self, finished: FinishedStep) -> None: ...

    async def event(self, kind: str, **details: Any) -> None: ...

    async def dropped(self, group_id: int, prompt_id: str, step: int, reason: str, detail: str) -> None: ...
