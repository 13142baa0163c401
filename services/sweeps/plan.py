"""What is left to do: a sweep file compared with the runs that exist."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from services.jobs.job_file import Job
from services.signals import StopSignal
from services.sweeps.spec import Member, Sweep
from volley.client.results import Metrics
from volley.errors import JobError

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Found:
    """A run of a sweep as it stands.

    Attributes:
        state: as in `volley.state.RunState`, or "" before the run has reported one.
        where: its folder, or its id in the service.
    """

    state: str
    problem: str
    job: Job
    where: str


@dataclass(frozen=True, slots=True)
class Records:
    """What a run has measured: metrics by step, and its evaluations by version."""

    metrics: Metrics
    evaluations: Sequence[Mapping[str, Any]]


class Runner(Protocol):
    """Where the runs of a sweep are made."""

    async def find(self, sweep: Sweep) -> dict[str, Found]:
        """Return the sweep's runs that exist, by name; also those that are no longer in its file."""
        ...

    def ready(self, members: Sequence[Member]) -> AbstractAsyncContextManager[None]:
        """What must be up while the members run."""
        ...

    async def run(self, member: Member, found: Found | None, stop_signal: StopSignal) -> Found:
        """Make the run, or resume the one that was found; return how it ended.

        Raises:
            VolleyError: it failed.
            CancelledError: ``stop_signal`` ended it; it can be resumed.
        """
        ...

    async def progress(self, member: Member) -> str:
        """What a run that is under way does, in a few words."""
        ...

    async def records(self, member: Member, found: Found) -> Records:
        """Return what the run has measured."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of a sweep by what is to be done with them.

    Attributes:
        gone: names of runs that exist and are no longer in the file; they are left alone.
    """

    done: tuple[Member, ...]
    failed: tuple[Member, ...]
    cut: tuple[Member, ...]
    new: tuple[Member, ...]
    gone: tuple[str, ...]

    def left(self, *, retry: bool) -> list[Member]:
        """The runs to make: those that were cut first, then new ones, and with ``retry`` those that failed."""
        return [*self.cut, *self.new, *(self.failed if retry else ())]

    def lines(self, *, retry: bool) -> list[str]:
        """What is to be done, for people."""
        total = sum(map(len, (self.done, self.failed, self.cut, self.new)))
        lines = [f"{total} runs: {len(self.done)} done, {len(self.cut)} to resume, {len(self.new)} to start"]
        if self.failed:
            lines[0] += f", {len(self.failed)} failed" + (" and made again" if retry else "")
        if self.new and (self.done or self.cut or self.failed):
            lines.append(f"new: {_some([each.name for each in self.new])}")
        if self.gone:
            lines.append(f"no longer in the file, left alone: {_some(self.gone)}")
        return lines


def plan(sweep: Sweep, found: Mapping[str, Found], *, retry: bool = False) -> Plan:
    """Compare a sweep with its runs that exist.

    Raises:
        JobError: the file has changed for some of them. With ``retry``, it may have for those that failed.
    """
    changed = [
        member
        for member in sweep.members
        if (run := found.get(member.name)) and run.job != member.job and not (retry and run.state == "failed")
    ]
    if changed:
        lines = [f"  {each.name}: {_difference(found[each.name].job, each.job)}" for each in changed[:SHOWN]]
        more = [f"  and {len(changed) - SHOWN} more"] if len(changed) > SHOWN else []
        advice = "write another name: into the file to make new runs, undo the change, or remove these runs"
        raise JobError("\n".join([f"{sweep.file} has changed for runs that exist: {advice}", *lines, *more]))
    by_state: dict[str, list[Member]] = {"done": [], "failed": [], "cut": [], "new": []}
    for member in sweep.members:
        run = found.get(member.name)
        kind = "new" if run is None else run.state if run.state in ("done", "failed") else "cut"
        by_state[kind].append(member)
    names = {member.name for member in sweep.members}
    gone = tuple(sorted(found.keys() - names))
    return Plan(**{kind: tuple(members) for kind, members in by_state.items()}, gone=gone)


def _difference(before: Job, now: Job) -> str:
    """The first keys that differ, as in ``optimizer.lr was 0.001, is 0.0001``."""
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    words = [f"{key} was {old.get(key)!r:.40}, is {new.get(key)!r:.40}" for key in keys[:2]]
    return "; ".join(words) + (f"; and {len(keys) - 2} more" if len(keys) > 2 else "")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
