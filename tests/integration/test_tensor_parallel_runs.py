"""Whole runs whose engine is two workers: on CPU, with GPUs that exist only in Ray's books."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from actors.config import ActorConfig
from actors.pool import ActorPool
from learner.pool import LearnerPool
from services.jobs.job_file import load_job
from services.recording.display import Display
from services.runs.run import Result, prepare, run_on
from services.stack.ephemeral import Stack
from services.stack.redis import embedded_redis
from services.store.folder import RunFolder
from tests.integration.jobs import rl_job, run_job, write_inputs
from tests.integration.test_tensor_parallel import TWO_WAY, ray_head_with_gpus
from tests.integration.waiting import until
from volley.records import WeightUpdate

pytestmark = pytest.mark.integration
STEPS, EVERY = 9, 3
STOPPED_IN, KILLED_IN = 2, 5  # versions


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("redis")
    with ray_head_with_gpus():
        async with embedded_redis(folder / "data", folder / "redis.log") as url:
            yield Stack(url, "local")


class Broadcasts:
    """What was published in a run. One of the engine's workers is stopped in one broadcast, and killed in another.

    Each version after ``resumed_at`` waits for a weight group, so that the group is what carries it.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, resumed_at: int = 0, stopped_in: int = -1, killed_in: int = -1
    ) -> None:
        self.updates: dict[int, WeightUpdate] = {}
        self._resumed_at = resumed_at
        self._stopped_in, self._killed_in = stopped_in, killed_in
        self._begin, self._published, self._start = LearnerPool.begin_publish, LearnerPool.published, ActorPool.start
        monkeypatch.setattr(ActorPool, "start", self._start_pool)
        monkeypatch.setattr(LearnerPool, "begin_publish", _method(self._begin_publish))
        monkeypatch.setattr(LearnerPool, "published", _method(self._await_published))

    async def _start_pool(self, config: ActorConfig) -> ActorPool:
        self.pool = await self._start(config)
        return self.pool

    async def _begin_publish(self, learner: LearnerPool, version: int) -> None:
        if version > self._resumed_at:
            await until(lambda: learner.weight_group is not None and self.pool.count == 1, seconds=120)
        if version in (self._stopped_in, self._killed_in):
            self.victim = self.workers()[1]
            self.victim.suspend()
        await self._begin(learner, version)
        if version == self._killed_in:
            await asyncio.sleep(0.5)
            self.victim.kill()

    async def _await_published(self, learner: LearnerPool, version: int) -> WeightUpdate:
        self.updates[version] = await self._published(learner, version)
        if version == self._stopped_in:
            self.victim.resume()
        return self.updates[version]

    def workers(self) -> list[psutil.Process]:
        """The two processes that hold the model, by rank."""
        (info,) = self.pool.infos
        below = [child for pid in info.engine_pids for child in psutil.Process(pid).children(recursive=True)]
        return sorted((each for each in below if "Worker_TP" in title(each)), key=title)


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def _method(replacement: Callable[..., Any]) -> Callable[..., Any]:
    return lambda learner, version: replacement(learner, version)


def job(inputs: Path) -> dict[str, Any]:
    return rl_job(
        inputs,
        steps=STEPS,
        max_lag=1,
        evaluation=None,
        checkpoint={"every": EVERY, "keep": STEPS},
        broadcast={"transport": "collective", "deadline_s": 4},
        actors={"cpus": 0.1, "gpus": 2, "max_num_seqs": 64, "engine": TWO_WAY},
    )


async def test_a_run_survives_a_stopped_and_a_killed_worker_in_its_broadcasts_and_is_resumed(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    with monkeypatch.context() as patched:
        broadcasts = Broadcasts(patched, stopped_in=STOPPED_IN, killed_in=KILLED_IN)
        whole = await run_job(stack, tmp_path, job(tmp_path))
    for version in range(1, STEPS + 1):
        update = broadcasts.updates[version]
        if version in (STOPPED_IN, KILLED_IN):
            assert (update.received, update.stored) == (frozenset(), True)
            assert update.lost_group is not None
        else:
            name = "actor-0" if version < KILLED_IN else "actor-1"
            assert (update.received, update.lost_group) == (frozenset({name}), None)
    assert_learned(whole)

    cut = RunFolder(tmp_path / "runs" / "cut")
    shutil.copytree(whole.folder.path, cut.path)
    for step in range(KILLED_IN + 2, STEPS + 1):
        shutil.rmtree(cut.checkpoints / f"step-{step}", ignore_errors=True)
    resumed_at = KILLED_IN + 1
    with monkeypatch.context() as patched:
        broadcasts = Broadcasts(patched, resumed_at=resumed_at)
        spec = load_job(tmp_path / "job.yaml")
        checkpoint = cut.checkpoints / f"step-{resumed_at}"
        result = await run_on(stack, prepare(spec), cut, Display(quiet=True), checkpoint=checkpoint)
    assert [broadcasts.updates[version].received for version in range(resumed_at + 1, STEPS + 1)] == [{"actor-0"}] * 3
    assert_learned(result)


def assert_learned(result: Result) -> None:
    rows = result.folder.read("metrics")
    assert (result.state, [row["step"] for row in rows]) == ("done", list(range(STEPS)))
    last = rows[-1]
    counts = [last[f"groups_{name}"] for name in ("admitted", "trained", "dropped", "in_flight")]
    assert counts == [8 * STEPS, 8 * STEPS, 0, 0]
    assert np.mean([row["reward_mean"] for row in rows[-3:]]) > np.mean([row["reward_mean"] for row in rows[:3]]) + 0.04
    assert all(row["lag_histogram"].keys() <= {"0", "1"} for row in rows)
