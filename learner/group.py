"""The learner as the coordinator sees it: all ranks together."""

import asyncio
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from learner.config import LearnerConfig
from learner.metrics import batch_metrics
from learner.ranks import Ranks
from learner.records import ScoredGroup, SFTRow, StepReport
from volley.errors import AccountingError, DeadlineExceeded, DiskFull, HostError, VolleyError
from volley.objectives import Objective
from volley.records import WeightUpdate, WorkerInfo
from volley.weight_group import WeightGroupTerms

START_SECONDS = 300.0


class LearnerGroup:
    """The ranks of one learner, and the calls that go to all of them.

    Every call may raise `WorkerDied` or `DeadlineExceeded`, naming a rank; the group is of no use afterwards but to
    be stopped.

    Attributes:
        weight_group: the one it sends through; None without one, or once that has lost a member.
    """

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config
        self._ranks = Ranks(config)
        self.weight_group: str | None = None

    @classmethod
    async def start(cls, config: LearnerConfig) -> "LearnerGroup":
        """Start ``config.learner.ranks`` ranks; returns when all hold the model. Ray must be initialised.

        Raises:
            JobError: the model does not load, or is of a type that can not be trained.
            HostError: the cluster has no room.
            WorkerDied, DeadlineExceeded: a rank ended or hung while starting.
        """
        group = cls(config)
        try:
            await group._ranks.open(START_SECONDS)
            first = group._ranks.processes[0]
            await group._ranks.call("start", "start", first.host, first.port, seconds=START_SECONDS)
        except BaseException:
            await group.stop()
            raise
        return group

    @property
    def failure(self) -> VolleyError | None:
        """How a rank ended or hung; from then on the group is of no use."""
        return self._ranks.failure

    async def step(
        self,
        batch: Sequence[ScoredGroup],
        *,
        version: int,
        objective: Objective | None = None,
        learning_rate: float | None = None,
        max_lag: int | None = None,
    ) -> StepReport:
        """One PPO step over ``batch``.

        Args:
            version: the learner's version before the step.
            objective: in place of the job's own, for schedules.
            learning_rate: in place of the schedule's.
            max_lag: in place of the job's own.

        Groups with a token older than the allowed lag are dropped with a reason, never trained on.

        Raises:
            AccountingError: no group is left.
            Diverged: a gradient is not finite.
        """
        objective = objective or self.config.objective
        if objective is None:
            raise ValueError("a learner for supervised steps takes no groups")
        dropped = stale(batch, version - (self.config.max_lag if max_lag is None else max_lag))
        kept = [scored for scored in batch if scored.meta.group_id not in dropped]
        if not kept:
            raise AccountingError(f"step {version}: every group is too old, {next(iter(dropped.values()), 'or none')}")
        dealt = deal([scored.meta.sample_tokens + scored.meta.prompt_tokens for scored in kept], self._size)
        calls = []
        for rank, share in zip(self._ranks.handles, dealt, strict=True):
            mine = [kept[index] for index in share]
            columns = [replace(scored, group=None) for scored in mine]
            groups = [scored.group for scored in mine]
            calls.append(rank.step.remote(columns, version, objective, learning_rate, *groups))
        reports = await self._ranks.gather(calls, f"step {version}", self._deadline)
        return _joined(reports, batch_metrics(kept, self.config.ks), dropped)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Every rank, in order."""
        return tuple(
            WorkerInfo(f"learner-{rank}", "serving", process.pid) for rank, process in enumerate(self._ranks.processes)
        )

    async def sft_step(self, rows: Sequence[SFTRow]) -> StepReport:
        """One supervised step over ``rows``: loss on the answers' tokens only. Raises `Diverged`."""
        dealt = deal([len(row.prompt_p) + len(row.answer_a) for row in rows], self._size)
        calls = [
            rank.sft_step.remote([rows[index] for index in share])
            for rank, share in zip(self._ranks.handles, dealt, strict=True)
        ]
        report: StepReport = (await self._ranks.gather(calls, "supervised step", self._deadline))[0]
        return report

    async def publish(self, version: int) -> WeightUpdate:
        """The current weights as ``version``, in Ray's object store and with the weight group."""
        await self.begin_publish(version)
        return await self.published(version)

    async def begin_publish(self, version: int) -> None:
        """Gather the current weights as ``version``; returns when the learner can go on. `published` tells the rest."""
        await self._ranks.call(f"publish {version}", "publish", version, seconds=self._deadline)

    async def published(self, version: int) -> WeightUpdate:
        """What `begin_publish` began, once all of it is stored; steps may be taken meanwhile."""
        awaited = f"weights {version} to be stored"
        update: WeightUpdate = await self._ranks.call_first(awaited, "published", version, seconds=self._deadline)
        if update.lost_group == self.weight_group:
            self.weight_group = None
        return update

    @property
    def rendezvous(self) -> tuple[str, int]:
        """Host and port at which the first rank takes members of weight groups."""
        first = self._ranks.processes[0]
        return first.host, first.port

    async def join_weight_group(self, terms: WeightGroupTerms) -> bool:
        """Send each version through this group too, from the next one on; False if it was not formed in time."""
        seconds = 3 * terms.deadline_s
        formed = await self._ranks.call_first("weight group", "join_weight_group", terms, seconds=seconds)
        self.weight_group = terms.name if formed else None
        return bool(formed)

    async def save(self, folder: Path, extra: Mapping[str, Any], files: Mapping[str, bytes] | None = None) -> None:
        """Write a resumable checkpoint to ``folder``: complete or absent, at every moment.

        Args:
            extra: what `load` gives back, JSON.
            files: laid beside the learner's own, by name.

        Raises:
            DiskFull: there is no room for it.
            HostError: it can not be written.
            DeadlineExceeded, WorkerDied: a rank hangs, or died.
        """
        aside = folder.with_name(f".{folder.name}.partial")
        try:
            await asyncio.to_thread(_fresh, aside)
            for name, content in (files or {}).items():
                await asyncio.to_thread((aside / name).write_bytes, content)
            problems = await self._ranks.call("checkpoint", "save", aside, dict(extra), seconds=self._deadline)
            if problem := next(filter(None, problems), ""):
                raise (DiskFull if "No space left" in problem else HostError)(f"checkpoint {folder}: {problem}")
            await asyncio.to_thread(_sync_and_rename, aside, folder)
        except DeadlineExceeded:  # a TimeoutError, and so an OSError
            raise
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise (DiskFull if full else HostError)(f"checkpoint {folder}: {error.strerror or error}") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)

    async def load(self, folder: Path) -> dict[str, Any]:
        """Take up the checkpoint in ``folder``, of any number of ranks; returns the ``extra`` it was saved with.

        Raises:
            JobError: it is of another model.
        """
        extra: dict[str, Any] = (await self._ranks.call("load checkpoint", "load", folder, seconds=self._deadline))[0]
        return extra

    async def export(self, folder: Path) -> Path:
        """Write the model to ``folder`` in Hugging Face format."""
        await self._ranks.call("export", "export", folder, seconds=self._deadline)
        return folder

    async def stop(self) -> None:
        """End every rank."""
        await self._ranks.stop()

    @property
    def _size(self) -> int:
        return self.config.learner.ranks

    @property
    def _deadline(self) -> float:
        return self.config.learner.step_deadline_s


def stale(batch: Sequence[ScoredGroup], oldest: int) -> dict[int, str]:
    """Which groups have a token older than version ``oldest``, and that as a reason."""
    return {
        scored.meta.group_id: f"its oldest token is of version {scored.meta.oldest_version}, allowed is {oldest}"
        for scored in batch
        if scored.meta.oldest_version < oldest
    }


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of ``costs`` dealt to ``ranks`` with near sums: largest first, each to the least laden rank."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    laden = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = laden.index(min(laden))
        shares[rank].append(index)
        laden[rank] += costs[index]
    return [sorted(share) for share in shares]


def _joined(reports: Sequence[StepReport], batch: Mapping[str, float], dropped: Mapping[int, str]) -> StepReport:
    lags: dict[int, int] = {}
    advantages: dict[int, Any] = {}
    dropped = dict(dropped)
    for report in reports:
        dropped.update(report.dropped)
        for lag, count in report.lag_histogram.items():
            lags[lag] = lags.get(lag, 0) + count
        advantages.update(report.advantages)
    return StepReport({**batch, **reports[0].metrics}, lags, advantages, dropped)


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _sync_and_rename(aside: Path, folder: Path) -> None:
    for file in (path for path in aside.rglob("*") if path.is_file()):
        _sync(file)
    _sync(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
