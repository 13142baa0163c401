"""A cluster that only takes its time: what stands in for Ray's handles, seen from the coordinator's process.

`ActorPool`, `Member`, `RewardPool` and `LearnerGroup` are the real ones. Below them each remote call is a coroutine
that sleeps as long as the real one would take, divided by the time scale.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from actors import member as member_module
from actors.config import ActorConfig, ActorInfo, ActorUpdate, GenerateRequest
from learner import group as group_module
from learner.config import LearnerConfig
from learner.records import ScoredGroup, StepReport
from reward_servers.pool import RewardConfig, RewardPool, _Worker
from volley.records import Group, GroupMeta, Prompt, Scores, Verdict, VerdictStatus, WeightBucket, WeightUpdate

TOKENS_PER_SECOND = 25.0  # of one sample among many in a batch
VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds of simulated time. Log-normal, as lengths of samples are: the slowest group takes many times the median.

    Attributes:
        generate: median; one group in a hundred takes five times as long, none more than eight times.
        score: median, alike.
        learn, publish, fetch, stall: of every step, step, actor and actor.
        scale: simulated seconds in one real second.
    """

    scale: float
    generate: float = 20.0
    score: float = 0.5
    learn: float = 8.0
    publish: float = 0.5
    fetch: float = 1.0
    stall: float = 0.1
    sigma: float = 0.7
    longest: float = 8.0

    def draws(self, median: float, seed: int) -> Iterator[float]:
        """Simulated seconds, one after the other."""
        rng = np.random.default_rng(seed)
        while True:
            yield from (median * np.minimum(rng.lognormal(0.0, self.sigma, 16), self.longest)).tolist()

    async def pass_by(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.scale)


class Call:
    """A remote method: ``.remote(...)``, and ``.options(...)`` that changes nothing here."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method

    def options(self, **_: Any) -> "Call":
        return self


class StoredGroup:
    """A reference to a group's arrays, made when somebody takes them."""

    __slots__ = ("meta",)

    def __init__(self, meta: GroupMeta) -> None:
        self.meta = meta

    def __await__(self) -> Generator[Any, Any, Group]:
        yield from asyncio.sleep(0).__await__()
        return group_of(self.meta)


def group_of(meta: GroupMeta) -> Group:
    """Arrays that fit ``meta``."""
    rng, tokens = np.random.default_rng(meta.group_id), meta.sample_tokens
    lengths_n = np.full(meta.n, tokens // meta.n, dtype=np.int32)
    lengths_n[0] += tokens - int(lengths_n.sum())
    return Group(
        group_id=meta.group_id,
        prompt_id=meta.prompt_id,
        prompt_p=np.ones(meta.prompt_tokens, dtype=np.int32),
        tokens_T=rng.integers(0, VOCABULARY, tokens, dtype=np.int32),
        logprobs_T=-rng.random(tokens, dtype=np.float32),
        versions_T=np.full(tokens, meta.oldest_version, dtype=np.int32),
        lengths_n=lengths_n,
        stopped_n=np.ones(meta.n, dtype=np.bool_),
        texts=("a sample's text",) * meta.n,
        actor=meta.actor,
        seconds=meta.seconds,
    )


class SimulatedActor:
    """In place of a handle on `actors.actor.Actor`: takes new weights in the middle of samples, as the real one."""

    def __init__(self, latencies: Latencies, index: int) -> None:
        self._latencies, self._name, self._version = latencies, f"actor-{index}", 0
        self._times = latencies.draws(latencies.generate, index)
        self.start, self.update = Call(self._start), Call(self._update)
        self.generate, self.ping = Call(self._generate), Call(self._ping)

    async def _start(self) -> ActorInfo:
        return ActorInfo(self._name, 1, (2,), 4096, VOCABULARY, 0.0)

    async def _ping(self) -> None:
        await asyncio.sleep(0)

    def _generate(self, request: GenerateRequest) -> tuple[StoredGroup, Coroutine[Any, Any, GroupMeta]]:
        seconds = next(self._times)
        meta = GroupMeta(
            group_id=request.group_id,
            prompt_id=request.prompt_id,
            actor=self._name,
            n=request.n,
            prompt_tokens=len(request.prompt_p),
            sample_tokens=int(seconds * TOKENS_PER_SECOND) * request.n // 2,  # the longest sample ends the group
            logprob_sum=0.0,
            turns=request.n,
            oldest_version=self._version,
            newest_version=self._version,
            truncated=0,
            seconds=seconds / self._latencies.scale,
        )
        return StoredGroup(meta), self._sample(meta, seconds)

    async def _sample(self, meta: GroupMeta, seconds: float) -> GroupMeta:
        await self._latencies.pass_by(seconds)
        return replace(meta, newest_version=self._version)

    async def _update(self, update: WeightUpdate) -> ActorUpdate:
        times = self._latencies
        await times.pass_by(times.fetch + times.stall)
        self._version = update.version
        fetched, stalled = times.fetch / times.scale, times.stall / times.scale
        return ActorUpdate(self._name, update.version, update.nbytes, fetched, stalled, stalled)


class SimulatedRewards(RewardPool):
    """The real pool over workers that take their time."""

    def __init__(self, config: RewardConfig, latencies: Latencies) -> None:
        super().__init__(config)
        self._latencies = latencies

    def _create(self, index: int) -> _Worker:
        return _Worker(index, f"reward-{index}", SimulatedWorker(self._latencies, index))


class SimulatedWorker:
    """In place of a handle on `reward_servers.worker.RewardWorker`."""

    def __init__(self, latencies: Latencies, index: int) -> None:
        self._latencies, self._name = latencies, f"reward-{index}"
        self._times = latencies.draws(latencies.score, 1_000_000 + index)
        self.ready, self.score = Call(self._ready), Call(self._score)

    async def _ready(self) -> tuple[int, str]:
        return 1, ""

    async def _score(self, group: StoredGroup, _prompt: Prompt) -> Scores:
        seconds = next(self._times)
        await self._latencies.pass_by(seconds)
        return replace(
            verdicts(group.meta.n, group.meta.group_id % 64),
            seconds=seconds / self._latencies.scale,
            worker=self._name,
        )


@functools.cache
def verdicts(n: int, seed: int) -> Scores:
    """About a third of the samples pass."""
    rng = np.random.default_rng(seed)
    passed, failed = Verdict(VerdictStatus.PASSED, 1.0, answer="7"), Verdict(VerdictStatus.WRONG_ANSWER, 0.0)
    return Scores.pack([passed if draw < 0.3 else failed for draw in rng.random(n)])


class SimulatedRanks:
    """In place of `learner.ranks.Ranks`: one rank that learns from nothing and publishes names of weights."""

    failure = None
    processes = ()

    def __init__(self, latencies: Latencies, config: LearnerConfig) -> None:
        self.config, self._latencies = config, latencies
        self.handles = [self]
        self.step = Call(self._step)

    async def gather(self, calls: Sequence[Coroutine[Any, Any, Any]], _awaited: str, seconds: float) -> list[Any]:
        async with asyncio.timeout(seconds):
            return [await call for call in calls]

    async def call(self, awaited: str, method: str, *arguments: Any, seconds: float) -> list[Any]:
        if method != "publish":
            raise NotImplementedError(method)
        await self._latencies.pass_by(self._latencies.publish)
        return [None]

    async def call_first(self, awaited: str, method: str, *arguments: Any, seconds: float) -> WeightUpdate:
        if method != "published":
            raise NotImplementedError(method)
        return WeightUpdate(arguments[0], (WeightBucket(None, 64 << 20),) * 32, None, self._latencies.publish)

    async def _step(
        self, columns: Sequence[ScoredGroup], version: int, _objective: Any, _rate: float | None, *_groups: Any
    ) -> StepReport:
        await self._latencies.pass_by(self._latencies.learn)
        lags: dict[int, int] = {}
        for scored in columns:
            lag = version - scored.meta.oldest_version
            lags[lag] = lags.get(lag, 0) + scored.meta.sample_tokens
        advantages: Mapping[int, Any] = {each.meta.group_id: each.rewards_n - each.rewards_n.mean() for each in columns}
        return StepReport({"live_group_fraction": 1.0}, lags, advantages)


def stand_in(latencies: Latencies) -> None:
    """From here on, in this process, pools and learner groups are made over this cluster."""

    class Handles:
        """In place of the remote class of actors."""

        def options(self, **_: Any) -> "Handles":
            return self

        def remote(self, _config: ActorConfig, index: int, _scratch: Path) -> SimulatedActor:
            return SimulatedActor(latencies, index)

    member_module._RemoteActor = Handles()
    group_module.Ranks = functools.partial(SimulatedRanks, latencies)  # type: ignore[misc,assignment,attr-defined,unused-ignore]
