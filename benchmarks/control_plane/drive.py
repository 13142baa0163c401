"""Runs one simulated job in the current process and measures what it costs."""

import asyncio
import contextlib
import cProfile
import gc
import io
import pstats
import resource
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import redis

from actors.config import EpisodesRequest, GenerateRequest
from actors.gateway.session import Limits
from actors.pool import ActorPool
from benchmarks.control_plane.cluster import Latencies, SimulatedActor, SimulatedRewards, SimulatedWorker, stand_in
from benchmarks.control_plane.episodes import SimulatedEnvironments, SimulatedGateway, SimulatedPrograms
from learner.pool import LearnerPool
from services.control.heartbeat import Status
from services.control.steering import Steering
from services.coordinator import loop as coordinator_module
from services.coordinator.devices import Devices
from services.coordinator.episodes import Episodes
from services.coordinator.loop import Coordinator
from services.coordinator.records import FinishedStep, Hooks, ReadyGroup
from services.coordinator.roles import Roles
from services.data.tokens import EncodedPrompt
from services.recording.display import Display
from services.recording.recorder import RunRecorder
from services.runs.context import heartbeats
from services.runs.episodes import NoEnvironments
from services.runs.role_configs import actor_config, environment_config, reward_config, rl_learner_config
from services.stack.redis import embedded_redis
from services.store.folder import RunFolder
from services.store.outbox import Outbox
from services.store.redis import Store
from tests.plain_buffer import PlainSlotBuffer
from volley.job import RLJob
from volley.records import Prompt
from volley.state import Desired, Observed

GROUPS_PER_ACTOR = 6  # groups in flight per actor when all slots are in use


@dataclass(frozen=True, slots=True)
class Setting:
    """What to simulate.

    Attributes:
        groups_per_second: target rate in real time, from which the time scale is derived.
        groups: the run trains on at least this many groups.
        plain: use the plain slot buffer of the tests instead of the real one.
        profile: print a profile of the run.
        episodes: samples are episodes of a program.
    """

    actors: int
    groups_per_second: float = 800.0
    groups: int = 4000
    max_lag: int = 2
    n: int = 16
    plain: bool = False
    profile: bool = False
    episodes: bool = False

    @property
    def prompts_per_step(self) -> int:
        return self.actors * GROUPS_PER_ACTOR // (self.max_lag + 1)

    @property
    def steps(self) -> int:
        return max(5, -(-self.groups // self.prompts_per_step))


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run cost.

    Attributes:
        cpu_ms: CPU time of the coordinator's process per trained group, all threads.
        simulation_ms: the part of ``cpu_ms`` that the simulated cluster itself takes, measured separately.
        busy: share of one core that the process used.
        redis_calls: calls per trained group, by command.
        rss_mb: peak resident memory of the process; ``rss_before_mb`` is its value before the run.
        redis_mb: peak memory of the Redis server.
        folder_bytes: bytes written to the run folder per trained group.
        lags: share of trained tokens by lag.
    """

    actors: int
    prompts_per_step: int
    groups: int
    time_scale: float
    groups_per_second: float
    cpu_ms: float
    simulation_ms: float
    busy: float
    redis_calls: dict[str, float]
    rss_mb: float
    rss_before_mb: float
    redis_mb: float
    folder_bytes: float
    lags: dict[int, float]
    step_seconds: float


class Recorder(RunRecorder):
    """The real recorder, which also adds up the lag histograms of the steps."""

    lags: Counter[int]

    async def step(self, finished: FinishedStep) -> None:
        self.lags.update(finished.report.lag_histogram)
        await super().step(finished)


def measure(setting: Setting) -> Measured:
    """Simulate one run and return what it cost."""
    if setting.plain:
        coordinator_module.SlotBuffer = PlainSlotBuffer  # type: ignore[misc,assignment,attr-defined,unused-ignore]
    # Groups in flight divided by the time that a group takes is the rate in simulated time.
    simulated = Latencies(1.0)
    rate = setting.actors * GROUPS_PER_ACTOR / (simulated.generate * 1.28 + simulated.learn)
    latencies = replace(simulated, scale=setting.groups_per_second / rate)
    stand_in(latencies, SimulatedGateway if setting.episodes else SimulatedActor)
    with tempfile.TemporaryDirectory() as scratch:
        return asyncio.run(_measure(setting, latencies, Path(scratch)))


async def _measure(setting: Setting, latencies: Latencies, scratch: Path) -> Measured:
    job = _job(setting)
    folder = RunFolder.at(scratch / "run", job)
    simulation_ms = await (_episodes_ms if setting.episodes else _simulation_ms)(latencies, setting.n)
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(embedded_redis(scratch / "redis", scratch / "redis.log"))
        outbox = await stack.enter_async_context(Outbox(url, folder.run_id))
        store = await stack.enter_async_context(Store(url))
        display = Display(quiet=True)
        recorder = Recorder(folder, outbox, display, job.samples_kept)
        recorder.lags = Counter()
        actors = await ActorPool.start(actor_config(job, 4096, folder))
        assert job.scorer is not None
        rewards = SimulatedRewards(reward_config(job, job.scorer, folder), latencies)
        await rewards.scale(job.reward_workers.count)
        learner = LearnerPool(rl_learner_config(job, folder))
        environments: NoEnvironments | SimulatedEnvironments = NoEnvironments()
        turns = None
        if job.rollout is not None:
            environments = SimulatedEnvironments(environment_config(job, job.rollout, folder), latencies)
            await environments.scale(job.environment_workers.count)
            turns = Episodes(job.rollout, actors, environments, 4096, scored=False)
        coordinator = Coordinator(
            job,
            _prompts(),
            Roles(actors, rewards, learner, Devices(actors, learner, shared=False)),
            Hooks(recorder, _never, _no_checkpoint, _nothing_stored, _agreed),
            turns=turns,
        )
        steering = Steering(
            job,
            folder,
            store,
            recorder,
            actors=actors,
            rewards=rewards,
            environments=environments,
            desired=Desired(),
        )
        steering.steer(coordinator, learner)
        status = Status(outbox, Observed())
        status.source = steering.view
        await stack.enter_async_context(heartbeats(status, display))
        await stack.enter_async_context(steering.running())
        return await _run(setting, latencies, coordinator, recorder, folder, redis.Redis.from_url(url), simulation_ms)


async def _run(
    setting: Setting,
    latencies: Latencies,
    coordinator: Coordinator,
    recorder: Recorder,
    folder: RunFolder,
    server: "redis.Redis",
    simulation_ms: float,
) -> Measured:
    gc.collect()
    rss, calls, cpu, began = _rss_mb(), _calls(server), time.process_time(), time.perf_counter()
    profile = cProfile.Profile() if setting.profile else contextlib.nullcontext()
    recorder.start_clock(0)
    with profile:
        await coordinator.run()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    if isinstance(profile, cProfile.Profile):
        _print_profile(profile)
    await asyncio.sleep(1.0)  # lets the outbox send what it still holds
    groups = coordinator.ledger.trained
    if groups != setting.steps * setting.prompts_per_step:
        raise RuntimeError(f"{groups} groups were trained instead of {setting.steps * setting.prompts_per_step}")
    tokens = recorder.lags.total()
    written = sum(file.stat().st_size for file in folder.path.rglob("*") if file.is_file())
    return Measured(
        actors=setting.actors,
        prompts_per_step=setting.prompts_per_step,
        groups=groups,
        time_scale=latencies.scale,
        groups_per_second=groups / seconds,
        cpu_ms=cpu * 1e3 / groups,
        simulation_ms=simulation_ms,
        busy=cpu / seconds,
        redis_calls={name: (count - calls[name]) / groups for name, count in _calls(server).items()},
        rss_mb=_rss_mb(),
        rss_before_mb=rss,
        redis_mb=float(server.info("memory")["used_memory_peak"]) / 2**20,
        folder_bytes=written / groups,
        lags={lag: count / tokens for lag, count in sorted(recorder.lags.items())},
        step_seconds=seconds / setting.steps,
    )


async def _simulation_ms(latencies: Latencies, n: int) -> float:
    """CPU milliseconds per group of the simulated cluster alone, without coordinator and pools."""
    actor, worker = SimulatedActor(latencies, 0), SimulatedWorker(latencies, 0)
    prompt = _prompts(1)[0]
    request = GenerateRequest(0, "p", prompt.tokens_p, n, 1.0, 1.0, 1)

    async def one() -> None:
        group, meta = actor.generate.remote(request)
        await meta
        await worker.score.remote(group, prompt.prompt)

    await asyncio.gather(*(one() for _ in range(100)))  # fills the cache of verdicts
    cpu = time.process_time()
    await asyncio.gather(*(one() for _ in range(1000)))
    return time.process_time() - cpu  # seconds per 1000 groups are milliseconds per group


async def _episodes_ms(latencies: Latencies, n: int) -> float:
    """The same with episodes."""
    actor, worker = SimulatedGateway(latencies, 0), SimulatedPrograms(latencies, 0)

    async def one(group_id: int) -> None:
        request = EpisodesRequest(group_id, "p", n, 1.0, 1.0, Limits(4, 1, 4096))
        opened = await actor.open_sessions.remote(request)
        await worker.run.remote(0, {}, opened.url, opened.keys)
        _, record = actor.close_sessions.remote(request, opened)
        await record

    cpu = time.process_time()
    await asyncio.gather(*map(one, range(1000)))
    return time.process_time() - cpu


def _job(setting: Setting) -> RLJob:
    return RLJob.model_validate(
        {
            "name": "simulated",
            "steps": setting.steps,
            "prompts_per_step": setting.prompts_per_step,
            "max_lag": setting.max_lag,
            "sampling": {"n": setting.n},
            "model": {"path": "model"},
            "data": {"path": "data"},
            "scorer": {"kind": "countdown"},
            "objective": {"kind": "max_at_k", "k": 4},
            "actors": {"count": setting.actors, "cpus": 0},
            "reward_workers": {"count": setting.actors, "cpus": 0},
            **(_episodes(setting) if setting.episodes else {}),
        }
    )


def _episodes(setting: Setting) -> dict[str, Any]:
    """A worker per actor, with room for the episodes of the actor's groups and a few more."""
    return {
        "rollout": {"kind": "program", "target": "simulated:program"},
        "environment_workers": {"count": setting.actors, "cpus": 0, "episodes": (GROUPS_PER_ACTOR + 2) * setting.n},
    }


def _prompts(count: int = 1000) -> list[EncodedPrompt]:
    tokens_p = np.arange(64, dtype=np.int32)
    return [EncodedPrompt(Prompt(f"prompt-{number}", "What is 6 times 7?"), tokens_p) for number in range(count)]


async def _never(_version: int) -> None:
    raise RuntimeError("the job has no evaluation")


async def _no_checkpoint(_step: int, _state: dict[str, Any], _ready: list[ReadyGroup]) -> None:
    """Do nothing: checkpoints cost the learner time, not the coordinator."""


async def _nothing_stored() -> None:
    """There are no checkpoints."""


async def _agreed() -> float:
    """Stands in for the check of what the actors serve."""
    return 0.0


def _calls(server: "redis.Redis") -> Counter[str]:
    stats = server.info("commandstats")
    counts = {name.removeprefix("cmdstat_"): int(stat["calls"]) for name, stat in stats.items()}
    return Counter({name: count for name, count in counts.items() if name not in ("info", "ping")})


def _rss_mb() -> float:
    """Peak resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _print_profile(profile: cProfile.Profile) -> None:
    out = io.StringIO()
    pstats.Stats(profile, stream=out).strip_dirs().sort_stats("tottime").print_stats(28)
    print(out.getvalue())


def as_json(measured: Measured) -> dict[str, Any]:
    return asdict(measured)
