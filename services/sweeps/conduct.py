"""Makes the runs of a sweep, a few at a time. One that fails does not end the others; Ctrl-C leaves all resumable."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from services.recording.display import Display
from services.signals import StopSignal
from services.sweeps.plan import Found, Runner, plan
from services.sweeps.spec import Member, Sweep
from services.tasks import cancel_all
from volley.errors import VolleyError

POLL_SECONDS = 1.0


class SweepStop(StopSignal):
    """The first signal asks every run under way to stop at a checkpoint and lets no other begin; see `StopSignal`.

    Attributes:
        running: the tasks of the runs under way, with their member and their own stop signal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[asyncio.Task[Found], tuple[Member, StopSignal]] = {}

    def handle(self, cancel: Callable[[], object]) -> str:
        """Pass the signal on to every run; without one, cancel the work."""
        self.requested.set()
        self.signalled = True
        if not self.running:
            return super().handle(cancel)
        messages = [own.handle(task.cancel) for task, (_, own) in self.running.items()]
        return next(filter(None, messages), "")


async def conduct(
    sweep: Sweep, runner: Runner, display: Display, stop: SweepStop, *, retry: bool = False, at_most: int | None = None
) -> dict[str, Found]:
    """Make the runs that are missing; returns all that exist, by name.

    Args:
        retry: also make those again that failed.
        at_most: how many to make; None for all.

    Raises:
        JobError: the file has changed for runs that exist.
        HostError: there is no stack or service to run on.
        CancelledError: a signal stopped it; repeating the call continues.
    """
    found = await runner.find(sweep)
    what = plan(sweep, found, retry=retry)
    for line in what.lines(retry=retry):
        display.say(line)
    members = what.left(retry=retry)[:at_most]
    if members:
        async with runner.ready(members):
            with display.bar(f"{sweep.name} runs", len(sweep.members)) as bar:
                bar.go_to(len(what.done))
                found |= await _make(members, found, runner, display, stop, sweep.spec.at_once, bar.advance)
    if stop.requested.is_set():
        raise asyncio.CancelledError
    return found


async def _make(
    members: Sequence[Member],
    found: Mapping[str, Found],
    runner: Runner,
    display: Display,
    stop: SweepStop,
    at_once: int,
    advance: Callable[[], None],
) -> dict[str, Found]:
    """Run the members, ``at_once`` at a time, until all have ended or a stop is requested."""
    waiting, ended, running = deque(members), dict[str, Found](), stop.running
    try:
        while running or (waiting and not stop.requested.is_set()):
            while waiting and len(running) < at_once and not stop.requested.is_set():
                member, own = waiting.popleft(), StopSignal()
                task = asyncio.create_task(runner.run(member, found.get(member.name), own), name=member.name)
                running[task] = (member, own)
            finished, _ = await asyncio.wait(running, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                member, _ = running.pop(task)
                ended[member.name] = run = _outcome(task, member, found.get(member.name))
                if run.state == "done":
                    advance()
                display.say(f"{member.name}: {run.state}" + (f": {run.problem}" if run.problem else ""))
            doing = [f"{member.name} {await runner.progress(member)}" for member, _ in running.values()]
            display.idle("; ".join(doing))
    finally:
        await cancel_all(running)
        running.clear()
    return ended


def _outcome(task: asyncio.Task[Found], member: Member, before: Found | None) -> Found:
    """How a run ended. What went wrong in it is reported and does not end the sweep."""
    where = before.where if before else ""
    if task.cancelled():
        return Found("interrupted", "", member.job, where)
    match task.exception():
        case None:
            return task.result()
        case VolleyError() as error:
            return Found("failed", str(error), member.job, where)
        case Exception() as error:
            return Found("failed", f"unexpected {type(error).__name__}: {error}", member.job, where)
        case error:
            raise error
