import pytest

from services.coordinator.ledger import Ledger
from volley.errors import AccountingError


def test_every_group_has_one_end() -> None:
    ledger = Ledger()
    a, b, c = ledger.admit(), ledger.admit(), ledger.admit()
    ledger.train(a)
    ledger.drop(b, "too old")
    ledger.check()
    assert ledger.counts() == {"admitted": 3, "trained": 1, "dropped": 1, "in_flight": 1, "dead": 0}
    assert ledger.dropped == {"too old": 1}
    assert ledger.in_flight == {c}
    assert Ledger.of(ledger.state()) == ledger


def test_a_group_that_ended_cannot_end_again() -> None:
    ledger = Ledger()
    group = ledger.admit()
    ledger.train(group)
    with pytest.raises(AccountingError, match="has ended already"):
        ledger.drop(group, "again")


def test_a_lost_group_is_detected() -> None:
    ledger = Ledger()
    ledger.in_flight.discard(ledger.admit())
    with pytest.raises(AccountingError, match="admitted 1 != trained 0 \\+ dropped 0 \\+ in flight 0"):
        ledger.check()
