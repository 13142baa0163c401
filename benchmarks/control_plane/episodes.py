"""Simulated episodes: sessions of a simulated actor, and environment workers whose programs take their time.

`EnvironmentPool` and `Episodes` are the real ones. A group's programs end together, after as long as the group would
take to generate; each has called the model `CALLS` times.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from actors.config import EpisodesRequest, OpenedSessions
from actors.gateway.groups import EpisodeReport
from benchmarks.control_plane.cluster import Call, Latencies, SimulatedActor, StoredGroup
from environments.loads import EnvironmentHandle
from environments.pool import EnvironmentPool
from environments.records import EnvironmentConfig, EpisodesDone, Outcome
from volley.records import GroupMeta

CALLS, OBSERVED = 4, 96  # per episode
Record = tuple[GroupMeta, tuple[EpisodeReport, ...]]


class SimulatedGateway(SimulatedActor):
    """A simulated actor that also opens and closes sessions."""

    def __init__(self, latencies: Latencies, index: int) -> None:
        super().__init__(latencies, index)
        self._keys = itertools.count()
        self._opened: dict[int, int] = {}  # group -> version
        self.open_sessions, self.close_sessions = Call(self._open), Call(self._close)

    async def _open(self, request: EpisodesRequest) -> OpenedSessions:
        await asyncio.sleep(0)
        self._opened[request.group_id] = self._version
        keys = tuple(f"{self._name}-{next(self._keys)}" for _ in range(request.n))
        return OpenedSessions("http://127.0.0.1/v1", keys)

    def _close(
        self, request: EpisodesRequest, _opened: OpenedSessions
    ) -> tuple[StoredGroup, Coroutine[Any, Any, Record]]:
        seconds = next(self._times)
        meta = replace(
            self._meta(request.group_id, request.prompt_id, request.n, seconds),
            oldest_version=self._opened.pop(request.group_id),
        )
        return StoredGroup(meta), self._recorded(meta)

    async def _recorded(self, meta: GroupMeta) -> Record:
        await asyncio.sleep(0)
        each = meta.seconds / (2 * CALLS)  # the model answers half of the time
        spans = tuple((2 * number * each, (2 * number + 1) * each) for number in range(CALLS))
        report = EpisodeReport(None, CALLS, OBSERVED, calling=spans, calling_seconds=CALLS * each)
        return meta, (report,) * meta.n


class SimulatedEnvironments(EnvironmentPool):
    """The real pool over simulated workers."""

    def __init__(self, config: EnvironmentConfig, latencies: Latencies) -> None:
        super().__init__(config)
        self._latencies = latencies

    def _create(self, index: int) -> EnvironmentHandle:
        programs = SimulatedPrograms(self._latencies, index)
        return EnvironmentHandle(index, f"environment-{index}", programs, self._config.workers.episodes)


class SimulatedPrograms:
    """Replaces a handle on `environments.worker.EnvironmentWorker`."""

    def __init__(self, latencies: Latencies, index: int) -> None:
        self._latencies = latencies
        self._times = latencies.draws(latencies.generate, 2_000_000 + index)
        self.ready, self.run = Call(self._ready), Call(self._run)

    async def _ready(self) -> int:
        return 1

    async def _run(self, _number: int, _row: Mapping[str, Any], _url: str, keys: tuple[str, ...]) -> EpisodesDone:
        seconds = next(self._times)
        await self._latencies.pass_by(seconds)
        taken = seconds / self._latencies.scale
        passed, failed = Outcome(1.0, answer="7", seconds=taken), Outcome(0.0, seconds=taken)
        return EpisodesDone(tuple(passed if at % 3 == 0 else failed for at in range(len(keys))), taken)
