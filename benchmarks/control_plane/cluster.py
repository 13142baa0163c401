"""A simulated cluster: stand-ins for Ray's handles, as the coordinator's process uses them.

`ActorPool`, `ActorHandle`, `RewardPool` and `LearnerPool` are the real ones. Below them, each remote call is a
coroutine that sleeps as long as the real call would take, divided by the time scale.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from actors import handle as member_module
from actors.config import ActorConfig, ActorInfo, ActorUpdate, GenerateRequest
from learner import pool as pool_module
from learner.config import LearnerConfig
from learner.records import ScoredGroup, StepReport
from reward_servers.pool import RewardConfig, RewardPool, _Worker
from volley.records import Group, GroupMeta, Prompt, Scores, Verdict, VerdictStatus, WeightBucket, WeightUpdate

TOKENS_PER_SECOND = 25.0  # per sample, when many are generated at once
VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Latencies:
    """How long each call takes, in seconds of simulated time.

    Generating and scoring are log-normal, as sample lengths are: the slowest group takes many times the median.

    Attributes:
        scale: simulated seconds per real second.
        generate: median per group; one group in a hundred takes five times as long, none more than ``longest`` times.
        score: median per group, with the same distribution.
        learn, publish: per step.
        fetch, stall: per actor and update.
        sigma: standard deviation of the logarithm.
        longest: the longest time, as a multiple of the median.
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
        """An endless series of random durations, simulated seconds."""
        rng = np.random.default_rng(seed)
        while True:
            yield from (median * np.minimum(rng.lognormal(0.0, self.sigma, 16), self.longest)).tolist()

    async def pass_by(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.scale)


class Call:
    """A remote method with ``.remote(...)``; ``.options(...)`` is accepted and ignored."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method

    def options(self, **_: Any) -> "Call":
        return self


class StoredGroup:
    """A reference to a group's arrays, which are created when it is awaited."""

    __slots__ = ("meta",)

    def __init__(self, meta: GroupMeta) -> None:
        self.meta = meta

    def __await__(self) -> Generator[Any, Any, Group]:
        yield from asyncio.sleep(0).__await__()
        return group_of(self.meta)


def group_of(meta: GroupMeta) -> Group:
    """A group of random tokens that matches ``meta``."""
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
    """Replaces a handle on `actors.actor.Actor`; like the real one, it accepts new weights in the middle of samples."""

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
        meta = self._meta(request.group_id, request.prompt_id, request.n, seconds, len(request.prompt_p))
        return StoredGroup(meta), self._sample(meta, seconds)

    def _meta(self, group_id: int, prompt_id: str, n: int, seconds: float, prompt_tokens: int = 64) -> GroupMeta:
        return GroupMeta(
            group_id=group_id,
            prompt_id=prompt_id,
            actor=self._name,
            n=n,
            prompt_tokens=prompt_tokens,
            sample_tokens=int(seconds * TOKENS_PER_SECOND) * n // 2,  # the longest sample ends the group
            logprob_sum=0.0,
            turns=n,
            oldest_version=self._version,
            newest_version=self._version,
            truncated=0,
            seconds=seconds / self._latencies.scale,
        )

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
    """The real pool over simulated workers."""

    def __init__(self, config: RewardConfig, latencies: Latencies) -> None:
        super().__init__(config)
        self._latencies = latencies

    def _create(self, index: int) -> _Worker:
        return _Worker(index, f"reward-{index}", SimulatedWorker(self._latencies, index))


class SimulatedWorker:
    """Replaces a handle on `reward_servers.worker.RewardWorker`."""

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
    """Random verdicts for ``n`` samples, of which about 30% pass."""
    rng = np.random.default_rng(seed)
    passed, failed = Verdict(VerdictStatus.PASSED, 1.0, answer="7"), Verdict(VerdictStatus.WRONG_ANSWER, 0.0)
    return Scores.pack([passed if draw < 0.3 else failed for draw in rng.random(n)])


class SimulatedRanks:
    """Replaces `learner.rank_actors.RankActors`: one rank that learns nothing and publishes no actual weights."""

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
        nothing: Any = ()  # no simulated actor fetches it
        match method:
            case "publish":
                await self._latencies.pass_by(self._latencies.publish)
                return [None]
            case "published":
                buckets = (WeightBucket(nothing, 64 << 20),) * 32
                return [WeightUpdate(arguments[0], buckets, None, self._latencies.publish)]
        raise NotImplementedError(method)

    async def _step(
        self, columns: Sequence[ScoredGroup], version: int, _objective: Any, _rate: float | None, *_groups: Any
    ) -> StepReport:
        await self._latencies.pass_by(self._latencies.learn)
        lags: dict[int, int] = {}
        for scored in columns:
            lag = version - scored.meta.oldest_version
            lags[lag] = lags.get(lag, 0) + scored.meta.sample_tokens
        advantages: Mapping[int, Any] = {each.meta.group_id: each.rewards_n - each.rewards_n.mean() for each in columns}
        return StepReport({"live_group_fraction": 1.0, "clipped_share": 0.0, "grad_norm": 1.0}, lags, advantages)


def stand_in(latencies: Latencies, actor: "Callable[[Latencies, int], SimulatedActor]" = SimulatedActor) -> None:
    """Make this process create its actor and learner pools on the simulated cluster from here on."""

    class Handles:
        """Replaces the remote actor class."""

        def options(self, **_: Any) -> "Handles":
            return self

        def remote(self, _config: ActorConfig, index: int, _scratch: Path) -> SimulatedActor:
            return actor(latencies, index)

    member_module._RemoteActor = Handles()
    pool_module.RankActors = functools.partial(SimulatedRanks, latencies)  # type: ignore[misc,assignment,attr-defined,unused-ignore]
