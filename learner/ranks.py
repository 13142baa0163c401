"""The rank processes: created, called together, watched, and ended together."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from learner.config import LearnerConfig
from learner.rank import Rank, RankProcess
from volley.errors import DeadlineExceeded, HostError, VolleyError, WorkerDied
from volley.update import LearnerSpec

DEATH_NOTICE_SECONDS = 10.0  # a rank's error may be its peer's death; Ray tells of that a little later
PULSE_SECONDS = 3.0
STOP_SECONDS = 2.0
POLL_SECONDS = 0.05
LOG_LINES = 12
CONCURRENCY = {"control": 1, "publish": 1, "join": 1}  # threads beside the one that learns


class Ranks:
    """One Ray actor for each rank, in one placement group."""

    def __init__(self, config: LearnerConfig) -> None:
        spec = config.learner
        self.config = config
        self._placement = placement_group(
            [_reserved(spec)] * spec.ranks,
            strategy="PACK",
        )
        self.handles = [self._create(rank) for rank in range(spec.ranks)]
        self.processes: list[RankProcess] = []
        self.failure: VolleyError | None = None

    async def open(self, seconds: float) -> None:
        """Wait until every rank is a process.

        Raises:
            HostError: the cluster has no room for them.
            WorkerDied, DeadlineExceeded: a rank ended or hung.
        """
        ends = time.monotonic() + seconds
        while placement_group_table(self._placement)["state"] != "CREATED":
            if time.monotonic() > ends:
                raise HostError(self._no_room(seconds))
            await asyncio.sleep(POLL_SECONDS)
        self.processes = await self.call("start", "open", seconds=ends - time.monotonic())

    async def call(self, awaited: str, method: str, *arguments: Any, seconds: float) -> list[Any]:
        """The same call on every rank; their answers in order. Raises as `gather` does."""
        return await self.gather([getattr(each, method).remote(*arguments) for each in self.handles], awaited, seconds)

    async def call_first(self, awaited: str, method: str, *arguments: Any, seconds: float) -> Any:
        """A call on rank 0 alone, beside whatever it does. Raises as `gather` does."""
        return (await self.gather([getattr(self.handles[0], method).remote(*arguments)], awaited, seconds))[0]

    async def gather(self, calls: Sequence[Any], awaited: str, seconds: float) -> list[Any]:
        """The answers to ``calls``, one a rank, of the first ranks or all.

        Raises:
            VolleyError: what a rank raised on purpose.
            WorkerDied: a rank ended or failed; named is the one that did, not one that missed it.
            DeadlineExceeded: no answers within ``seconds``; stopped ranks are named, or else all that were awaited.
        """
        tasks = [asyncio.ensure_future(_answer(call)) for call in calls]
        try:
            _, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in tasks):
                raise self._failed(await self._explained(tasks))
            if pending:
                names = await self._silent([index for index, task in enumerate(tasks) if task in pending])
                late = DeadlineExceeded("coordinator", f"{', '.join(map(_name, names))}: {awaited}", seconds)
                raise self._failed(late)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """End every rank, stopped ones too."""
        handles, self.handles = self.handles, []
        for handle in handles:
            ray.kill(handle)
        remove_placement_group(self._placement)
        here = ray.get_runtime_context().get_node_id()
        processes, self.processes = self.processes, []
        await asyncio.gather(*(_end(process.pid) for process in processes if process.node == here))

    def _failed(self, error: BaseException) -> BaseException:
        if isinstance(error, WorkerDied | DeadlineExceeded):
            self.failure = error
        return error

    # ---- what went wrong ---------------------------------------------------------------------------------------

    async def _explained(self, tasks: Sequence["asyncio.Future[Any]"]) -> BaseException:
        """The error to raise: a death before an error on purpose before any other."""
        ends = time.monotonic() + DEATH_NOTICE_SECONDS
        while True:
            errors = {index: error for index, task in enumerate(tasks) if task.done() and (error := task.exception())}
            for index, error in errors.items():
                if isinstance(error, RayActorError):
                    return self._died(index, " ".join(str(error).split())[:200])
            for error in errors.values():
                if isinstance(error, RayTaskError) and isinstance(error.cause, VolleyError):
                    return error.cause
            waiting = [task for task in tasks if not task.done()]
            if not waiting or time.monotonic() > ends:
                index, error = next(iter(errors.items()))
                cause = error.cause if isinstance(error, RayTaskError) else error
                return self._died(index, f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}")
            await asyncio.wait(waiting, timeout=max(0.0, ends - time.monotonic()), return_when=asyncio.FIRST_COMPLETED)

    async def _silent(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those of ``ranks`` whose process does not answer at all; all of them where all answer."""
        tasks = [asyncio.ensure_future(_answer(self.handles[rank].pulse.remote())) for rank in ranks]
        _, silent = await asyncio.wait(tasks, timeout=PULSE_SECONDS)
        for task in silent:
            task.cancel()
        return [rank for rank, task in zip(ranks, tasks, strict=True) if task in silent] or ranks

    def _died(self, rank: int, cause: str) -> WorkerDied:
        return WorkerDied(_name(rank), cause, _tail(self._log(rank)))

    def _no_room(self, seconds: float) -> str:
        spec = self.config.learner
        gpus = f" and {spec.gpus_per_rank:g} GPU" if spec.gpus_per_rank else ""
        free = ray.available_resources()
        return (
            f"no room for {spec.ranks} learner rank(s) of {spec.cpus_per_rank:g} CPU{gpus} each after {seconds:g} s; "
            f"the cluster has {free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU free: lower learner.ranks, "
            "learner.cpus_per_rank or learner.gpus_per_rank, or add nodes"
        )

    # ---- processes ---------------------------------------------------------------------------------------------

    def _create(self, rank: int) -> Any:
        spec = self.config.learner
        return (
            ray.remote(concurrency_groups=CONCURRENCY)(Rank)
            .options(
                name=f"{self.config.prefix}{_name(rank)}",
                num_cpus=spec.cpus_per_rank,
                num_gpus=spec.gpus_per_rank,
                resources=spec.resources_per_rank,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=rank
                ),
            )
            .remote(self.config, rank, self._log(rank))
        )

    def _log(self, rank: int) -> Path:
        return self.config.log_dir / f"{_name(rank)}.log"


def _reserved(spec: LearnerSpec) -> dict[str, float]:
    gpus = {"GPU": spec.gpus_per_rank} if spec.gpus_per_rank else {}
    return {"CPU": spec.cpus_per_rank, **gpus, **spec.resources_per_rank}


async def _answer(call: Awaitable[Any]) -> Any:
    return await call


async def _end(pid: int) -> None:
    """Give the process a moment to obey Ray, then kill it: a stopped one obeys nothing else."""
    for _ in range(round(STOP_SECONDS / POLL_SECONDS)):
        if not _alive(pid):
            return
        await asyncio.sleep(POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    """Is there such a process, and not only what is left of it until its parent looks?"""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _name(rank: int) -> str:
    return f"learner-{rank}"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]) if log.exists() else ""
