"""Objectives over k samples: advantages, unbiased metrics, schedules. Needs only NumPy and pydantic.

    from volley.objectives import advantages
    advantages(rewards, {"kind": "max_at_k", "k": 8})    # [..., n] -> [..., n]

spec        the objectives and their configuration      groups       masks and per-group k, cut into dense buckets
estimators  advantages() for every objective            maximum      max@k; off_policy: with importance weights
metrics     pass@k, max@k, maj@k, intervals             majority     maj@k; majority_off_policy, vote_polynomials
tries       k, or a weight for each of several k             ranked       best of k by rank; ranked_off_policy
schedule    objectives that change                      shapes       softmax, analytic pass@k, MaxRL, risk-sensitive
signal      what a prompt's next group may teach

docs/objectives.md has the formulas, their sources, and what is unbiased for what.
"""

from volley.objectives.estimators import AdvantageReport, DropReason, advantage_report, advantages
from volley.objectives.metrics import best_of_k, bootstrap_interval, maj_at_k, max_at_k, pass_at_k
from volley.objectives.schedule import (
    AdaptiveK,
    Schedule,
    SolveRate,
    SolveRateRule,
    Stage,
    adaptive_k,
    check_schedule,
    resolve,
    visited,
    with_changes,
)
from volley.objectives.signal import group_signal
from volley.objectives.spec import (
    BestOfK,
    MajAtK,
    MaxAtK,
    MaxRL,
    Mean,
    Objective,
    ObjectiveBase,
    ObjectiveWithK,
    OverTries,
    PassAtKAnalytic,
    RiskSensitive,
    Softmax,
    check_objective,
    leave_p_out,
    parse_objective,
)

__all__ = [
    "AdaptiveK",
    "AdvantageReport",
    "BestOfK",
    "DropReason",
    "MajAtK",
    "MaxAtK",
    "MaxRL",
    "Mean",
    "Objective",
    "ObjectiveBase",
    "ObjectiveWithK",
    "OverTries",
    "PassAtKAnalytic",
    "RiskSensitive",
    "Schedule",
    "Softmax",
    "SolveRate",
    "SolveRateRule",
    "Stage",
    "adaptive_k",
    "advantage_report",
    "advantages",
    "best_of_k",
    "bootstrap_interval",
    "check_objective",
    "check_schedule",
    "group_signal",
    "leave_p_out",
    "maj_at_k",
    "max_at_k",
    "parse_objective",
    "pass_at_k",
    "resolve",
    "visited",
    "with_changes",
]
