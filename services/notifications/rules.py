"""When a rule on a metric fires: once when it begins to hold, and again only after it has clearly ceased to."""

from dataclasses import dataclass

from pydantic import Field

from volley.base import Spec
from volley.webhooks import ChangeRule, MetricRule


class RuleState(Spec):
    """What is remembered of one rule of one run."""

    values: tuple[tuple[int, float], ...] = Field((), description="newest values, each with its step or version")
    holds: bool = Field(False, description="it has fired, and has not ceased to hold since")
    quiet: int = Field(0, description="values in a row for which it did not hold since it fired")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule compared.

    Attributes:
        value: the newest value, or the mean of the newest ones.
        reference: the highest or lowest value before it, or the rule's limit.
    """

    value: float
    reference: float


def take(rule: MetricRule, state: RuleState, number: int, value: float) -> tuple[RuleState, Finding | None]:
    """Add a value to the state; return the new state, and what the rule found if it fires.

    A rule that has fired may fire again after it did not hold for ``window`` values in a row, so that a metric that
    wavers around a limit is reported once.

    Args:
        number: step, or version of an evaluation. A resumed run repeats some, which replace the earlier ones.
    """
    kept = tuple(each for each in state.values if each[0] < number)
    values = (*kept, (number, value))[-_needed(rule) :]
    finding, holds = _compare(rule, [each for _, each in values])
    if holds:
        return RuleState(values=values, holds=True), None if state.holds else finding
    quiet = state.quiet + 1
    if not state.holds or quiet >= rule.window:
        return RuleState(values=values), None
    return RuleState(values=values, holds=True, quiet=quiet), None


def _needed(rule: MetricRule) -> int:
    """How many of the newest values the rule looks at."""
    return rule.window + 1 if isinstance(rule, ChangeRule) else rule.window


def _compare(rule: MetricRule, values: list[float]) -> tuple[Finding | None, bool]:
    """What the rule finds in its newest values, oldest first, and whether it holds."""
    if isinstance(rule, ChangeRule):
        *before, newest = values
        if not before:
            return None, False
        reference = max(before) if rule.kind == "fell" else min(before)
        change = reference - newest if rule.kind == "fell" else newest - reference
        return Finding(newest, reference), change >= rule.by
    if len(values) < rule.window:
        return None, False
    mean = sum(values) / len(values)
    return Finding(mean, rule.limit), mean > rule.limit if rule.kind == "above" else mean < rule.limit
