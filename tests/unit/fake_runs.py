"""What a run of any kind works with, on a disk that tests fill."""

import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.control.heartbeat import Status
from services.jobs.job_file import Job
from services.recording.display import Display
from services.recording.recorder import RunRecorder
from services.recording.sinks.sinks import Sinks
from services.runs.context import Context
from services.store.folder import RunFolder
from tests.refs import NOT_STORED
from volley.state import Observed


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@dataclass(frozen=True, slots=True)
class SmallFolder(RunFolder):
    """A run folder whose disk is full while ``full`` has an item."""

    full: list[bool] = field(default_factory=list)

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        self._check()
        RunFolder.append(self, name, rows)

    def rewind(self, step: int, *, samples: bool = True) -> None:
        self._check()
        RunFolder.rewind(self, step, samples=samples)

    def _check(self) -> None:
        if self.full:
            raise no_space()


class FakeOutbox:
    """Keeps what is sent to Redis."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.steps: list[Mapping[str, Any]] = []
        self.states: list[str] = []

    def add(self, stream: str, *entries: dict[str, Any]) -> None:
        if stream == "events":
            self.events += entries

    def step(self, row: Mapping[str, Any], _ledger: object) -> None:
        self.steps.append(row)

    def observed(self, observed: Observed) -> None:
        if self.states[-1:] != [observed.state]:
            self.states.append(observed.state)


def context_in(folder: RunFolder, job: Job) -> tuple[Context, FakeOutbox]:
    """The context of a run of ``job`` without Redis, and what it sends there."""
    outbox, display = FakeOutbox(), Display(quiet=True)
    kept: Any = outbox
    status = Status(kept, Observed())
    recorder = RunRecorder(folder, kept, display, samples_kept=0, on_full=status.pause)

    async def report(problem: str) -> None:
        raise AssertionError(problem)

    recorder.sinks = sinks = Sinks(job, folder, report)
    return Context(folder, NOT_STORED, kept, display, status, sinks, recorder), outbox
