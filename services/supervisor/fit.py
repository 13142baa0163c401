"""Whether the processes of a run fit on the nodes of a cluster: each process needs a node with room for all of it."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

from services.jobs.needs import Bundle
from services.supervisor.queue import ROUNDING, amount

MOST_STEPS = 20_000  # of the search; a run for which they do not suffice is taken to fit

Room = tuple[float, ...]  # amounts, in the order of the names of resources


def misfit(phases: Sequence[Sequence[Bundle]], nodes: Sequence[Mapping[str, float]]) -> str:
    """Say why a run never fits on the nodes, even while no other run uses them; "" if it fits.

    Args:
        phases: what it reserves in each phase, as from `services.jobs.needs.bundles_of`.
        nodes: the resources of each node.
    """
    reasons = (_obstacle(*_normalised(phase, nodes)) for phase in phases)
    return next(filter(None, reasons), "")


def _normalised(
    phase: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]
) -> tuple[tuple[Bundle, ...], tuple[str, ...], tuple[Room, ...]]:
    """Return bundles, the names of what they need, and the room of each node in that order: alike for like clusters."""
    names = tuple(sorted({name for bundle in phase for name, _ in bundle.amounts}))
    return tuple(phase), names, tuple(sorted(tuple(node.get(name, 0.0) for name in names) for node in nodes))


@functools.lru_cache(maxsize=1024)  # asked on every pass over the runs that wait
def _obstacle(bundles: Sequence[Bundle], names: Sequence[str], rooms: Sequence[Room]) -> str:
    needs = [tuple(dict(bundle.amounts).get(name, 0.0) for name in names) for bundle in bundles]
    for bundle, need in zip(bundles, needs, strict=True):
        each = _words(bundle)
        held = [_most(need, room, bundle.count) for room in rooms]
        if not any(held):
            return f"one {bundle.role} needs {each} on one node, and {_largest(names, need, rooms)}"
        if sum(held) < bundle.count:
            return f"needs {bundle.count} {bundle.role}s with {each} each, and the nodes hold {sum(held)}"
    if _packs(needs, [bundle.count for bundle in bundles], rooms):
        return ""
    wanted = ", ".join(f"{bundle.count} x {bundle.role} with {_words(bundle)}" for bundle in bundles)
    return f"needs {wanted}: the nodes do not hold these processes together"


def _largest(names: Sequence[str], need: Room, rooms: Sequence[Room]) -> str:
    for at, name in enumerate(names):
        largest = max((room[at] for room in rooms), default=0.0)
        if need[at] > largest + ROUNDING:
            return f"the largest has {amount(largest, name)}"
    return "no node has all of that"


def _words(bundle: Bundle) -> str:
    return " and ".join(amount(value, name) for name, value in bundle.amounts)


def _packs(needs: Sequence[Room], counts: Sequence[int], rooms: Sequence[Room]) -> bool:
    """Search for an assignment of all processes to nodes, node by node, fullest first."""
    stack, seen, steps = [(0, tuple(counts))], set(), 1
    while stack:
        at, left = state = stack.pop()
        if not any(left):
            return True
        if at == len(rooms) or state in seen:
            continue
        seen.add(state)
        for taken in itertools.islice(_fillings(needs, left, rooms[at]), MOST_STEPS - steps + 1):
            steps += 1
            stack.append((at + 1, tuple(have - took for have, took in zip(left, taken, strict=True))))
        if steps > MOST_STEPS:
            return True
    return False


def _fillings(needs: Sequence[Room], left: Sequence[int], room: Room) -> Iterator[tuple[int, ...]]:
    """How many processes of each kind one node may take; all fillings to which no process could be added, and more."""
    most = _most(needs[0], room, left[0])
    if len(needs) == 1:
        yield (most,)
        return
    for count in range(most + 1):
        rest = tuple(have - count * need for have, need in zip(room, needs[0], strict=True))
        for others in _fillings(needs[1:], left[1:], rest):
            yield count, *others


def _most(need: Room, room: Room, wanted: int) -> int:
    """How many of ``wanted`` processes fit into the room."""
    fits = (int((have + ROUNDING) // each) for have, each in zip(room, need, strict=True) if each)
    return max(0, min((wanted, *fits)))
