"""What the coordinator records of groups and steps, and what it calls besides the roles."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from actors.config import BroadcastReport
from environments.records import Usage
from learner.records import ScoredGroup, StepReport
from services.coordinator.ledger import Ledger
from volley.errors import JobError
from volley.objectives import SolveRate
from volley.records import Group, GroupMeta, Prompt, Scores
from volley.refs import Ref

if TYPE_CHECKING:
    from services.coordinator.episode_figures import EpisodeFigures


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group that is generated and scored: its metadata, and a reference to its arrays.

    Attributes:
        max_lag: the bound on lag under which it was admitted.
        generated: when its generation began and ended, seconds since 1970.
        scored: when its scores arrived.
    """

    group: Ref[Group]
    meta: GroupMeta
    prompt: Prompt
    scores: Scores
    max_lag: int
    generated: tuple[float, float]
    scored: float

    def columns(self, *, ranked: bool = False) -> ScoredGroup:
        """The group as the learner takes it; with ``ranked``, raises `JobError` if a scored sample has no rank."""
        if ranked and np.isnan(self.scores.ranks_n[self.scores.valid_n]).any():
            raise JobError(
                f"objective: best_of_k picks samples by their rank, but the scorer gave a sample of prompt "
                f'{self.prompt.id} none: return {{"reward": ..., "rank": ...}} for every sample, mark tests as public, '
                "or write kind: max_at_k"
            )
        return ScoredGroup(
            group=self.group,
            meta=self.meta,
            rewards_n=self.scores.rewards_n,
            valid_n=self.scores.valid_n,
            answers_n=self.scores.answers_n,
            ranks_n=self.scores.ranks_n if ranked else None,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """What the learner takes in one step.

    Attributes:
        groups: P groups, in order of admission.
        replaced: the dead groups that were dropped for it.
        weight: what the mean over its groups is multiplied by, to be one over all groups made.
    """

    groups: tuple[ReadyGroup, ...]
    replaced: tuple[ReadyGroup, ...] = ()
    weight: float = 1.0

    def figures(self, report: StepReport) -> dict[str, float]:
        """The step's metrics of what was dropped for it."""
        made = len(self.groups) + len(self.replaced)
        live_share = report.metrics["live_sample_fraction"] * (len(self.groups) - len(report.dropped)) / made
        return {"replaced_groups": len(self.replaced), "live_sample_fraction_made": live_share}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The moments of a step, in seconds since 1970.

    Attributes:
        begun: the learner began to wait for a batch.
        waited: it had its batch.
        learned: it had taken its step.
        publishing: the actors had taken the version before.
        gathered: the new weights were gathered; the learner is free for the next step.
        published: the actors can fetch them.
    """

    begun: float
    waited: float
    learned: float
    publishing: float
    gathered: float
    published: float = 0.0


@dataclass(frozen=True, slots=True)
class EpisodesOfStep:
    """The episodes of the groups that were made since the step before, and how much the environment workers did."""

    figures: tuple["EpisodeFigures", ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Everything known of a step once the actors serve its weights, which are ``nbytes`` long.

    Attributes:
        episodes: None without a program.
    """

    step: int
    batch: Batch
    report: StepReport
    broadcast: BroadcastReport
    times: StepTimes
    nbytes: int
    ledger: dict[str, int]
    episodes: EpisodesOfStep | None = None


@dataclass(frozen=True, slots=True)
class SelectionState:
    """Where the selection of prompts is.

    Attributes:
        position: the next position of the order of prompts.
        rows: the row of the data that each open group has, by group id.
    """

    position: int = 0
    rows: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "SelectionState":
        """The state that `PromptSelection.state` returned, read from JSON."""
        return cls(int(state["position"]), {int(group): int(row) for group, row in state["rows"].items()})


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The state of a run between two steps.

    Attributes:
        step: steps done, which is also the version of actors and learner.
        refills: groups dropped before a batch took them; each was replaced by another group.
        dead_batches: batches without signal, counted back from this step.
        ready: the groups in flight that only wait to be trained on. The others in flight are made again.
        aside: ids of ready groups that wait aside, see `services.coordinator.refill`;
            None if the checkpoint does not say.
        dead: ids of dead ready groups that have slots.
        evaluated: whether the evaluation of this version, if one is due, was made.
        selection: where the selection of prompts is.
    """

    step: int
    ledger: Ledger
    refills: int
    dead_batches: int
    solve_rates: dict[str, SolveRate]
    ready: tuple[ReadyGroup, ...] = ()
    aside: frozenset[int] | None = frozenset()
    dead: frozenset[int] = frozenset()
    evaluated: bool = False
    selection: SelectionState = SelectionState()

    @classmethod
    def of(
        cls, step: int, state: Mapping[str, Any], ready: Sequence[ReadyGroup] = (), *, evaluated: bool = False
    ) -> "ResumePoint":
        """The resume point that `Coordinator` passed to `Hooks.begin_checkpoint` as ``state``.

        Args:
            evaluated: whether the evaluation of this version was made after the checkpoint.
        """
        rates = {prompt: SolveRate(*rate) for prompt, rate in state["solve_rates"].items()}
        ledger, refills = Ledger.of(state["ledger"]), int(state["refills"])
        dead_batches, evaluated = int(state["dead_batches"]), evaluated or bool(state.get("evaluated", True))
        selection = SelectionState.of(state["selection"]) if "selection" in state else SelectionState()
        aside, dead = frozenset(state["aside"]) if "aside" in state else None, frozenset(state.get("dead", ()))
        return cls(step, ledger, refills, dead_batches, rates, tuple(ready), aside, dead, evaluated, selection)

    @classmethod
    def start(cls) -> "ResumePoint":
        """The state before the first step."""
        return cls(0, Ledger(), 0, 0, {})


class Recorder(Protocol):
    """Receives every step and event, and writes files, streams and the display. ``details`` are JSON values."""

    async def step(self, finished: FinishedStep) -> None: ...

    async def event(self, kind: str, **details: object) -> None: ...

    async def dropped(self, group_id: int, prompt_id: str, step: int, reason: str, detail: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the coordinator calls besides the roles.

    Attributes:
        evaluate: called with a version at the job's evaluation steps; the actors serve that version until it returns.
        begin_checkpoint: called between steps, at the job's checkpoint steps and at the end, with the number of steps
            done, the JSON state for `ResumePoint.of`, and the groups that wait to be trained on; returns when the
            learner may take its next step.
        checkpoint_stored: called after it; returns when the checkpoint is complete.
        check_served: called after the first update that all actors took and before every checkpoint, while learner and
            actors hold the same version; returns the largest difference of a log-prob, in nats, or None if no
            actor could be checked, and raises `ServedWeightsDiffer` if it is more than rounding.
    """

    recorder: Recorder
    evaluate: Callable[[int], Awaitable[None]]
    begin_checkpoint: Callable[[int, dict[str, Any], list[ReadyGroup]], Awaitable[None]]
    checkpoint_stored: Callable[[], Coroutine[Any, Any, None]]
    check_served: Callable[[], Awaitable[float | None]]
