"""What the pool knows of its workers: the episodes they have, which of them has room, and how much they were used.

A worker reports which episodes have ended with the outcomes of every group, and when the pool asks. In between, they
count as running.
"""

import heapq
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import ray

from actors.dealing import LeastLoaded
from environments.records import Usage


@dataclass(eq=False, slots=True)
class EnvironmentHandle:
    """One worker.

    Attributes:
        room: how many episodes it runs at once.
        left: how many episodes have not ended of each of its groups, by the group's number; ``episodes`` of all.
        heard: when it last reported, on the clock of `time.monotonic`.
        stuck: why it must be replaced although it lives; "" if it need not be.
    """

    index: int
    name: str
    actor: ray.actor.ActorHandle
    room: int
    pid: int = 0
    left: dict[int, int] = field(default_factory=dict)
    episodes: int = 0
    heard: float = 0.0
    stuck: str = ""
    retired: bool = False
    closing: bool = False

    @property
    def samples(self) -> int:
        """Those in flight."""
        return self.episodes

    @property
    def running(self) -> int:
        """Number of episodes that run; the others wait in the worker."""
        return min(self.episodes, self.room)


class Loads:
    """The workers that run programs, by index, and their episodes."""

    def __init__(self) -> None:
        self.workers: dict[int, EnvironmentHandle] = {}
        self._dealing: LeastLoaded[EnvironmentHandle] = LeastLoaded()  # those of them that take groups
        self._room = self._running = 0  # of `workers`
        self._numbers = itertools.count()
        self._usage, self._noted = Usage(), time.monotonic()

    def add(self, worker: EnvironmentHandle) -> None:
        """Let the worker take groups."""
        self._note_usage()
        self.workers[worker.index] = worker
        self._room += worker.room
        self._dealing.add(worker)

    def shut(self, worker: EnvironmentHandle) -> None:
        """Give the worker no further group."""
        self._dealing.remove(worker)

    def remove(self, worker: EnvironmentHandle) -> None:
        """Give the worker no further group, and count it and its episodes no longer."""
        self._note_usage()
        self.shut(worker)
        del self.workers[worker.index]
        self._room -= worker.room
        self._running -= worker.running

    def clear(self) -> None:
        """Remove all workers."""
        for worker in tuple(self.workers.values()):
            self.remove(worker)

    def free(self) -> EnvironmentHandle | None:
        """The least loaded worker, if one more episode can start on it at once."""
        worker = self._dealing.first() if self._dealing else None
        return worker if worker is not None and worker.episodes < worker.room else None

    def give(self, worker: EnvironmentHandle, episodes: int) -> int:
        """Note that the worker gets a group of this many episodes; returns the group's number."""
        number = next(self._numbers)
        if not worker.left:
            worker.heard = time.monotonic()  # of an idle worker all is known
        worker.left[number] = 0
        self._set_left(worker, number, episodes)
        return number

    def take_back(self, worker: EnvironmentHandle, number: int) -> None:
        """Note that a group has ended, however it did."""
        self._set_left(worker, number, 0)
        del worker.left[number]

    def note(self, worker: EnvironmentHandle, left: Mapping[int, int]) -> None:
        """Take a worker's report. Reports may arrive out of order, but what has ended stays so."""
        worker.heard = time.monotonic()
        for number, episodes in left.items():
            if episodes < worker.left.get(number, 0):
                self._set_left(worker, number, episodes)

    def unheard(self, seconds: float, most: int) -> list[EnvironmentHandle]:
        """The workers with episodes that did not report for ``seconds``, ``most`` of them at most, longest first."""
        before = time.monotonic() - seconds
        silent = (each for each in self.workers.values() if each.episodes and each.heard <= before)
        return heapq.nsmallest(most, silent, key=lambda worker: worker.heard)

    def usage(self) -> Usage:
        """How much the workers were used so far."""
        self._note_usage()
        return self._usage

    def _set_left(self, worker: EnvironmentHandle, number: int, episodes: int) -> None:
        more, before = episodes - worker.left[number], worker.running
        self._note_usage(ended=max(0, -more))
        worker.left[number] = episodes
        worker.episodes += more
        if self.workers.get(worker.index) is worker:
            self._running += worker.running - before
        self._dealing.lighter(worker)

    def _note_usage(self, ended: int = 0) -> None:
        """Count the time since the last call; called before episodes or workers change."""
        now = time.monotonic()
        seconds, self._noted = now - self._noted, now
        self._usage = Usage(
            self._usage.episodes + ended,
            self._usage.busy_seconds + seconds * self._running,
            self._usage.room_seconds + seconds * self._room,
        )
