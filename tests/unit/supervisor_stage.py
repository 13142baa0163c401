"""A stage for the supervisor: a Redis in memory, a Ray that the tests control, and a clock."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from services.store.redis import Store, run_key
from services.supervisor import supervisor as module
from services.supervisor.decisions import DriverHistory
from services.supervisor.ray_jobs import JobStatus
from services.supervisor.supervisor import LIVES_KEY, PASS_SECONDS, RunWatch, Supervisor
from tests.unit.fake_redis import FakeRedis, serve
from volley.job import JOB
from volley.state import Observed, RunRecord


class FakeRay:
    """A launcher whose drivers do what a test says.

    Attributes:
        states: of the last driver of each run.
        submitted: the drivers that were started.
        during_submit: called with the run while its driver starts; may raise.
        during_status: called with the run when its driver's state is asked for.
    """

    def __init__(self) -> None:
        self.states: dict[str, JobStatus] = {}
        self.submitted: list[tuple[str, int]] = []
        self.stopped: list[str] = []
        self.during_submit: Callable[[str], None] = lambda run_id: None
        self.during_status: Callable[[str], None] = lambda run_id: None

    async def submit(self, run_id: str, life: int, grace_s: float) -> None:
        self.during_submit(run_id)
        self.submitted.append((run_id, life))
        self.states[run_id] = "alive"

    async def status(self, run_id: str) -> JobStatus:
        state = self.states.get(run_id, "none")
        self.during_status(run_id)
        return state

    async def stop(self, run_id: str) -> None:
        self.stopped.append(run_id)

    async def logs(self, run_id: str, tail_bytes: int) -> str:
        return ""


class Clock:
    """What the supervisor takes the time for."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        self.now += 0.001  # no two reports have the same time
        return self.now

    def monotonic(self) -> float:
        return self.now


class Stage:
    """A supervisor and its servers."""

    def __init__(self, redis: FakeRedis, clock: Clock) -> None:
        self.redis, self.ray, self.clock = redis, FakeRay(), clock
        self.store = Store("", retries=0)
        self.nodes: list[dict[str, float]] | None = None
        self.supervisor = Supervisor(self.store, self.ray, "", self.cluster)

    def take_over(self, watch: RunWatch | None = None) -> None:
        """Let another supervisor go on."""
        self.redis.data.pop("volley:lease:supervisor", None)
        self.supervisor = Supervisor(self.store, self.ray, "", self.cluster, watch)

    async def cluster(self) -> list[dict[str, float]] | None:
        return self.nodes

    async def passes(self, count: int = 1, seconds: float = PASS_SECONDS) -> None:
        for _ in range(count):
            self.clock.now += seconds
            assert await self.supervisor._has_lease()
            await self.supervisor.check_runs()

    async def create(self, run_id: str = "r", **job: Any) -> None:
        await self.store.create(record(run_id, **job))

    def report(self, run_id: str = "r", /, **fields: Any) -> Observed:
        """Write what a driver would."""
        seen = Observed.model_validate({"updated": self.clock.time(), **fields})
        self.redis.data[run_key(run_id, "observed")] = seen.model_dump_json()
        return seen

    def remember(self, run_id: str = "r", **history: Any) -> None:
        text = DriverHistory.model_validate(history).model_dump_json()
        self.redis.data.setdefault(LIVES_KEY, {})[run_id] = text

    def history(self, run_id: str = "r") -> DriverHistory:
        return DriverHistory.model_validate_json(self.redis.data[LIVES_KEY][run_id])

    async def resume(self, run_id: str = "r") -> None:
        await self.store.change_desired(run_id, lambda desired: desired.model_copy(update={"stopped": False}))

    async def observed(self, run_id: str = "r") -> Observed:
        return await self.store.observed(run_id)


def set_stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(time=clock.time, monotonic=clock.monotonic))
    return Stage(serve(monkeypatch), clock)


def record(run_id: str = "r", **job: Any) -> RunRecord:
    tree = {
        "kind": "rl",
        "name": run_id,
        "steps": 1,
        "model": {"path": "/nowhere"},
        "data": {"path": "/nowhere.jsonl"},
        "scorer": {"kind": "exact"},
        "objective": {"kind": "mean"},
        **job,
    }
    resolved = JOB.validate_python(tree).model_dump(mode="json")
    return RunRecord(id=run_id, name=run_id, kind="rl", job=resolved, created=1.0, folder="/nowhere")
