"""What the learner takes and returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from volley.records import Group, GroupMeta
from volley.refs import Ref


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A scored group, ready to be trained on.

    Attributes:
        group: reference to the group; None on a rank, which gets the group itself beside this.
        meta: the group's metadata.
        rewards_n: float64 [n]; NaN where the verdict carries no reward.
        valid_n: bool [n]; False for samples dropped from the group.
        answers_n: int32 [n]; equal numbers for equal answers.
        k: replaces the objective's k for this group, where k is adapted per prompt.
        ranks_n: float64 [n], the scores that pick in `best_of_k`, NaN for samples without one; None if not needed.
        weight: what the group's part of the loss is multiplied by.
    """

    group: Ref[Group] | None
    meta: GroupMeta
    rewards_n: NDArray[np.float64]
    valid_n: NDArray[np.bool_]
    answers_n: NDArray[np.int32]
    k: int | None = None
    ranks_n: NDArray[np.float64] | None = None
    weight: float = 1.0


def _nothing() -> NDArray[np.int32]:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class SFTRow:
    """One supervised row.

    Attributes:
        prompt_p: int32 [p], prompt token ids.
        answer_a: int32 [a], answer token ids, the last one end-of-text.
        observed_s, observed_at_s: int32 [s], tokens observed within the answer, and the index in ``answer_a`` that each
            is placed before. They are context: the loss never predicts them.
    """

    prompt_p: NDArray[np.int32]
    answer_a: NDArray[np.int32]
    observed_s: NDArray[np.int32] = field(default_factory=_nothing)
    observed_at_s: NDArray[np.int32] = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one step.

    Attributes:
        metrics: by name; `volley.metrics` has their units and definitions.
        lag_histogram: tokens trained on, by lag in versions.
        advantages: float64 [n] by group id, as they entered the loss.
        dropped: by group id, why the group was not trained on.
    """

    metrics: Mapping[str, float]
    lag_histogram: Mapping[int, int] = field(default_factory=dict)
    advantages: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)
    dropped: Mapping[int, str] = field(default_factory=dict)

    @property
    def dead(self) -> set[int]:
        """The ids of groups whose advantages are all zero."""
        return {group_id for group_id, advantage_n in self.advantages.items() if not advantage_n.any()}
