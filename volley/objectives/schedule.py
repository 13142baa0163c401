"""Objectives that change by step, per prompt, or by hand during a run.

These are pure functions: the caller owns the step, the solve rates and the manual changes, and checkpoints them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from volley.base import Spec
from volley.objectives.combinatorics import IntArray
from volley.objectives.spec import (
    Objective,
    ObjectiveBase,
    ObjectiveWithK,
    OverTries,
    check_objective,
    parse_objective,
    spare_samples,
)
from volley.objectives.tries import between, with_tries


class Stage(Spec):
    """Objective fields and their values from step `at` on: `{at: 1500, set: {k: 1}}`.

    With `over`, every weight moves in a straight line from its value at `at` to the new one at `at + over`; k: 8 counts
    as weights: {8: 1}.
    """

    at: Annotated[int, Field(ge=0)]
    set: dict[str, Any] = Field(min_length=1)
    over: int | None = Field(None, ge=1, description="steps that a change of k or weights takes; null: at once")

    @model_validator(mode="after")
    def _only_weights_change_gradually(self) -> Self:
        sudden = ", ".join(sorted(self.set.keys() - {"k", "weights", "order"}))
        if self.over is not None and sudden:
            raise ValueError(f"over: only k and weights change gradually; set {sudden} in a stage without over")
        return self

    @property
    def until(self) -> int:
        """The first step of the new values."""
        return self.at + (self.over or 0)


class SolveRateRule(Spec):
    """How the solve rates of prompts are recorded."""

    decay: float = Field(
        0.5, ge=0, le=1, description="each visit multiplies the weight of earlier ones by this; 1 weighs all equally"
    )
    solved_above: float = Field(0.0, description="a sample counts as solved if its reward is above this")


class AdaptiveK(SolveRateRule):
    """k of each prompt from its own solve rate p: `clip(round(1/p), min_k, max_k)`.

    The signal of max@k is densest where p is near 1/k (arXiv 2503.19595, section 3.1). Only earlier visits of a
    prompt count, because a k that depends on the samples it is applied to would bias the estimate.

    max_k: null means the largest k that the objective allows in a group of n.
    """

    min_k: Annotated[int, Field(ge=1)] = 1
    max_k: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.max_k is not None and self.max_k < self.min_k:
            raise ValueError(f"max_k {self.max_k} is below min_k {self.min_k}; swap them")
        return self


class Schedule(Spec):
    """How a job's objective changes over a run; the empty schedule keeps it constant.

    stages: fields by step, in order of `at`. PKPO's annealing (arXiv 2505.15201) is `[{at: 1500, set: {k: 1}}]`;
        `over` makes such a change gradual.
    adaptive_k: per-prompt k that replaces the objective's; prompts not seen before use the objective's k, within the
        rule's bounds.
    """

    stages: tuple[Stage, ...] = ()
    adaptive_k: AdaptiveK | None = None

    @model_validator(mode="after")
    def _stages_are_ordered(self) -> Self:
        for earlier, later in pairwise(self.stages):
            if later.at <= earlier.at:
                raise ValueError(f"stage at: {later.at} follows at: {earlier.at}; write stages in rising order of at")
            if later.at < earlier.until:
                raise ValueError(
                    f"stage at: {later.at} begins before the one at: {earlier.at} has ended; write at: {earlier.until} "
                    "or later, or a smaller over"
                )
        return self

    @property
    def turning_points(self) -> tuple[int, ...]:
        """Steps at which the objective's fields become others; between them only the weights move."""
        steps = {step for each in self.stages for step in (each.at, min(each.at + 1, each.until), each.until)}
        return tuple(sorted({0, *steps}))


@dataclass(frozen=True, slots=True)
class SolveRate:
    """Decayed counts of solved and of all valid samples of one prompt."""

    solved: float
    seen: float

    @property
    def value(self) -> float:
        """The share solved."""
        return self.solved / self.seen


def with_changes(objective: Objective, changes: Mapping[str, Any]) -> Objective:
    """The objective with some fields replaced.

    A new `kind` keeps only the fields that all kinds share; a new k replaces weights, and new weights replace k.

    Raises:
        pydantic.ValidationError (a ValueError): a field the kind does not have, or a value out of range.
    """
    kept = objective.model_dump()
    if changes.get("kind", objective.kind) != objective.kind:
        kept = {name: kept[name] for name in ObjectiveBase.model_fields}
    return parse_objective(with_tries(kept, changes) if isinstance(objective, OverTries) else {**kept, **changes})


def resolve(objective: Objective, schedule: Schedule, step: int, changes: Mapping[str, Any] | None = None) -> Objective:
    """The objective of a step: the job's, with every stage up to the step and then manual changes applied.

    Raises:
        ValueError: see `with_changes`; a gradual change of an objective without weights.
    """
    for stage in schedule.stages:
        if stage.at <= step:
            objective = _reached(objective, stage, step)
    return with_changes(objective, changes) if changes else objective


def _reached(before: Objective, stage: Stage, step: int) -> Objective:
    """The objective at a step of a stage, from the one before the stage."""
    after = with_changes(before, stage.set)
    if stage.over is None:
        return after
    if not isinstance(before, OverTries) or not isinstance(after, OverTries):
        raise ValueError(f"over: kind: {before.kind} has no weights that could change gradually; remove over")
    if step >= stage.until:
        return after
    share = (step - stage.at) / stage.over
    return with_changes(before, {"weights": between(before.terms, after.terms, share)}) if share else before


def check_schedule(objective: Objective, schedule: Schedule, n: int) -> None:
    """Refuse a schedule that reaches an invalid objective, or one without signal, at any step.

    Raises:
        ValueError: naming the stage, with the advice of `check_objective`.
    """
    check_objective(objective, n)
    job_objective = objective
    for stage in schedule.stages:
        try:
            objective = _reached(objective, stage, stage.until)
            check_objective(objective, n)
        except ValueError as error:
            raise ValueError(f"stage at: {stage.at}: {_advice(error)}") from error
    rule = schedule.adaptive_k
    if rule is None:
        return
    for at in schedule.turning_points:
        stage_objective = resolve(job_objective, schedule, at)
        if not isinstance(stage_objective, ObjectiveWithK):
            raise ValueError(
                f"adaptive_k needs an objective with k, but kind: {stage_objective.kind} at step {at} has none; "
                "drop adaptive_k or write kind: max_at_k"
            )
        if stage_objective.k is None:
            raise ValueError(
                f"adaptive_k chooses one k for each prompt, but the objective at step {at} has weights; drop "
                "adaptive_k, or write k in place of weights and no over"
            )
        if rule.min_k > n - spare_samples(stage_objective):
            raise ValueError(f"adaptive_k.min_k {rule.min_k} is too large for n={n}; lower it")


def _advice(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())


def visited(rate: SolveRate | None, rewards: Sequence[float], rule: SolveRateRule) -> SolveRate:
    """The solve rate of a prompt after one more group; `rewards` are those of its valid samples."""
    earlier = rate or SolveRate(0.0, 0.0)
    solved = sum(reward > rule.solved_above for reward in rewards)
    return SolveRate(rule.decay * earlier.solved + solved, rule.decay * earlier.seen + len(rewards))


def adaptive_k(objective: ObjectiveWithK, rule: AdaptiveK, rates: Sequence[SolveRate | None], n: int) -> IntArray:
    """The k of each group, [P], for `advantages(..., k=)`; a prompt without a rate keeps the objective's k,
    within the rule's bounds.

    Raises:
        ValueError: the objective has weights instead of k.
    """
    if objective.k is None:
        raise ValueError("adaptive_k chooses one k for each prompt, but the objective has weights; write k instead")
    own_k = objective.k
    largest = min(rule.max_k or n, n - spare_samples(objective))
    wanted = [_inverse(rate, n) if rate is not None and rate.seen > 0 else own_k for rate in rates]
    return np.clip(np.rint(wanted).astype(np.int64), min(rule.min_k, largest), largest)


def _inverse(rate: SolveRate, n: int) -> float:
    return n if rate.value * n <= 1 else 1 / rate.value
