"""The watchdog's words, and the autoscaler's decisions."""

import pytest

from services.autoscale import LOOKS, Look, next_count
from services.waits import Waits


def test_a_wait_is_told_of_while_it_lasts_and_as_an_event_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("services.waits.time.monotonic", lambda: now[0])
    book, ready = Waits(), [0]
    with book.on("learner", lambda: f"{ready[0]} of 8 groups"):
        assert "learner" in book
        assert book.words() == ()
        now[0] += 70
        ready[0] = 3
        assert book.words() == ("learner has waited 70 s for 3 of 8 groups",)
        assert book.overdue(60) == ["learner has waited 70 s for 3 of 8 groups"]
        assert book.overdue(60) == []
    assert book.words(0) == ()
    assert "learner" not in book
    with book.on("learner", lambda: "more"):
        now[0] += 61
        assert book.overdue(60) == ["learner has waited 61 s for more"], "another wait is told of again"


@pytest.mark.parametrize(
    ("count", "waiting", "generating", "scoring", "wanted"),
    [
        pytest.param(2, 20, 9, 1, 3, id="starving for generation"),
        pytest.param(4, 30, 9, 1, 4, id="at the upper bound"),
        pytest.param(2, 20, 1, 9, 2, id="starving for scores: more actors would not help"),
        pytest.param(2, 5, 9, 1, 2, id="neither hungry nor fed"),
        pytest.param(3, 0, 9, 1, 2, id="never waits"),
        pytest.param(1, 0, 9, 1, 1, id="at the lower bound"),
    ],
)
def test_actors_follow_the_learners_hunger(
    count: int, waiting: int, generating: int, scoring: int, wanted: int
) -> None:
    looks = [Look(i < waiting, generating, scoring) for i in range(LOOKS)]
    assert next_count(count, looks, low=1, high=4) == wanted
    assert next_count(count, looks[:-1], low=1, high=4) == count, "no decision on little"
