"""The learner as the coordinator uses it: all ranks behind one set of calls."""

import asyncio
import shutil
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.config import LearnerConfig
from learner.metrics import batch_metrics
from learner.rank_actors import RankActors
from learner.records import ScoredGroup, SFTRow, StepReport
from volley.errors import AccountingError, DeadlineExceeded, DiskFull, HostError, VolleyError
from volley.files import empty_folder, is_full, partial_path, replace_folder
from volley.objectives import Objective
from volley.records import Group, WeightUpdate, WorkerInfo
from volley.refs import Ref
from volley.weight_group import WeightGroupTerms


@dataclass(frozen=True, slots=True)
class _Unsaved:
    """A checkpoint whose state the ranks have copied and not yet written."""

    folder: Path
    files: Mapping[str, bytes]


class LearnerPool:
    """The ranks of one learner.

    Every call may raise `WorkerDied` or `DeadlineExceeded`, naming a rank; afterwards the pool can only be stopped.

    Attributes:
        weight_group: name of the weight group it sends through; None without one, or once the group lost a member.
    """

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config
        self._ranks = RankActors(config)
        self.weight_group: str | None = None
        self._unsaved: _Unsaved | None = None

    @classmethod
    async def start(cls, config: LearnerConfig) -> "LearnerPool":
        """Start ``config.learner.ranks`` ranks and wait until all have loaded the model. Ray must be initialised.

        Raises:
            JobError: the model does not load, or its type cannot be trained.
            HostError: the cluster lacks the resources.
            WorkerDied, DeadlineExceeded: a rank ended or hung while starting.
        """
        pool = cls(config)
        try:
            await pool._ranks.open(config.learner.start_deadline_s)
            first = pool._ranks.processes[0]
            await pool._ranks.call("start", "start", first.host, first.port, seconds=config.learner.start_deadline_s)
        except BaseException:
            await pool.stop()
            raise
        return pool

    @property
    def failure(self) -> VolleyError | None:
        """The death or hang of a rank, after which the pool can only be stopped; None before."""
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
            objective: replaces the job's; used by schedules.
            learning_rate: replaces the schedule's.
            max_lag: replaces the job's.

        Groups with a token older than the allowed lag are dropped; the report says why.

        Raises:
            AccountingError: no group is left.
            Diverged: a gradient is not finite.
        """
        objective = objective or self.config.objective
        if objective is None:
            raise ValueError("the learner of a supervised job cannot train on groups")
        dropped = stale(batch, version - (self.config.max_lag if max_lag is None else max_lag))
        kept = [scored for scored in batch if scored.meta.group_id not in dropped]
        if not kept:
            why = next(iter(dropped.values()), "the batch is empty")
            raise AccountingError(f"step {version}: no group to train on: {why}")
        shares = self._shares([scored.meta.sample_tokens + scored.meta.prompt_tokens for scored in kept])
        calls = []
        for rank, share in zip(self._ranks.handles, shares, strict=True):
            mine = [kept[index] for index in share]
            columns = [replace(scored, group=None) for scored in mine]
            groups = [scored.group for scored in mine]
            calls.append(rank.step.remote(columns, version, objective, learning_rate, *groups))
        reports = await self._ranks.gather(calls, f"step {version}", self._deadline)
        own = reports[:: self.config.learner.sequence_parallel]  # one of each sequence group, whose reports are equal
        return _merged(own, batch_metrics(kept, self.config.ks), dropped)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """All ranks, in order."""
        return tuple(
            WorkerInfo(f"learner-{rank}", "serving", process.pid) for rank, process in enumerate(self._ranks.processes)
        )

    async def sft_step(self, rows: Sequence[SFTRow]) -> StepReport:
        """One supervised step over ``rows``, with loss on the answers' tokens only. Raises `Diverged`."""
        shares = self._shares([len(row.prompt_p) + len(row.answer_a) + len(row.observed_s) for row in rows])
        calls = [
            rank.sft_step.remote([rows[index] for index in share])
            for rank, share in zip(self._ranks.handles, shares, strict=True)
        ]
        report: StepReport = (await self._ranks.gather(calls, "supervised step", self._deadline))[0]
        return report

    async def score(self, group: Ref[Group]) -> NDArray[np.float32]:
        """Log-probs of the group's sample tokens under the current weights, float32 [T]. Not to be called in a step."""
        answers = await self._call("score a group", "score", group)
        logprobs: NDArray[np.float32] = answers[0]
        return logprobs

    async def publish(self, version: int) -> WeightUpdate:
        """Publish the current weights as ``version`` through Ray's object store and the weight group, if any."""
        await self.begin_publish(version)
        return await self.published(version)

    async def begin_publish(self, version: int) -> None:
        """Start to publish the current weights as ``version``; returns when the next step may begin."""
        await self._call(f"publish {version}", "publish", version)

    async def published(self, version: int) -> WeightUpdate:
        """Wait until the version that `begin_publish` started is stored; steps may run meanwhile."""
        awaited = f"weights {version} to be stored"
        update: WeightUpdate = (await self._call(awaited, "published", version))[0]
        if update.lost_group == self.weight_group:
            self.weight_group = None
        return replace(update, lender=self._ranks.processes[0].node) if update.lent else update

    async def store(self, version: int) -> WeightUpdate:
        """Put what the weight group has carried, or the learner lends, into the object store too.

        Raises:
            WeightsGone: newer versions have replaced it.
        """
        awaited = f"weights {version} to be stored"
        update: WeightUpdate = await self._ranks.call_first(awaited, "store", version, seconds=self._deadline)
        return update

    @property
    def rendezvous(self) -> tuple[str, int]:
        """Host and port on which rank 0 accepts members of weight groups."""
        first = self._ranks.processes[0]
        return first.host, first.port

    async def join_weight_group(self, terms: WeightGroupTerms) -> bool:
        """Also send each version through this group, from the next one on; returns False if it did not form in time."""
        seconds = 3 * terms.deadline_s
        formed = await self._ranks.call_first("weight group", "join_weight_group", terms, seconds=seconds)
        self.weight_group = terms.name if formed else None
        return bool(formed)

    async def lend(self) -> None:
        """Let actors on the same devices read the published weights from the learner's memory; call `sleep` next."""
        await self._call("lend weights to the actors", "lend")

    async def sleep(self) -> None:
        """Leave the devices to actors until `wake`; meanwhile only `store`, `saved` and `stop` may be called."""
        await self._call("leave the devices to the actors", "sleep")

    async def wake(self) -> None:
        """Take the devices back."""
        await self._call("take the devices back", "wake")

    async def begin_save(
        self,
        folder: Path,
        extra: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
        *,
        background: bool = True,
    ) -> None:
        """Take a checkpoint, which `saved` writes to ``folder``; returns when the next step may begin.

        At every moment the folder is either complete or absent. Call `saved` before another `begin_save`.

        Args:
            extra: JSON that `load` returns.
            files: further files by name, written beside the learner's.
            background: copy the state if the hosts of all ranks have room for it, and let `saved` write the copy;
                otherwise it is written before this returns.

        Raises:
            DiskFull: the disk has no space for it.
            HostError: it cannot be written.
            DeadlineExceeded, WorkerDied: a rank hangs or died.
        """
        self._unsaved = None
        if background and all(await self._call("checkpoint", "has_room_for_checkpoint")):
            await self._call("checkpoint", "capture", dict(extra))
            self._unsaved = _Unsaved(folder, dict(files or {}))
        else:
            await self._write(folder, files or {}, "save", dict(extra))

    async def saved(self) -> None:
        """Write what `begin_save` copied, unless that was done; steps may run meanwhile.

        Raises:
            DiskFull: the disk has no space for it; call again once there is some.
            HostError: it cannot be written.
            DeadlineExceeded, WorkerDied: a rank hangs or died.
        """
        if self._unsaved is not None:
            await self._write(self._unsaved.folder, self._unsaved.files, "write_captured")
            await self._call("checkpoint", "drop_captured")
            self._unsaved = None

    async def _write(self, folder: Path, files: Mapping[str, bytes], method: str, *arguments: object) -> None:
        """Let every rank write its files into a folder that replaces ``folder`` once all are written."""
        partial = partial_path(folder)
        try:
            await asyncio.to_thread(empty_folder, partial)
            for name, content in files.items():
                await asyncio.to_thread((partial / name).write_bytes, content)
            problems = await self._call("checkpoint", method, partial, *arguments)
            if problem := next(filter(None, problems), ""):
                raise (DiskFull if is_full(problem) else HostError)(f"checkpoint {folder}: {problem}")
            await _to_its_end(asyncio.to_thread(replace_folder, partial, folder))
        except DeadlineExceeded:  # a TimeoutError, and so an OSError
            raise
        except OSError as error:
            kind = DiskFull if is_full(error) else HostError
            raise kind(f"checkpoint {folder}: {error.strerror or error}") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)

    async def load(self, folder: Path) -> dict[str, Any]:
        """Resume from the checkpoint in ``folder``, saved by any number of ranks; returns the ``extra`` saved with it.

        Raises:
            JobError: the checkpoint belongs to another model.
        """
        extra: dict[str, Any] = (await self._call("load checkpoint", "load", folder))[0]
        return extra

    async def export(self, folder: Path) -> Path:
        """Write the model to ``folder`` in Hugging Face format.

        Raises:
            DiskFull: the disk has no space for it; call again once there is some.
        """
        if problem := next(filter(None, await self._call("export", "export", folder)), ""):
            raise DiskFull(f"model {folder}: {problem}")
        return folder

    async def stop(self) -> None:
        """End every rank."""
        self._unsaved = None
        await self._ranks.stop()

    async def _call(self, awaited: str, method: str, *arguments: object) -> list[Any]:
        """Make the same call on every rank, within the deadline of a step."""
        return await self._ranks.call(awaited, method, *arguments, seconds=self._deadline)

    def _shares(self, costs: Sequence[int]) -> list[list[int]]:
        """The indices of ``costs`` that each rank gets; the ranks of a sequence group get the same."""
        spec = self.config.learner
        return [share for share in deal(costs, spec.sequence_groups) for _ in range(spec.sequence_parallel)]

    @property
    def _deadline(self) -> float:
        return self.config.learner.step_deadline_s


def stale(batch: Sequence[ScoredGroup], oldest: int) -> dict[int, str]:
    """Groups with a token older than version ``oldest``, by id, each with the reason for dropping it."""
    return {
        meta.group_id: f"its oldest token has version {meta.oldest_version}, the oldest allowed is {oldest}"
        for meta in (scored.meta for scored in batch)
        if meta.is_stale(oldest)
    }


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Split the indices of ``costs`` into ``ranks`` shares of similar cost: largest first, each to the cheapest."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = totals.index(min(totals))
        shares[rank].append(index)
        totals[rank] += costs[index]
    return [sorted(share) for share in shares]


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await ``work``; if this is cancelled meanwhile, however often, only once ``work`` has ended."""
    task = asyncio.create_task(work)
    cancelled: BaseException | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if (problem := cancelled or task.exception()) is not None:
        raise problem


def _merged(reports: Sequence[StepReport], batch: Mapping[str, float], dropped: Mapping[int, str]) -> StepReport:
    lags: dict[int, int] = {}
    advantages: dict[int, NDArray[np.float64]] = {}
    dropped = dict(dropped)
    for report in reports:
        dropped.update(report.dropped)
        for lag, count in report.lag_histogram.items():
            lags[lag] = lags.get(lag, 0) + count
        advantages.update(report.advantages)
    return StepReport({**batch, **reports[0].metrics}, lags, advantages, dropped)
