"""The contract's routes over made-up runs: a server for the dashboard's browser tests, and for working on its pages.

    python -m tests.dashboard_server --port 8300 --tick 0.5

Routes under ``/test`` are for the tests alone: drop all streams, ask for a token, add a run as large as they come.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

import services
from services.state import ENDED, Desired
from tests import dashboard_data
from tests.dashboard_data import FakeRun

DASHBOARD = Path(services.__file__).parent / "dashboard"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
}
TOKEN = "volley-test-token"


class World:
    """All runs, and the clock that moves the live ones on."""

    def __init__(self, tick: float) -> None:
        self.runs = {run.record.id: run for run in dashboard_data.all_runs()}
        self.tick = tick
        self.chance = random.Random(7)
        self.epoch = 0  # streams of an earlier epoch end
        self.token: str | None = None
        self.opened: list[str | None] = []  # the Last-Event-ID of each live stream of a run

    async def move(self) -> None:
        while True:
            await asyncio.sleep(self.tick)
            for run in self.runs.values():
                self._move_one(run)

    def _move_one(self, run: FakeRun) -> None:
        desired, seen = run.desired, run.observed
        if seen.state in ENDED or seen.state == "queued":
            return
        state = "stopped" if desired.stopped else "paused" if desired.paused else "running"
        wanted = desired.actors if desired.actors is not None else 2
        rewards = desired.reward_workers if desired.reward_workers is not None else 2
        if state == "running" and seen.step < seen.steps and run.record.name != "big":
            row = dashboard_data.metrics_row(seen.step, seen.steps, run.record.created, self.chance)
            run.rows.append({**row, "time": time.time()})
            run.timeline.append(dashboard_data.timeline_item(seen.step, time.time(), self.chance, wanted))
            seen = seen.model_copy(update={"step": seen.step + 1, "version": seen.step + 1})
        update = {
            "state": state,
            "revision": desired.revision,
            "problem": "paused by a user" if state == "paused" else "",
            "actors": wanted,
            "actors_wanted": wanted,
            "reward_workers": rewards,
            "reward_workers_wanted": rewards,
            "workers": dashboard_data.workers(wanted, rewards, seen.version) if state != "stopped" else (),
            "updated": time.time(),
            "ended": time.time() if state == "stopped" else None,
        }
        run.observed = seen.model_copy(update=update)


def view(run: FakeRun) -> dict[str, Any]:
    return {"record": run.record.model_dump(), **states(run)}


def states(run: FakeRun) -> dict[str, Any]:
    seen = run.observed
    return {"desired": run.desired.model_dump(), "observed": seen.model_dump(), "state": seen.state}


def summary(run: FakeRun) -> dict[str, Any]:
    objective = run.record.job.get("objective", {})
    k = f" k={objective['k']}" if "k" in objective else ""
    record, seen = run.record, run.observed
    return {
        **{key: getattr(record, key) for key in ("id", "name", "kind", "created", "tags")},
        **{key: getattr(seen, key) for key in ("state", "step", "steps", "updated", "problem", "actors")},
        "reward_workers": seen.reward_workers,
        "objective": f"{objective.get('kind', '')}{k}",
        "spark": [row["reward_mean"] for row in run.rows[-40:] if "reward_mean" in row],
    }


def columns(rows: list[dict[str, Any]], points: int) -> dict[str, Any]:
    """Of each bucket its last row: close enough to the means that the API gives."""
    size = -(-len(rows) // points) if rows else 1
    shown = rows[size - 1 :: size]
    flat = [_flat(row) for row in shown]
    names = sorted({name for row in flat for name in row} - {"step"})
    series = {name: [row.get(name) for row in flat] for name in names}
    return {"steps": [row["step"] for row in shown], "series": series, "total": len(rows), "names": names}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    lags = {f"lag_histogram.{lag}": count for lag, count in row.get("lag_histogram", {}).items()}
    return {**{key: value for key, value in row.items() if key != "lag_histogram"}, **lags}


def problem(status: int, title: str, detail: str) -> Response:
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    return JSONResponse(body, status, media_type="application/problem+json")


def event(kind: str, data: Any, name: str = "") -> str:
    return f"event: {kind}\n{f'id: {name}' + chr(10) if name else ''}data: {json.dumps(data)}\n\n"


def make_app(tick: float = 0.5) -> FastAPI:
    """The server. Its `World` is ``app.state.world``."""
    world = World(tick)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        moving = asyncio.create_task(world.move())
        yield
        moving.cancel()

    app = FastAPI(lifespan=life)
    app.state.world = world

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        guarded = world.token is not None and request.url.path.startswith("/v1/")
        if guarded and request.headers.get("Authorization") != f"Bearer {world.token}":
            return problem(401, "Not authorized", "Give a token with the scope read.")
        response: Response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    _add_reads(app, world)
    _add_writes(app, world)
    _add_streams(app, world)
    _add_tests(app, world)
    app.mount("/", StaticFiles(directory=DASHBOARD, html=True))
    return app


def _add_reads(app: FastAPI, world: World) -> None:
    @app.get("/v1/runs")
    async def runs(name: str = "", state: str = "", kind: str = "", tag: str = "", limit: int = 50) -> Any:
        key, _, value = tag.partition("=")
        found = [
            run
            for run in world.runs.values()
            if name.lower() in run.record.name
            and state in ("", run.observed.state)
            and kind in ("", run.record.kind)
            and (not tag or run.record.tags.get(key) == value)
        ]
        newest = sorted(found, key=lambda run: -run.record.created)[:limit]
        return {"items": [summary(run) for run in newest], "next": None}

    @app.get("/v1/runs/{run_id}")
    async def one(run_id: str) -> Any:
        if run_id not in world.runs:
            return problem(404, "Not found", f"no run {run_id}")
        return view(world.runs[run_id])

    @app.get("/v1/runs/{run_id}/metrics")
    async def metrics(run_id: str, points: int = 1000) -> Any:
        return columns(world.runs[run_id].rows, points)

    @app.get("/v1/runs/{run_id}/events")
    async def events(run_id: str, after: str = "0-0", limit: int = 100) -> Any:
        run = world.runs[run_id]
        items = [{"id": f"{int(1000 * each['time'])}-{i}", **each} for i, each in enumerate(run.events)]
        return {
            "items": [e for e in items if int(e["id"].split("-")[0]) > int(after.split("-")[0])][:limit],
            "next": None,
        }

    @app.get("/v1/runs/{run_id}/samples")
    async def samples(run_id: str, status: str = "", step: int | None = None, limit: int = 50, cursor: int = 0) -> Any:
        rows = world.runs[run_id].samples
        rows = [row for row in rows if status in ("", row["status"]) and step in (None, row["step"])]
        page = [{"id": str(cursor + i), **row} for i, row in enumerate(rows[cursor : cursor + limit])]
        return {"items": page, "next": str(cursor + limit) if cursor + limit < len(rows) else None}

    @app.get("/v1/runs/{run_id}/evaluations")
    async def evaluations(run_id: str) -> Any:
        return {"items": world.runs[run_id].evaluations}

    @app.get("/v1/runs/{run_id}/timeline")
    async def timeline(run_id: str, steps: int = 20) -> Any:
        return {"items": world.runs[run_id].timeline[-steps:]}

    @app.get("/v1/runs/{run_id}/ledger")
    async def ledger(run_id: str) -> Any:
        row = world.runs[run_id].rows[-1] if world.runs[run_id].rows else {}
        return {"counts": {key.removeprefix("groups_"): v for key, v in row.items() if key.startswith("groups_")}}

    @app.get("/v1/runs/{run_id}/logs")
    async def logs(run_id: str) -> Any:
        return {"items": [{"process": "driver", "bytes": 5120}, {"process": "actor-0", "bytes": None}]}

    @app.get("/v1/runs/{run_id}/logs/{process}")
    async def log(run_id: str, process: str) -> Response:
        lines = [f"{12 + i // 60}:{i % 60:02d} {process} step {i}  reward 0.{200 + i}" for i in range(120)]
        return PlainTextResponse("\n".join([*lines, dashboard_data.HOSTILE[0]]))

    @app.get("/v1/cluster")
    async def cluster() -> Any:
        whole = {"CPU": 16.0, "GPU": 1.0, "memory": 64e9, "object_store_memory": 8e9, "node:10.0.0.1": 1.0}
        free = {"CPU": 4.5, "GPU": 0.0, "memory": 22e9, "object_store_memory": 7.1e9}
        nodes = [
            {
                "id": f"{i}c9d1f0b2" * 4,
                "address": f"10.0.0.{i + 1}",
                "alive": i < 2,
                "resources": whole,
                "available": free,
            }
            for i in range(3)
        ]
        run = next(iter(world.runs))
        roles = (("actor", 2, 2.0), ("reward_worker", 2, 0.2), ("learner_rank", 1, 1.0))
        holders = [{"run": run, "role": role, "count": n, "cpus": cpus, "gpus": 0.0} for role, n, cpus in roles]
        return {"nodes": nodes, "holders": holders}


def _add_writes(app: FastAPI, world: World) -> None:
    def change(run: FakeRun, **fields: Any) -> dict[str, Any]:
        wanted = {**run.desired.model_dump(), **fields, "revision": run.desired.revision + 1}
        run.desired = Desired.model_validate(wanted)
        return view(run)

    @app.patch("/v1/runs/{run_id}")
    async def patch(run_id: str, request: Request) -> Any:
        run, fields = world.runs[run_id], await request.json()
        n = run.record.job["sampling"]["n"]
        if fields.get("objective", {}).get("k", 1) > n:
            return problem(422, "Not a job", f"objective: k {fields['objective']['k']} > n {n}")
        if (fields.get("actors") or 0) > 6:
            return problem(422, "Too many", "the cluster has room for 6 actors")
        return change(run, **fields)

    @app.post("/v1/runs/{run_id}/stop", status_code=202)
    async def stop(run_id: str) -> Any:
        return change(world.runs[run_id], stopped=True)

    @app.post("/v1/runs/{run_id}/resume", status_code=202)
    async def resume(run_id: str) -> Any:
        run = world.runs[run_id]
        run.observed = run.observed.model_copy(update={"state": "running", "ended": None})
        return change(run, stopped=False, paused=False)


def _add_streams(app: FastAPI, world: World) -> None:
    async def run_events(run: FakeRun, request: Request) -> AsyncIterator[str]:
        epoch, last = world.epoch, request.headers.get("Last-Event-ID")
        world.opened.append(last)
        sent = len(run.rows) if last is None else int(last)
        while epoch == world.epoch:
            yield event("observed", states(run), str(sent))
            if sent < len(run.rows):
                rows, sent = run.rows[sent:], len(run.rows)
                yield event("metrics", {"rows": rows}, str(sent))
            await asyncio.sleep(world.tick)

    async def list_events() -> AsyncIterator[str]:
        epoch = world.epoch
        while epoch == world.epoch:
            yield event("runs", {"items": [summary(run) for run in world.runs.values()]})
            await asyncio.sleep(max(world.tick, 0.3))

    @app.get("/v1/runs/{run_id}/live")
    async def live(run_id: str, request: Request) -> Response:
        return StreamingResponse(run_events(world.runs[run_id], request), media_type="text/event-stream")

    @app.get("/v1/live")
    async def live_runs() -> Response:
        return StreamingResponse(list_events(), media_type="text/event-stream")


def _add_tests(app: FastAPI, world: World) -> None:
    @app.post("/test/drop")
    async def drop() -> dict[str, int]:
        world.epoch += 1
        return {"epoch": world.epoch}

    @app.post("/test/token")
    async def token(required: bool = True) -> dict[str, str]:
        world.token = TOKEN if required else None
        return {"token": TOKEN}

    @app.post("/test/hostile")
    async def hostile() -> dict[str, str]:
        run = dashboard_data.make_run("hostile", "failed", done=0, seed=8, problem=dashboard_data.HOSTILE[0])
        run.record = run.record.model_copy(
            update={"name": dashboard_data.HOSTILE[1], "tags": {"t": dashboard_data.HOSTILE[2]}}
        )
        run.samples = dashboard_data.sample_rows(0, 0, world.chance)
        world.runs[run.record.id] = run
        return {"id": run.record.id}

    @app.post("/test/big")
    async def big(points: int = 100_000, samples: int = 10_000) -> dict[str, str]:
        run = dashboard_data.big_run(points, samples)
        world.runs[run.record.id] = run
        return {"id": run.record.id}

    @app.post("/test/rows/{run_id}")
    async def rows(run_id: str, count: int) -> dict[str, int]:
        """Append ``count`` rows at once, as after a long time offline."""
        run = world.runs[run_id]
        first = run.rows[-1]["step"] + 1
        run.rows += [{**run.rows[-1], "step": first + i} for i in range(count)]
        return {"rows": len(run.rows)}

    @app.get("/test/opened")
    async def opened() -> list[str | None]:
        return world.opened


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description="The dashboard over made-up runs.")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--tick", type=float, default=0.5, help="seconds between steps of a live run")
    given = parser.parse_args()
    uvicorn.run(make_app(given.tick), host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
