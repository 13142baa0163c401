"""What the learner takes and gives back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from volley.records import GroupMeta


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group ready to be trained on.

    Attributes:
        group: reference to the `Group`'s arrays in Ray's object store.
        meta: its metadata.
        rewards_n: float64 [n]; NaN where the verdict bears no reward.
        valid_n: bool [n]; False where the sample leaves its group.
        answers_n: int32 [n]; equal for samples with equal answers.
        k: in place of the objective's, where k is adapted per prompt.
    """

    group: Any
    meta: GroupMeta
    rewards_n: NDArray[np.float64]
    valid_n: NDArray[np.bool_]
    answers_n: NDArray[np.int32]
    k: int | None = None


@dataclass(frozen=True, slots=True)
class SFTRow:
    """One supervised row: prompt token ids int32 [p], answer token ids int32 [a] closed by the end-of-text token."""

    prompt_p: NDArray[np.int32]
    answer_a: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    Attributes:
        metrics: by name; units and definitions in `volley.metrics`.
        lag_histogram: lag in versions -> tokens trained on.
        advantages: group id -> float64 [n], as they entered the loss.
        dropped: group id -> why it was not trained on.
    """

    metrics: Mapping[str, float]
    lag_histogram: Mapping[int, int] = field(default_factory=dict)
    advantages: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)
    dropped: Mapping[int, str] = field(default_factory=dict)
