"""A stand-in for the API server that keeps runs in memory and answers according to the contract."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from volley.state import ENDED, Desired, Limits, Observed, RunRecord
from volley.views import LIVE_START


class FakeApi:
    """The server's state, which tests may read and change.

    Attributes:
        runs: run views by id.
        seen: method, path, headers and body of every request.
        stream: server-sent events of the live route, in pieces; a piece of None cuts the connection.
        log: the log of every run's driver.
        ends: the state in which a run with this name is when it is looked at; by default it stays queued.
        url: where it is served, if a test says so.
        token: the token that requests must send; None for no authentication.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.seen: list[tuple[str, str, dict[str, str], Any]] = []
        self.stream: list[str | None] = []
        self.token: str | None = None
        self.tokens: dict[str, str] = {}
        self.limits: dict[str, dict[str, Any]] = {}
        self.queue: dict[str, Any] = {"items": [], "owners": []}
        self.audit: list[dict[str, Any]] = []
        self.log = "hello there"
        self.ends: dict[str, str] = {}
        self.url = ""
        self.app = self._routes()

    def add(self, run_id: str, **observed: Any) -> dict[str, Any]:
        """Add a run with this observed state."""
        record = RunRecord(
            id=run_id,
            name="sevens",
            kind="rl",
            job={"kind": "rl"},
            created=time.time() - 90,
            folder=f"/nowhere/{run_id}",
        )
        seen = Observed(updated=time.time(), **observed)
        self.runs[run_id] = {
            "record": record.model_dump(mode="json"),
            "desired": Desired().model_dump(mode="json"),
            "observed": seen.model_dump(mode="json"),
            "state": seen.state,
        }
        return self.runs[run_id]

    def _routes(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def gate(request: Request, call_next: Any) -> Any:
            body = await request.body()
            told = json.loads(body) if body else None
            self.seen.append((request.method, request.url.path, dict(request.headers), told))
            if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
                return problem(401, "a bearer token is needed")
            run_id = request.url.path.split("/")[3] if request.url.path.startswith("/v1/runs/") else None
            if run_id is not None and run_id not in self.runs:
                return problem(404, f"there is no run {run_id}")
            return await call_next(request)

        @app.post("/v1/runs")
        async def create(request: Request) -> Response:
            body = await request.json()
            job = body["job"]
            if job["name"] == "bad":
                errors = [{"pointer": "/job/steps", "detail": "too many"}]
                return problem(422, "the job is invalid", errors)
            view = self.add(job["name"] + "-1")
            view["record"] |= {"job": job, "tags": body["tags"]}
            return JSONResponse(view, 201)

        @app.get("/v1/runs")
        async def listing(limit: int = 50, cursor: int = 0, id_prefix: str = "", tag: str = "=") -> dict[str, Any]:
            key, _, value = tag.partition("=")
            found = [
                view
                for name, view in reversed(self.runs.items())
                if name.startswith(id_prefix) and view["record"]["tags"].get(key, "") == value
            ]
            items = [self._summary(view) for view in found[cursor : cursor + min(limit, 2)]]
            more = cursor + len(items)
            return {"items": items, "next": str(more) if more < len(found) else None}

        @app.get("/v1/runs/{run_id}")
        async def get(run_id: str) -> dict[str, Any]:
            view = self.runs[run_id]
            if state := self.ends.get(view["record"]["job"].get("name", "")):
                view["state"] = view["observed"]["state"] = state
                view["observed"]["problem"] = "no signal" if state == "failed" else ""
            return view

        @app.patch("/v1/runs/{run_id}")
        async def change(run_id: str, request: Request) -> Response:
            view = self.runs[run_id]
            if view["state"] in ENDED:
                return problem(409, f"run {run_id} has ended: resume it first")
            desired = view["desired"]
            changes = await request.json()
            if "objective" in changes and changes["objective"] is None:
                changes["objective"] = {}
            view["desired"] = {**desired, **changes, "revision": desired["revision"] + 1}
            return JSONResponse(view)

        @app.post("/v1/runs/{run_id}/{action}")
        async def act(run_id: str, action: str) -> Response:
            view = self.runs[run_id]
            view["desired"] = {**view["desired"], "stopped": action == "stop"}
            if action == "resume" and (name := view["record"]["job"].get("name")) in self.ends:
                self.ends[name] = "done"
            return JSONResponse(view, 202)

        @app.delete("/v1/runs/{run_id}")
        async def delete(run_id: str) -> Response:
            if self.runs[run_id]["state"] not in ENDED:
                return problem(409, f"run {run_id} has not ended: stop it first")
            del self.runs[run_id]
            return Response(status_code=204)

        @app.get("/v1/runs/{run_id}/{part}")
        async def part(run_id: str, part: str, request: Request) -> Response:
            if part == "live":
                return StreamingResponse(
                    self._live(request.headers.get("last-event-id")), media_type="text/event-stream"
                )
            answers: dict[str, Any] = {
                "ledger": {"counts": {"admitted": 8, "trained": 8}},
                "evaluations": {
                    "items": [{"version": 3, "estimates": [{"k": 8, "mean": 0.5, "low": 0.4, "high": 0.6}]}]
                },
                "metrics": {"steps": [2], "series": {"reward_mean": [0.25]}, "total": 1, "names": ["reward_mean"]},
                "logs": {"items": [{"process": "driver", "bytes": 11}, {"process": "actor-0", "bytes": None}]},
            }
            return JSONResponse(answers[part])

        @app.get("/v1/runs/{run_id}/logs/{process}")
        async def log(process: str, tail: int, offset: int | None = None) -> Response:
            if process != "driver":
                return problem(404, f"there is no log of {process}")
            begin = max(0, len(self.log) - tail) if offset is None else offset
            piece = self.log[begin : begin + tail]
            return PlainTextResponse(piece, headers={"X-Next-Offset": str(begin + len(piece))})

        @app.get("/v1/tokens")
        async def tokens() -> dict[str, Any]:
            return {"items": [self._token(name) for name in self.tokens]}

        @app.post("/v1/tokens")
        async def make_token(request: Request) -> Response:
            wanted = await request.json()
            if wanted["name"] in self.tokens:
                return problem(409, "there is a token of that name")
            self.tokens[wanted["name"]], self.limits[wanted["name"]] = wanted["scope"], wanted["limits"]
            return JSONResponse({**wanted, "created": 1.0, "token": "very-secret"}, 201)

        @app.patch("/v1/tokens/{name}")
        async def limit_token(name: str, request: Request) -> Response:
            if name not in self.tokens:
                return problem(404, f"there is no token {name}")
            self.limits[name] = await request.json()
            return JSONResponse(self._token(name))

        @app.get("/v1/queue")
        async def queue() -> dict[str, Any]:
            return self.queue

        @app.get("/v1/audit")
        async def audit(limit: int, before: int = 0) -> dict[str, Any]:
            more = before + min(limit, 2)
            return {"items": self.audit[before:more], "next": str(more) if more < len(self.audit) else None}

        @app.delete("/v1/tokens/{name}")
        async def drop_token(name: str) -> Response:
            if self.tokens.pop(name, None) is None:
                return problem(404, f"there is no token {name}")
            return Response(status_code=204)

        return app

    def _token(self, name: str) -> dict[str, Any]:
        limits = self.limits.get(name, Limits().model_dump())
        return {"name": name, "scope": self.tokens[name], "created": 1.0, "limits": limits}

    def _live(self, last_id: str | None) -> Iterator[str]:
        """Stream the pieces after ``last_id``; they are numbered from 1."""
        seen = 0 if last_id in (None, LIVE_START) else int(last_id)
        for number, piece in enumerate(self.stream, start=1):
            if number <= seen:
                continue
            if piece is None:
                self.stream[number - 1] = ": cut once\n\n"
                return
            yield f"id: {number}\n{piece}"

    def _summary(self, view: dict[str, Any]) -> dict[str, Any]:
        record, observed = view["record"], view["observed"]
        return {
            **{key: record[key] for key in ("id", "name", "kind", "created", "tags")},
            **{key: observed[key] for key in ("step", "steps", "updated", "problem")},
            **{key: observed[key] for key in ("actors", "reward_workers", "environment_workers")},
            "state": view["state"],
            "objective": "max_at_k k=8",
            "spark": [0.1, 0.2, 0.4],
        }


def problem(status: int, detail: str, errors: list[dict[str, str]] | None = None) -> JSONResponse:
    document = {"type": "urn:x", "title": "no", "status": status, "detail": detail, "errors": errors or []}
    return JSONResponse(document, status, media_type="application/problem+json")


def sse(kind: str, **data: Any) -> str:
    """One server-sent event, without its id."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve the app on a real socket; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
