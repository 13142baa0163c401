"""What a run of any kind does when its user stops it, and when the desired state cannot be read."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.jobs.needs import Needs, needs_of
from services.runs import context as module
from services.runs.context import Context, run_until_stopped, start_turn
from services.store.desired import newest_desired, write_desired
from services.store.folder import RunFolder
from services.store.redis import Store
from tests.unit.fake_roles import until
from tests.unit.fake_runs import SmallFolder, context_in
from volley.errors import HostError, RunStopped
from volley.job import SFTJob
from volley.state import Desired

JOB = SFTJob.model_validate(
    {"kind": "sft", "name": "s", "steps": 1, "rows_per_step": 1, "model": {"path": "/m"}, "data": {"path": "/d"}}
)


class Away:
    """A Redis that holds leases and answers nothing else."""

    async def desired(self, _run_id: str) -> Desired:
        raise HostError("away")

    async def lease(self, *_: object) -> bool:
        return True

    async def release(self, *_: object) -> None: ...


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    folder = SmallFolder.create(tmp_path, JOB)
    away: Any = Away()
    return replace(context_in(folder, JOB)[0], store=away)


async def test_an_invalid_desired_state_is_reported_and_the_run_goes_on(context: Context) -> None:
    work = asyncio.Event()
    run = asyncio.ensure_future(run_until_stopped(context, wait(work)))
    file = context.folder.path / "desired.json"
    for invalid in (b"{}}", b'{"revision": -1}', b'{"unknown": 1}', b"\xff"):
        file.write_bytes(invalid)
        await reports(context, "cannot be applied")
        write_desired(context.folder, Desired())
        await reports(context, "")
    assert not run.done()
    work.set()
    await run


async def test_the_run_stops_once_the_state_is_valid_and_says_so(context: Context) -> None:
    run = asyncio.ensure_future(run_until_stopped(context, wait(asyncio.Event())))
    (context.folder.path / "desired.json").write_text("")
    await reports(context, "cannot be applied")
    write_desired(context.folder, Desired(revision=1, stopped=True))
    with pytest.raises(RunStopped):
        await asyncio.wait_for(run, 20)


async def test_another_problem_is_neither_hidden_nor_removed(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = 0

    async def counted(folder: RunFolder, store: Store) -> Desired:
        nonlocal polls
        polls += 1
        return await newest_desired(folder, store)

    async def polled() -> None:
        """Wait until a poll that begins after this call has ended."""
        seen = polls
        await until(lambda: polls >= seen + 3)

    monkeypatch.setattr(module, "newest_desired", counted)
    work = asyncio.Event()
    run = asyncio.ensure_future(run_until_stopped(context, wait(work)))
    context.status.set(problem="the disk is full")
    for _ in range(2):
        (context.folder.path / "desired.json").write_text("")
        await polled()
        write_desired(context.folder, Desired())
        await polled()
        assert context.status.observed.problem == "the disk is full"
    (context.folder.path / "desired.json").write_text("")
    await polled()
    context.status.set(problem="")
    await reports(context, "cannot be applied")
    work.set()
    await run


async def test_a_state_in_redis_that_is_invalid_ends_no_run(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    async def invalid(_run_id: str) -> Desired:
        return Desired.model_validate({"unknown": 1})

    work = asyncio.Event()
    monkeypatch.setattr(context.store, "desired", invalid)
    run = asyncio.ensure_future(run_until_stopped(context, wait(work)))
    await reports(context, "cannot be applied")
    work.set()
    await run


async def test_a_run_that_waits_for_resources_outlives_an_invalid_state(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = ["needs 1 GPU"]

    class Reservation:
        def __init__(self, _needs: Needs) -> None: ...

        def lacking(self) -> str:
            return "; ".join(lacking)

        def leave(self) -> None: ...

    async def start() -> None:
        async with start_turn(context, needs_of(JOB)):
            pass

    monkeypatch.setattr(module, "ClusterReservation", Reservation)
    run = asyncio.ensure_future(start())
    await reports(context, "needs 1 GPU")
    (context.folder.path / "desired.json").write_text("")
    printed: list[str] = []
    monkeypatch.setattr(context.display, "say", printed.append)
    await until(lambda: any("cannot be applied" in line for line in printed))
    lacking.clear()
    await asyncio.wait_for(run, 20)
    assert context.status.observed.problem == ""


async def wait(event: asyncio.Event) -> None:
    await event.wait()


async def reports(context: Context, problem: str) -> None:
    """Wait until the run reports ``problem``, or none if it is ""."""

    def reported() -> bool:
        seen = context.status.observed.problem
        return problem in seen if problem else not seen

    await until(reported)
