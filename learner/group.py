"""The learner as the coordinator sees it: all ranks together."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from learner.config import LearnerConfig
from learner.metrics import batch_metrics
from learner.rank import Rank
from learner.records import ScoredGroup, SFTRow, StepReport
from volley.errors import DeadlineExceeded, WorkerDied
from volley.objectives import Objective
from volley.records import WeightUpdate

T = TypeVar("T")
START_SECONDS = 300.0
STOP_SECONDS = 10.0
LOG_LINES = 12


class LearnerGroup:
    """The ranks of one learner, and the calls that go to all of them."""

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config
        spec = config.learner
        self._placement = placement_group(
            [{"CPU": spec.cpus_per_rank, **({"GPU": spec.gpus_per_rank} if spec.gpus_per_rank else {})}] * spec.ranks,
            strategy="PACK",
        )
        self._ranks = [self._create(rank) for rank in range(spec.ranks)]

    @classmethod
    async def start(cls, config: LearnerConfig) -> "LearnerGroup":
        """Start ``config.learner.ranks`` ranks; returns when all hold the model. Ray must be initialised.

        Raises:
            JobError: the model does not load.
            WorkerDied, DeadlineExceeded: a rank ended or hung while starting.
        """
        group = cls(config)
        try:
            (address,) = await group._gather([group._ranks[0].address.remote()], "address", START_SECONDS)
            await group._call("start", "start", *address, seconds=START_SECONDS)
        except BaseException:
            await group.stop()
            raise
        return group

    async def step(
        self, batch: Sequence[ScoredGroup], *, version: int, objective: Objective | None = None
    ) -> StepReport:
        """One PPO step over ``batch``.

        Args:
            version: the learner's version before the step.
            objective: in place of the job's own, for schedules.

        Groups with a token older than the allowed lag are dropped with a reason, never trained on.
        """
        objective = objective or self.config.objective
        if objective is None:
            raise ValueError("a learner for supervised steps takes no groups")
        oldest = version - self.config.max_lag
        dropped = {
            scored.meta.group_id: f"its oldest token is of version {scored.meta.oldest_version}, allowed is {oldest}"
            for scored in batch
            if scored.meta.oldest_version < oldest
        }
        kept = [scored for scored in batch if scored.meta.group_id not in dropped]
        dealt = deal([scored.meta.sample_tokens + scored.meta.prompt_tokens for scored in kept], len(self._ranks))
        calls = []
        for rank, share in zip(self._ranks, dealt, strict=True):
            mine = [kept[index] for index in share]
            columns = [_without_reference(scored) for scored in mine]
            calls.append(rank.step.remote(columns, version, objective, *(scored.group for scored in mine)))
        reports = await self._gather(calls, f"step {version}", self.config.learner.step_deadline_s)
        return _joined(reports, batch_metrics(kept, self.config.ks), dropped)

    async def sft_step(self, rows: Sequence[SFTRow]) -> StepReport:
        """One supervised step over ``rows``: loss on the answers' tokens only."""
        dealt = deal([len(row.prompt_p) + len(row.answer_a) for row in rows], len(self._ranks))
        calls = [
            rank.sft_step.remote([rows[index] for index in share])
            for rank, share in zip(self._ranks, dealt, strict=True)
        ]
        reports = await self._gather(calls, "supervised step", self.config.learner.step_deadline_s)
        return reports[0]

    async def publish(self, version: int) -> WeightUpdate:
        """The current weights as ``version``, in Ray's object store."""
        update, *_ = await self._call("publish", f"publish {version}", version)
        assert isinstance(update, WeightUpdate)
        return update

    async def save(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write a resumable checkpoint to ``folder``: complete or absent, at every moment."""
        aside = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        await self._call("save", "checkpoint", aside, dict(extra))
        await asyncio.to_thread(_sync_and_rename, aside, folder)

    async def load(self, folder: Path) -> dict[str, Any]:
        """Take up the checkpoint in ``folder``; returns the ``extra`` it was saved with."""
        extra, *_ = await self._call("load", "load checkpoint", folder)
        return dict(extra)

    async def export(self, folder: Path) -> Path:
        """Write the model to ``folder`` in Hugging Face format."""
        await self._call("export", "export", folder)
        return folder

    async def stop(self) -> None:
        """End every rank."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray.kill(rank)
        remove_placement_group(self._placement)

    # ---- calls -------------------------------------------------------------------------------------------------

    def _create(self, rank: int) -> Any:
        spec = self.config.learner
        return (
            ray.remote(Rank)
            .options(
                name=f"{self.config.prefix}learner-{rank}",
                num_cpus=spec.cpus_per_rank,
                num_gpus=spec.gpus_per_rank,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=rank
                ),
            )
            .remote(self.config, rank, self._log(rank))
        )

    def _log(self, rank: int) -> Path:
        return self.config.log_dir / f"learner-{rank}.log"

    async def _call(self, method: str, awaited: str, *arguments: Any, seconds: float | None = None) -> list[Any]:
        """The same call on every rank; their answers in order."""
        calls = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        return await self._gather(calls, awaited, seconds or self.config.learner.step_deadline_s)

    async def _gather(self, calls: Sequence[Any], awaited: str, seconds: float) -> list[Any]:
        """Every rank's answer.

        Raises:
            WorkerDied: a rank ended; the first one that did is named.
            DeadlineExceeded: ranks did not answer within ``seconds``; they are named.
        """
        tasks = [asyncio.ensure_future(_answer(call)) for call in calls]
        done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        try:
            for task in done:
                if (error := task.exception()) is not None:
                    raise self._explained(tasks.index(task), error)
            if pending:
                names = ", ".join(f"learner-{index}" for index, task in enumerate(tasks) if task in pending)
                raise DeadlineExceeded("coordinator", f"{names}: {awaited}", seconds)
        finally:
            for task in pending:
                task.cancel()
        return [task.result() for task in tasks]

    def _explained(self, rank: int, error: BaseException) -> BaseException:
        if isinstance(error, RayTaskError):
            return error.cause if isinstance(error.cause, Exception) else error
        if isinstance(error, RayActorError):
            cause = " ".join(str(error).split())[:200]
            return WorkerDied(f"learner-{rank}", cause, _tail(self._log(rank)))
        return error


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of ``costs`` dealt to ``ranks`` with near sums: largest first, each to the least laden rank."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    laden = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = laden.index(min(laden))
        shares[rank].append(index)
        laden[rank] += costs[index]
    return [sorted(share) for share in shares]


async def _answer(call: Awaitable[T]) -> T:
    return await call


def _without_reference(scored: ScoredGroup) -> ScoredGroup:
    return replace(scored, group=None)


def _joined(reports: Sequence[StepReport], batch: Mapping[str, float], dropped: Mapping[int, str]) -> StepReport:
    lags: dict[int, int] = {}
    advantages: dict[int, Any] = {}
    for report in reports:
        for lag, count in report.lag_histogram.items():
            lags[lag] = lags.get(lag, 0) + count
        advantages.update(report.advantages)
    return StepReport({**batch, **reports[0].metrics}, lags, advantages, dropped)


def _sync_and_rename(aside: Path, folder: Path) -> None:
    for file in (path for path in aside.rglob("*") if path.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]) if log.exists() else ""
