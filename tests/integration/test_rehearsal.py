"""A cluster on one machine, through the REST API alone; for root each node has an address of its own."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.rehearsal.places import OneAddress, Places, namespaces
from benchmarks.rehearsal.run import rehearse

pytestmark = pytest.mark.integration


@pytest.fixture
def places() -> Iterator[Places]:
    """Network namespaces where the kernel lets us, else one address for all: the run goes through the same."""
    with ExitStack() as stack:
        try:
            there: Places = stack.enter_context(namespaces())
        except RuntimeError:
            there = OneAddress()
        yield there


def test_a_run_is_scaled_role_by_role_and_outlives_the_actors_node(places: Places) -> None:
    said: list[str] = []
    rehearse(places, 300, said.append)
    assert said[-1] == "everything has ended"
    assert sum(line.startswith("PATCH") for line in said) == 4
