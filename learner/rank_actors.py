"""Creates the rank processes, calls them together, finds out why a call failed, and ends them."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from learner.config import LearnerConfig
from learner.rank import Rank, RankProcess
from volley.errors import DeadlineExceeded, HostError, VolleyError, WorkerDied
from volley.forking import ray_options
from volley.processes import death_cause, is_alive, last_lines
from volley.update import LearnerSpec

_T = TypeVar("_T")
DEATH_NOTICE_SECONDS = 10.0  # one rank's error may be caused by another's death, which Ray reports a little later
PULSE_SECONDS = 3.0
STOP_SECONDS = 2.0
POLL_SECONDS = 0.05
LOG_LINES = 12
CONCURRENCY = {"control": 1, "publish": 1, "store": 1, "join": 1, "checkpoint": 1}  # threads beside the one that trains


class RankActors:
    """One Ray actor per rank, in one placement group.

    Attributes:
        processes: the ranks' processes, in order; empty until `open` returns.
        failure: the death or hang of a rank, once there was one.
    """

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
        """Wait until every rank has a process.

        Raises:
            HostError: the cluster lacks the resources.
            WorkerDied, DeadlineExceeded: a rank ended or hung.
        """
        ends = time.monotonic() + seconds
        while placement_group_table(self._placement)["state"] != "CREATED":
            if time.monotonic() > ends:
                raise HostError(self._too_few_resources(seconds))
            await asyncio.sleep(POLL_SECONDS)
        self.processes = await self.call("start", "open", seconds=ends - time.monotonic())

    async def call(self, awaited: str, method: str, *arguments: object, seconds: float) -> list[Any]:
        """Make the same call on every rank; returns the results in rank order. Raises whatever `gather` raises."""
        return await self.gather([getattr(each, method).remote(*arguments) for each in self.handles], awaited, seconds)

    async def call_first(self, awaited: str, method: str, *arguments: object, seconds: float) -> Any:
        """Make a call on rank 0 only. Raises whatever `gather` raises, and `WorkerDied` if it was stopped."""
        if not self.handles:
            raise WorkerDied(_name(0), "it was stopped")
        return (await self.gather([getattr(self.handles[0], method).remote(*arguments)], awaited, seconds))[0]

    async def gather(self, calls: Sequence[Awaitable[_T]], awaited: str, seconds: float) -> list[_T]:
        """Await calls to the ranks; ``calls[r]`` was made on rank r.

        Args:
            awaited: what is waited for, in errors.

        Raises:
            VolleyError: raised by a rank on purpose.
            WorkerDied: a rank ended or failed; names that rank, not one that failed because of it.
            DeadlineExceeded: no result within ``seconds``; names the ranks that are stopped, else all that were late.
        """
        tasks = [asyncio.ensure_future(_answer(call)) for call in calls]
        try:
            _, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in tasks):
                raise self._failed(await self._explained(tasks))
            if pending:
                names = await self._stopped([index for index, task in enumerate(tasks) if task in pending])
                late = DeadlineExceeded("coordinator", f"{', '.join(map(_name, names))}: {awaited}", seconds)
                raise self._failed(late)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """End every rank, including stopped processes."""
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

    # ---- why a call failed -------------------------------------------------------------------------------------

    async def _explained(self, tasks: Sequence["asyncio.Future[_T]"]) -> BaseException:
        """Choose the error to raise: first a rank's death, then a `VolleyError`, then any other."""
        ends = time.monotonic() + DEATH_NOTICE_SECONDS
        while True:
            errors = {index: error for index, task in enumerate(tasks) if task.done() and (error := task.exception())}
            for index, error in errors.items():
                if isinstance(error, RayActorError):
                    return self._died(index, death_cause(str(error)))
            for error in errors.values():
                if isinstance(error, RayTaskError) and isinstance(error.cause, VolleyError):
                    return error.cause
            waiting = [task for task in tasks if not task.done()]
            if not waiting or time.monotonic() > ends:
                index, error = next(iter(errors.items()))
                cause = error.cause if isinstance(error, RayTaskError) else error
                await asyncio.to_thread(self._keep, index, str(error))
                return self._died(index, f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}")
            await asyncio.wait(waiting, timeout=max(0.0, ends - time.monotonic()), return_when=asyncio.FIRST_COMPLETED)

    def _keep(self, rank: int, traceback: str) -> None:
        """Add the traceback of an unexpected error to the rank's log, which has only what the rank printed."""
        with self._log(rank).open("a") as log:
            log.write(traceback)

    async def _stopped(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those of ``ranks`` whose process does not answer even a `pulse`; all of them if all answer."""
        tasks = [asyncio.ensure_future(_answer(self.handles[rank].pulse.remote())) for rank in ranks]
        _, pending = await asyncio.wait(tasks, timeout=PULSE_SECONDS)
        for task in pending:
            task.cancel()
        return [rank for rank, task in zip(ranks, tasks, strict=True) if task in pending] or ranks

    def _died(self, rank: int, cause: str) -> WorkerDied:
        return WorkerDied(_name(rank), cause, last_lines(self._log(rank), LOG_LINES))

    def _too_few_resources(self, seconds: float) -> str:
        spec = self.config.learner
        gpus = f" and {spec.gpus_per_rank:g} GPU" if spec.gpus_per_rank else ""
        free = ray.available_resources()
        return (
            f"{spec.ranks} learner rank(s) of {spec.cpus_per_rank:g} CPU{gpus} each could not be placed in "
            f"{seconds:g} s: the cluster has {free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU free; lower "
            "learner.ranks, learner.cpus_per_rank or learner.gpus_per_rank, or add nodes"
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
                **(ray_options() if not spec.gpus_per_rank else {}),
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


async def _answer(call: Awaitable[_T]) -> _T:
    return await call


async def _end(pid: int) -> None:
    """Give the process ``STOP_SECONDS`` to end as Ray asked, then kill it: a stopped process ends no other way."""
    for _ in range(round(STOP_SECONDS / POLL_SECONDS)):
        if not is_alive(pid):
            return
        await asyncio.sleep(POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _name(rank: int) -> str:
    return f"learner-{rank}"
