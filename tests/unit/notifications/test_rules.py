"""When a rule fires: held against slow re-implementations, and on sequences where it matters."""

from hypothesis import given
from hypothesis import strategies as st

from services.notifications.rules import RuleState, take
from volley.webhooks import ChangeRule, LimitRule, MetricRule

VALUES = st.lists(st.integers(0, 6).map(lambda tenths: tenths / 8), max_size=40)
CHANGES = st.builds(
    ChangeRule,
    kind=st.sampled_from(["fell", "rose"]),
    metric=st.just("kl_k1"),
    by=st.sampled_from([0.125, 0.25, 0.5]),
    window=st.integers(1, 5),
)
LIMITS = st.builds(
    LimitRule,
    kind=st.sampled_from(["above", "below"]),
    metric=st.just("kl_k1"),
    limit=st.sampled_from([0.125, 0.25, 0.5]),
    window=st.integers(1, 5),
)


def firings(rule: MetricRule, values: list[float], state: RuleState | None = None) -> list[int]:
    """The positions at which the rule fires."""
    state, found = state or RuleState(), []
    for number, value in enumerate(values):
        state, finding = take(rule, RuleState.model_validate_json(state.model_dump_json()), number, value)
        if finding:
            found.append(number)
    return found


def holds(rule: MetricRule, values: list[float]) -> bool:
    """Whether a rule holds after ``values``, from its definition."""
    if isinstance(rule, LimitRule):
        if len(values) < rule.window:
            return False
        mean = sum(values[-rule.window :]) / rule.window
        return mean > rule.limit if rule.kind == "above" else mean < rule.limit
    before = values[:-1][-rule.window :]
    if rule.kind == "fell":
        return any(earlier - values[-1] >= rule.by for earlier in before)
    return any(values[-1] - earlier >= rule.by for earlier in before)


@given(st.one_of(CHANGES, LIMITS), VALUES)
def test_a_rule_fires_when_it_begins_to_hold_and_again_only_after_a_quiet_window(
    rule: MetricRule, values: list[float]
) -> None:
    expected: list[int] = []
    history = "." * rule.window  # one character per value: whether the rule held
    for number in range(len(values)):
        if holds(rule, values[: number + 1]):
            last = expected[-1] + rule.window if expected else 0
            if "." * rule.window in history[last:]:
                expected.append(number)
            history += "x"
        else:
            history += "."
    assert firings(rule, values) == expected


def test_a_metric_that_wavers_around_a_limit_is_reported_once() -> None:
    rule = LimitRule(kind="above", metric="kl_k1", limit=0.5, window=1)
    assert firings(rule, [0.4, 0.6, 0.6, 0.6]) == [1]
    steady = rule.model_copy(update={"window": 3})
    assert firings(steady, [0.4, 0.6, 0.6, 0.4, 0.5, 0.7, 0.4, 0.6]) == [2], "two quiet values are too few"
    assert firings(steady, [0.9, 0.9, 0.9, 0.0, 0.0, 0.0, 0.9, 0.9, 0.9]) == [2, 7]


def test_a_fall_is_reported_once_and_a_further_fall_after_it_again() -> None:
    rule = ChangeRule(kind="fell", metric="kl_k1", by=0.25, window=2)
    assert firings(rule, [0.75, 0.5, 0.5, 0.5, 0.5, 0.25]) == [1, 5]
    assert firings(rule, [0.75, 0.625, 0.5]) == [2], "a slow fall is one too"


def test_steps_that_a_resumed_run_repeats_replace_the_earlier_ones() -> None:
    rule = ChangeRule(kind="fell", metric="kl_k1", by=0.5, window=3)
    state = RuleState()
    for number, value in [(0, 0.2), (1, 0.9), (1, 0.2), (2, 0.3)]:
        state, finding = take(rule, state, number, value)
        assert finding is None, "0.9 was of a step that was done again"
    assert state.values == ((0, 0.2), (1, 0.2), (2, 0.3))
