"""The supervisor with a real Redis and a fake Ray that the tests control."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from services.runs.driver import drive
from services.signals import StopSignal
from services.stack.redis import embedded_redis
from services.store.folder import RunFolder
from services.store.redis import TOKENS_KEY, Store
from services.supervisor import decisions
from services.supervisor import supervisor as module
from services.supervisor.decisions import BARREN_LIVES
from services.supervisor.ray_jobs import JobStatus
from services.supervisor.supervisor import ClusterNodes, Supervisor, unlimited
from tests.integration.waiting import until
from volley.errors import HostError, JobError
from volley.job import JOB
from volley.state import Desired, Observed, RunRecord, RunState

pytestmark = pytest.mark.integration


class FakeRay:
    """A launcher whose drivers are alive until a test ends them."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, int]] = []
        self.states: dict[str, JobStatus] = {}
        self.refuses = False
        self.refused = 0
        self.dies_at_once = False
        self.stopped: list[str] = []

    async def submit(self, run_id: str, life: int, grace_s: float) -> None:
        if self.refuses:
            self.refused += 1
            raise HostError("no agent is up")
        self.submitted.append((run_id, life))
        self.states[run_id] = "ended" if self.dies_at_once else "alive"

    async def status(self, run_id: str) -> JobStatus:
        return self.states.get(run_id, "none")

    def has_been_told(self, count: int) -> bool:
        return len(self.submitted) == count

    async def stop(self, run_id: str) -> None:
        self.stopped.append(run_id)
        self.states[run_id] = "ended"

    async def logs(self, run_id: str, tail_bytes: int) -> str:
        return f"line\nvolley: {run_id} cannot be\n"[-tail_bytes:]


@pytest.fixture
async def redis_url(tmp_path: Path) -> AsyncIterator[str]:
    async with embedded_redis(tmp_path / "redis", tmp_path / "redis.log") as url:
        yield url


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    async with Store(redis_url) as store:
        yield store


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PASS_SECONDS", 0.02)
    monkeypatch.setattr(decisions, "delay", lambda lives: 0.0)


def record(run_id: str, folder: str = "/nowhere") -> RunRecord:
    return RunRecord(id=run_id, name="x", kind="rl", job={"kind": "rl"}, created=time.time(), folder=folder)


@contextlib.asynccontextmanager
async def supervised(
    store: Store, ray: FakeRay, url: str, count: int = 1, cluster: ClusterNodes = unlimited
) -> AsyncIterator[list[Supervisor]]:
    """Run ``count`` supervisors during the block."""
    async with contextlib.AsyncExitStack() as stack:
        supervisors = [await stack.enter_async_context(Supervisor(store, ray, url, cluster)) for _ in range(count)]
        tasks = [asyncio.create_task(each.run()) for each in supervisors]
        try:
            yield supervisors
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def ended(store: Store, run_id: str, state: RunState) -> Observed:
    """Wait until the run is in ``state``; returns its observed state."""
    for _ in range(1000):
        if (seen := await store.observed(run_id)).state == state:
            return seen
        await asyncio.sleep(0.02)
    raise AssertionError(seen)


async def test_of_three_supervisors_one_starts_each_run_once(store: Store, redis_url: str) -> None:
    ray = FakeRay()
    async with supervised(store, ray, redis_url, count=3):
        for number in range(5):
            await store.create(record(f"r{number}"))
        await until(lambda: len(ray.submitted) == 5)
        await asyncio.sleep(0.3)
    assert sorted(ray.submitted) == [(f"r{number}", 1) for number in range(5)]


async def test_the_next_supervisor_continues_the_count_of_the_last_one(store: Store, redis_url: str) -> None:
    ray = FakeRay()
    await store.create(record("r"))
    for life in (1, 2, 3):
        async with supervised(store, ray, redis_url):
            await until(partial(ray.has_been_told, life))
            await store.put_observed("r", Observed(state="running", step=life, updated=time.time()))
        ray.states["r"] = "ended"
    assert ray.submitted == [("r", 1), ("r", 2), ("r", 3)]


async def test_a_run_without_progress_ends_as_failed_with_the_end_of_its_drivers_log(
    store: Store, redis_url: str
) -> None:
    ray = FakeRay()
    ray.dies_at_once = True
    await store.create(record("r"))
    async with supervised(store, ray, redis_url):
        await until(lambda: len(ray.submitted) == BARREN_LIVES)
        assert "volley: r cannot be" in (await ended(store, "r", "failed")).problem
        await asyncio.sleep(0.3)
        assert len(ray.submitted) == BARREN_LIVES
        ray.dies_at_once = False
        await store.change_desired("r", lambda desired: desired)  # what `volley resume` does
        await until(lambda: len(ray.submitted) == BARREN_LIVES + 1)


async def test_a_submission_rejected_by_ray_does_not_count_as_a_driver(store: Store, redis_url: str) -> None:
    ray = FakeRay()
    ray.refuses = True
    await store.create(record("r"))
    async with supervised(store, ray, redis_url):
        await until(lambda: ray.refused > 2 * BARREN_LIVES)
        assert (await store.observed("r")).state == "queued"
        ray.refuses = False
        await until(lambda: len(ray.submitted) == 1)
    assert ray.submitted[0][1] > BARREN_LIVES


async def test_the_supervisor_ends_when_it_is_cancelled_at_any_point(store: Store, redis_url: str) -> None:
    """The Redis client swallows a cancellation that arrives together with an answer."""
    ray = FakeRay()
    for turn in range(60):
        async with supervised(store, ray, redis_url, count=3):
            await asyncio.sleep(0.02 + 0.0007 * turn)


async def test_a_stop_before_the_first_driver_and_a_removed_run(store: Store, redis_url: str) -> None:
    ray = FakeRay()
    await store.create(record("r"))
    await store.change_desired("r", lambda desired: desired.model_copy(update={"stopped": True}))
    async with supervised(store, ray, redis_url):
        await ended(store, "r", "stopped")
        await store.delete("r")
        await asyncio.sleep(0.3)
    assert ray.submitted == []


async def test_the_supervisor_survives_an_unavailable_redis(tmp_path: Path) -> None:
    ray, data, log = FakeRay(), tmp_path / "redis", tmp_path / "redis.log"
    async with embedded_redis(data, log) as url:
        async with Store(url, retries=0) as store:
            await store.create(record("r"))
        link = tmp_path / "redis.sock"
        link.symlink_to(url.removeprefix("unix://"))
        async with Store(f"unix://{link}", retries=0) as store, supervised(store, ray, f"unix://{link}"):
            await until(lambda: len(ray.submitted) == 1)
            link.unlink()
            ray.states["r"] = "ended"
            await asyncio.sleep(0.3)
            link.symlink_to(url.removeprefix("unix://"))
            await until(lambda: len(ray.submitted) == 2)
    assert ray.submitted == [("r", 1), ("r", 2)]


async def test_a_driver_reports_job_errors_and_runs_that_are_already_done(
    store: Store, redis_url: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match="no run nobody"):
        await drive("nobody", redis_url, StopSignal())
    await store.create(record("r", str(tmp_path / "r")))
    with pytest.raises(JobError):
        await drive("r", redis_url, StopSignal())
    seen = await store.observed("r")
    assert (seen.state, "missing" in seen.problem) == ("failed", True)
    await store.create(record("s", str(tmp_path / "other")))
    with pytest.raises(JobError, match="named after it"):
        await drive("s", redis_url, StopSignal())
    assert not RunFolder(tmp_path / "other").path.exists()


# ---- the queue -----------------------------------------------------------------------------------------------------


def waiting_record(run_id: str, created: float, owner: str = "") -> RunRecord:
    """A run that needs one of the cluster's two CPUs."""
    tree = {
        "kind": "rl",
        "name": run_id,
        "steps": 1,
        "model": {"path": "/nowhere"},
        "data": {"path": "/nowhere.jsonl"},
        "scorer": {"kind": "exact"},
        "objective": {"kind": "mean"},
        "actors": {"cpus": 0.5},
        "reward_workers": {"cpus": 0},
        "learner": {"cpus_per_rank": 0.5},
    }
    job = JOB.validate_python(tree).model_dump(mode="json")
    return RunRecord(id=run_id, name=run_id, kind="rl", job=job, created=created, folder="/nowhere", owner=owner)


async def two_cpus() -> list[dict[str, float]]:
    return [{"CPU": 2.0}]


async def report(store: Store, run_id: str, state: RunState) -> None:
    """Report what the run's driver would."""
    await store.put_observed(run_id, Observed(state=state, step=1, updated=time.time()))


async def test_runs_wait_in_order_across_a_killed_supervisor_and_drivers(store: Store, redis_url: str) -> None:
    ray = FakeRay()
    now = time.time()
    for number in range(4):
        await store.create(waiting_record(f"r{number}", now + number))
    async with supervised(store, ray, redis_url, cluster=two_cpus):
        await until(lambda: len(ray.submitted) == 2)
        seen = await problem_of(store, "r3", "place 2")
        assert seen.problem.startswith("place 2 in the queue: waits for 1 CPU: r0 holds 1, r1 holds 1")
        await report(store, "r0", "running")
        ray.states["r0"] = "killed"  # its place is kept
        await until(lambda: len(ray.submitted) == 3)
    async with supervised(store, ray, redis_url, cluster=two_cpus):
        await store.create(waiting_record("urgent", now + 9), Desired(priority=1))
        await problem_of(store, "urgent", "waits for a checkpoint of r1")
        await until(lambda: ray.stopped == ["r1"])
        await until(lambda: len(ray.submitted) == 4)
        seen = await problem_of(store, "r1", "preempted by urgent; place 1 in the queue")
        assert (seen.state, seen.ended) == ("queued", None)
        for run_id in ("r0", "urgent"):
            await report(store, run_id, "done")
            ray.states[run_id] = "ended"
        await until(lambda: len(ray.submitted) == 6)
    assert [run for run, _ in ray.submitted] == ["r0", "r1", "r0", "urgent", "r1", "r2"]
    ((_, event),) = await store.entries("r1", "events")
    assert (event["kind"], event["by"]) == ("preempted", "urgent")
    ((_, record),) = await store.audit(10)
    assert (record.who, record.action, record.run, record.details) == ("supervisor", "preempt", "r1", {"by": "urgent"})


async def test_a_resumed_run_queues_again_with_all_its_retries(store: Store, redis_url: str) -> None:
    ray = FakeRay()
    await store.create(waiting_record("big", 1.0), Desired(priority=2))
    await store.create(waiting_record("also", 2.0), Desired(priority=2))
    async with supervised(store, ray, redis_url, cluster=two_cpus):
        await until(lambda: len(ray.submitted) == 2)
        await store.create(waiting_record("r", 3.0))
        await problem_of(store, "r", "place 1")
        await store.change_desired("r", lambda desired: desired.model_copy(update={"stopped": True}))
        await ended(store, "r", "stopped")
        assert "r" not in await store.places()
        await store.change_desired("r", lambda desired: desired.model_copy(update={"stopped": False}))
        assert (await problem_of(store, "r", "place 1")).state == "queued"
        assert (await store.places())["r"].submitted > 3.0, "its time of submission is that of its resumption"
        await report(store, "big", "done")
        ray.states["big"] = "ended"
        await until(lambda: len(ray.submitted) == 3)
    assert ray.submitted[-1] == ("r", 1)


async def test_quotas_hold_back_the_runs_of_their_owner_only(store: Store, redis_url: str) -> None:
    ray = FakeRay()
    await store._redis.hset(TOKENS_KEY, "alice", json.dumps({"limits": {"runs": 1}}))
    for number, owner in enumerate(("alice", "alice", "bob")):
        await store.create(waiting_record(f"r{number}", number, owner))
    async with supervised(store, ray, redis_url, cluster=two_cpus):
        await problem_of(store, "r1", "place 1 in the queue: quota: alice runs 1 of 1")
        await until(lambda: len(ray.submitted) == 2)
    assert [run for run, _ in ray.submitted] == ["r0", "r2"]


async def test_a_run_that_the_nodes_cannot_hold_says_so_and_delays_no_other(store: Store, redis_url: str) -> None:
    async def four_gpus() -> list[dict[str, float]]:
        return [{"CPU": 2.0, "GPU": 2.0}] * 2

    ray, wide = FakeRay(), waiting_record("wide", 1.0)
    job = {**wide.job, "actors": {**wide.job["actors"], "gpus": 4, "engine": {"tensor_parallel_size": 4}}}
    await store.create(wide.model_copy(update={"job": job}))
    await store.create(waiting_record("r", 2.0))
    async with supervised(store, ray, redis_url, cluster=four_gpus):
        await problem_of(store, "wide", "one actor needs 0.5 CPUs and 4 GPUs on one node, and the largest has 2 GPUs")
        await until(lambda: len(ray.submitted) == 1)
    assert [run for run, _ in ray.submitted] == ["r"]


async def problem_of(store: Store, run_id: str, beginning: str) -> Observed:
    """Wait until the run's problem contains these words; returns its observed state."""
    for _ in range(1000):
        if beginning in (seen := await store.observed(run_id)).problem:
            return seen
        await asyncio.sleep(0.02)
    raise AssertionError(seen)
