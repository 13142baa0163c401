"""The dashboard over the real API and a real Redis; only the drivers of the runs are simulated.

python -m tests.dashboard_server --port 8300 --tick 0.5
"""

import argparse
import asyncio
import json
import random
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from services.api.app import create_app
from services.api.serve import GracefulServer
from services.api.settings import ApiSettings
from services.stack.redis import embedded_redis
from services.store.redis import TOKENS_KEY, Store, add_audit, answer, connect, run_key
from tests import dashboard_data
from tests.dashboard_data import FakeRun
from volley.state import ENDED, Desired, Observed
from volley.views import NodeView

BULK = 2000  # entries in one Redis pipeline
START_SECONDS = 10.0
STREAMS = ("metrics", "events", "samples", "evaluations", "timeline")


class Cluster:
    """A cluster of three nodes, one of them dead."""

    async def nodes(self) -> list[NodeView]:
        whole = {"CPU": 16.0, "GPU": 1.0, "memory": 64e9, "object_store_memory": 8e9}
        free = {"CPU": 4.5, "GPU": 0.0, "memory": 22e9, "object_store_memory": 7.1e9}
        return [
            NodeView(id=f"{i}c9d1f0b2" * 4, address=f"10.0.0.{i + 1}", alive=i < 2, resources=whole, available=free)
            for i in range(3)
        ]

    async def memory_by_node(self) -> list[int]:
        return []

    async def resources_by_node(self) -> None:
        return None


class Stage:
    """Runs in Redis, and simulated drivers that follow the desired state and do a step every ``tick`` seconds."""

    def __init__(self, url: str, store: Store, tick: float) -> None:
        self.url, self.store, self.tick = url, store, tick
        self.runs: dict[str, FakeRun] = {}
        self.base = ""  # address of the API once it is served
        self._redis: Any = connect(url)
        self._chance = random.Random(7)

    async def add(self, run: FakeRun) -> str:
        """Write everything about ``run``; returns its id."""
        run_id = run.record.id
        self.runs[run_id] = run
        await self.store.create(run.record, run.desired)
        for stream in STREAMS:
            await self.write(run_id, stream, getattr(run, "rows" if stream == "metrics" else stream))
        if run.rows:
            await self._ledger(run_id, run.rows[-1])
        await self.store.put_observed(run_id, run.observed)
        return run_id

    async def add_queue(self) -> None:
        """Write the queue, a token's limits and an audit record."""
        await self.store.move(dashboard_data.places(), (), {})
        pipe = self._redis.pipeline()
        pipe.hset(
            TOKENS_KEY, "alice", json.dumps({"sha256": "", "scope": "operate", "created": 1.0, "limits": {"runs": 2}})
        )
        add_audit(pipe, dashboard_data.audit_record())
        await answer(pipe.execute())

    async def write(self, run_id: str, stream: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append ``rows`` to one of the run's streams."""
        for start in range(0, len(rows), BULK):
            pipe = self._redis.pipeline(transaction=False)
            for row in rows[start : start + BULK]:
                pipe.xadd(run_key(run_id, stream), {"json": json.dumps(row)})
            await answer(pipe.execute())

    async def drive(self) -> None:
        """Act as the driver of every run until cancelled."""
        while True:
            await asyncio.sleep(self.tick)
            for run in list(self.runs.values()):
                run.desired = await self.store.desired(run.record.id)
                await self._move(run)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _move(self, run: FakeRun) -> None:
        desired, seen, run_id = run.desired, run.observed, run.record.id
        if seen.state in ENDED and not _is_resumed(desired, seen):
            return
        if seen.state == "queued":
            return
        state = "stopped" if desired.stopped else "paused" if desired.paused else "running"
        actors = 2 if desired.actors is None else desired.actors
        rewards = 2 if desired.reward_workers is None else desired.reward_workers
        step = seen.step
        if state == "running" and step < seen.steps and run.moves:
            row = dashboard_data.metrics_row(step, seen.steps, run.record.created, self._chance)
            row["time"] = time.time()
            await self.write(run_id, "metrics", [row])
            await self.write(
                run_id, "timeline", [dashboard_data.timeline_item(step, row["time"], self._chance, self.tick, actors)]
            )
            await self._ledger(run_id, row)
            step += 1
        update = {
            "state": state,
            "step": step,
            "version": step,
            "revision": desired.revision,
            "problem": "paused by a user" if state == "paused" else "",
            "actors": actors,
            "actors_wanted": actors,
            "reward_workers": rewards,
            "reward_workers_wanted": rewards,
            "workers": dashboard_data.workers(actors, rewards, step) if state != "stopped" else (),
            "updated": time.time(),
            "ended": time.time() if state == "stopped" else None,
        }
        run.observed = seen.model_copy(update=update)
        await self.store.put_observed(run_id, run.observed)

    async def _ledger(self, run_id: str, row: Mapping[str, Any]) -> None:
        counts = {key.removeprefix("groups_"): value for key, value in row.items() if key.startswith("groups_")}
        if counts:
            await answer(self._redis.hset(run_key(run_id, "ledger"), mapping=counts))


def _is_resumed(desired: Desired, seen: Observed) -> bool:
    return seen.state == "stopped" and not desired.stopped


@asynccontextmanager
async def stage(folder: Path, tick: float = 0.3) -> AsyncIterator[Stage]:
    """A Redis with one run of each kind and state, and drivers that move them."""
    async with embedded_redis(folder / "redis", folder / "redis.log") as url, Store(url) as store:
        made = Stage(url, store, tick)
        for run in dashboard_data.all_runs():
            await made.add(run)
        await made.add_queue()
        driving = asyncio.create_task(made.drive())
        try:
            yield made
        finally:
            driving.cancel()
            with suppress(asyncio.CancelledError):
                await driving
            await made.close()


@asynccontextmanager
async def api(url: str, port: int = 0, **settings: Any) -> AsyncIterator[str]:
    """The API in this process; yields its address. A port of 0 takes a free one."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        wanted = ApiSettings(redis_url=url, port=port, check_jobs=False, **settings)
        server = GracefulServer(create_app(wanted, cluster=Cluster()), wanted)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(START_SECONDS):
                while not server.started:  # noqa: ASYNC110 - uvicorn has a flag only
                    await asyncio.sleep(0.02)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


async def serve(port: int, tick: float) -> None:
    """Serve until the server is stopped."""
    with tempfile.TemporaryDirectory(prefix="volley-dashboard-") as folder:
        async with stage(Path(folder), tick) as made, api(made.url, port):
            await asyncio.Event().wait()


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description="The dashboard over made-up runs.")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--tick", type=float, default=0.5, help="seconds between steps of a live run")
    given = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(given.port, given.tick))


if __name__ == "__main__":
    main()
