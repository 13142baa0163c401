"""A cluster rehearsed on one machine, used only through the REST API; as root each node has its own address."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.rehearsal.places import OneAddress, Places, namespaces
from benchmarks.rehearsal.run import rehearse

pytestmark = pytest.mark.integration


@pytest.fixture
def places() -> Iterator[Places]:
    """Network namespaces if the kernel allows them, otherwise one address for all nodes."""
    with ExitStack() as stack:
        try:
            there: Places = stack.enter_context(namespaces())
        except RuntimeError:
            there = OneAddress()
        yield there


def test_a_run_is_scaled_role_by_role_and_survives_losing_the_actors_node(places: Places) -> None:
    messages: list[str] = []
    rehearse(places, 150, messages.append)
    assert messages[-1] == "everything has ended"
    assert sum(line.startswith("PATCH") for line in messages) == 4
