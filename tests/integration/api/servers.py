"""A real API server with a real Redis, in the test's own event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.api.app import Background, create_app
from services.api.cluster import Cluster
from services.api.jobs import Checker
from services.api.serve import GracefulServer, listening
from services.api.settings import ApiSettings
from services.store.outbox import Outbox
from services.store.redis import Store
from services.supervisor.ray_jobs import JobStatus, Launcher
from volley.client import AsyncClient
from volley.state import Desired, Observed, RunRecord

ADMIN = "admin-token-of-the-tests"


@dataclass(frozen=True)
class Api:
    """A running server. ``http`` and ``client`` send the admin token if the server needs one."""

    settings: ApiSettings
    server: GracefulServer
    http: httpx.AsyncClient
    client: AsyncClient
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextlib.asynccontextmanager
async def serving(
    redis_url: str,
    *,
    launcher: Launcher | None = None,
    cluster: Cluster | None = None,
    checker: Checker | None = None,
    background: Sequence[Background] = (),
    **settings: Any,
) -> AsyncIterator[Api]:
    """Serve for the length of the block."""
    wanted = ApiSettings.model_validate({"redis_url": redis_url, "port": 0, "allow_code": ("scorers",), **settings})
    app = create_app(wanted, launcher=launcher, cluster=cluster, checker=checker, background=background)
    server = GracefulServer(app, wanted)
    with listening(wanted) as listener:
        host, port = listener.getsockname()[:2]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        url = f"http://{host}:{port}"
        token = wanted.admin_token.get_secret_value() if wanted.admin_token else None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with (
            httpx.AsyncClient(base_url=url, headers=headers, timeout=30, trust_env=False) as http,
            AsyncClient(url, token) as client,
        ):
            try:
                yield Api(wanted, server, http, client, url)
            finally:
                server.should_exit = True
                await asyncio.wait_for(task, 20)


def a_job(name: str = "sevens", **changes: Any) -> dict[str, Any]:
    """A valid job; the files it names need not exist."""
    return {
        "kind": "rl",
        "name": name,
        "model": {"path": "/models/tiny"},
        "data": {"path": "/data/prompts.jsonl"},
        "scorer": {"kind": "exact"},
        "objective": {"kind": "max_at_k", "k": 4},
        "steps": 16,
        "prompts_per_step": 8,
        "sampling": {"n": 8, "max_tokens": 8},
        **changes,
    }


async def make_run(api: Api, name: str = "sevens", **changes: Any) -> str:
    """Create a run; returns its id."""
    return (await api.client.submit(a_job(name, **changes))).id


async def observe(redis_url: str, run_id: str, **fields: Any) -> None:
    """Write an observed state as the run's driver would."""
    async with Store(redis_url) as store:
        await store.put_observed(run_id, Observed.model_validate(fields))


@contextlib.asynccontextmanager
async def driver(redis_url: str, run_id: str) -> AsyncIterator[Outbox]:
    """The outbox of the run's driver."""
    async with Outbox(redis_url, run_id) as outbox:
        yield outbox


async def flushed(outbox: Outbox) -> None:
    """Wait until everything written is in Redis."""
    await asyncio.wait_for(outbox._empty.wait(), 10)


class SilentLauncher:
    """A launcher that starts nothing, with a fixed driver log."""

    async def submit(self, run_id: str, life: int, grace_s: float) -> None:
        raise AssertionError("the API starts no driver")

    async def status(self, run_id: str) -> JobStatus:
        return "none"

    async def stop(self, run_id: str) -> None:
        raise AssertionError("the API stops no driver")

    async def logs(self, run_id: str, tail_bytes: int) -> str:
        return f"driver of {run_id}"[-tail_bytes:]


def a_record(run_id: str, folder: Path, job: dict[str, Any] | None = None) -> tuple[RunRecord, Desired]:
    """A record as the API would write it."""
    job = job or a_job()
    return RunRecord(id=run_id, name=job["name"], kind=job["kind"], job=job, created=1.0, folder=str(folder)), Desired()
