"""The watchdog's sentences, and the autoscaler's decisions."""

import pytest

from services.control.autoscale import WINDOW, Look, next_count
from services.coordinator.watchdog import Waits


def test_a_wait_is_described_while_it_lasts_and_reported_as_overdue_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("services.coordinator.watchdog.time.monotonic", lambda: now[0])
    waits, ready = Waits(), [0]
    with waits.record("learner", lambda: f"{ready[0]} of 8 groups"):
        assert "learner" in waits
        assert waits.sentences() == ()
        now[0] += 70
        ready[0] = 3
        assert waits.sentences() == ("learner has waited 70 s for 3 of 8 groups",)
        assert waits.overdue(60) == ["learner has waited 70 s for 3 of 8 groups"]
        assert waits.overdue(60) == []
    assert waits.sentences(0) == ()
    assert "learner" not in waits
    with waits.record("learner", lambda: "more"):
        now[0] += 61
        assert waits.overdue(60) == ["learner has waited 61 s for more"], "another wait is reported again"


@pytest.mark.parametrize(
    ("count", "waiting", "generating", "scoring", "wanted"),
    [
        pytest.param(2, 20, 9, 1, 3, id="starving for generation"),
        pytest.param(4, 30, 9, 1, 4, id="at the upper bound"),
        pytest.param(2, 20, 1, 9, 2, id="starving for scores: more actors would not help"),
        pytest.param(2, 5, 9, 1, 2, id="waiting sometimes"),
        pytest.param(3, 0, 9, 1, 2, id="never waits"),
        pytest.param(1, 0, 9, 1, 1, id="at the lower bound"),
    ],
)
def test_the_number_of_actors_follows_how_often_the_learner_waits(
    count: int, waiting: int, generating: int, scoring: int, wanted: int
) -> None:
    looks = [Look(i < waiting, generating, scoring) for i in range(WINDOW)]
    assert next_count(count, looks, low=1, high=4) == wanted
    assert next_count(count, looks[:-1], low=1, high=4) == count, "an incomplete window changes nothing"
