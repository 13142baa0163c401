"""The stack of one machine, kept up in the background: ``volley up`` starts this process, ``volley down`` ends it.

    keeper ─┬─> Redis        embedded, on a private socket            (unless --redis names one)
            ├─> Ray head     its job server on loopback, by token     (unless --ray names one)
            └─> API server   REST, dashboard, supervisor of the runs

A server that dies is restarted. All servers get SIGTERM when the keeper ends, even by SIGKILL. When the keeper ends in
order, it first stops the runs; each writes a checkpoint if its ``grace_s`` suffices, and continues from its newest
checkpoint at the next ``volley up``.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field

from actors.prefork_server import shared_server
from services.jobs.machine import NVIDIA
from services.signals import run_in_foreground
from services.stack.folder import StackFolder
from services.stack.launcher import PRELOAD
from services.stack.processes import Server, kept_up
from services.stack.ray import keep_to_loopback
from services.stack.redis import check_redis, redis_server
from services.supervisor.ray_jobs import RayJobLauncher
from volley.base import Spec
from volley.errors import HostError, VolleyError
from volley.files import replace_text
from volley.hub import HUB_TOKENS, NO_HUB_TOKEN
from volley.job import ActorsSpec
from volley.local_stack import StackState
from volley.ports import DEFAULT_PORT, free_port
from volley.scratch import scratch_folder
from volley.webhooks import SECRET_PREFIX, AllowedHost

log = logging.getLogger(__name__)

LEAST_CPUS = 4  # two actors, four reward workers and a rank reserve 3.4; two runs with default counts 4.2


class UpSettings(Spec):
    """The settings of a stack, from the options of ``volley up``."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = Field(DEFAULT_PORT, ge=0, le=65535)
    redis: str | None = None
    ray: str | None = Field(None, description="http://host:port of a job server")
    cpus: int = Field(description="CPUs that Ray schedules on; may exceed the machine's", ge=1)
    object_store_mb: int | None = Field(None, ge=80, description="null lets Ray choose")
    runs: Path
    import_from: tuple[Path, ...] = ()
    allow_code: tuple[str, ...] = ()
    tracking_host: tuple[str, ...] = ()
    webhook_host: tuple[AllowedHost, ...] = ()
    known_as: tuple[str, ...] = ()
    require_token: bool = Field(False, description="also for requests from this machine")
    hub_token: bool = Field(False, description="runs download with this account's Hugging Face token")

    def public(self) -> dict[str, Any]:
        """Return the settings as JSON without ``folder``, and without ``redis``, whose URL may contain a password."""
        return self.model_dump(mode="json", exclude={"folder", "redis"})

    @property
    def guarded(self) -> bool:
        """Whether every request needs a token."""
        return self.require_token or self.host not in ("127.0.0.1", "::1", "localhost")


def default_cpus() -> int:
    """Return the number of CPUs for Ray: the machine's, but enough for one run of small models on a few cores."""
    return max(os.cpu_count() or 1, LEAST_CPUS)


def main() -> int:
    """Keep a stack up until SIGTERM, with `UpSettings` as JSON on standard input; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        run_in_foreground(keep_stack(UpSettings.model_validate_json(sys.stdin.read())))
    except KeyboardInterrupt:
        return 0
    except VolleyError as error:
        sys.stderr.write(f"volley: {error}\n")
        return 1
    return 0


async def keep_stack(settings: UpSettings) -> None:
    """Keep the stack up until this task is cancelled.

    Raises:
        HostError: another stack is up in the folder, or a server does not start.
    """
    folder = StackFolder(settings.folder)
    with folder.kept():
        folder.forget()  # the state that a killed keeper left
        with scratch_folder("stack") as private:
            try:
                async with _stack(settings, folder, private) as state:
                    log.info("the stack is up: %s", state.server)
                    await asyncio.Event().wait()
            finally:
                folder.forget()


@contextlib.asynccontextmanager
async def _stack(settings: UpSettings, folder: StackFolder, private: Path) -> AsyncIterator[StackState]:
    port = settings.port or free_port()
    state = StackState(
        keeper=os.getpid(),
        server=_url(settings.host, port),
        redis=settings.redis or f"unix://{private}/redis.sock",
        ray=settings.ray or f"http://127.0.0.1:{free_port()}",
        private=str(private),
        guarded=settings.guarded,
        ready=False,
        settings=settings.public(),
    )
    if settings.guarded and not folder.admin_token.exists():
        replace_text(folder.admin_token, secrets.token_urlsafe(32), mode=0o600)
    folder.write_state(state)
    async with contextlib.AsyncExitStack() as stack:
        begin_imports: Callable[[], None] | None = None
        if settings.ray is None and not NVIDIA.exists():  # nothing that uses a GPU is forked
            begin_imports = stack.enter_context(shared_server(ActorsSpec(), PRELOAD, delayed=True))
        environment = _environment(settings, folder)
        if settings.redis is None:
            redis = await stack.enter_async_context(kept_up(_redis(folder, private, environment)))
            await redis
        else:
            await check_redis(settings.redis)
        starting = []
        if settings.ray is None:
            ray = _ray(settings, folder, private, state.ray, environment)
            starting.append(await stack.enter_async_context(kept_up(ray)))
            stack.push_async_callback(_end_runs, state, folder)
        api = _api(settings, folder, state, port, environment)
        starting.append(await stack.enter_async_context(kept_up(api)))
        await asyncio.gather(*starting)
        state = dataclasses.replace(state, ready=True)
        folder.write_state(state)
        if begin_imports is not None:  # not sooner: the servers need the CPUs to start
            begin_imports()
        yield state


# ---- the servers ---------------------------------------------------------------------------------------------------


def _redis(folder: StackFolder, private: Path, environment: dict[str, str]) -> Server:
    data = folder.path / "redis"
    data.mkdir(exist_ok=True)
    return redis_server(data, folder.logs / "redis.log", private / "redis.sock", environment)


def _ray(settings: UpSettings, folder: StackFolder, private: Path, url: str, environment: dict[str, str]) -> Server:
    options: dict[str, object] = {
        "node-ip-address": "127.0.0.1",
        "port": free_port(),
        "dashboard-host": "127.0.0.1",
        "dashboard-port": url.rpartition(":")[2],
        "dashboard-agent-listen-port": free_port(),
        "num-cpus": settings.cpus,
        "temp-dir": private / "ray",
        "include-log-monitor": "false",
        "min-worker-port": 0,  # workers take free ports: another Ray on this machine would deal out the same range
        "max-worker-port": 0,
    }
    if settings.object_store_mb is not None:
        options["object-store-memory"] = settings.object_store_mb << 20
    return Server(
        "Ray",
        [
            *(sys.executable, "-m", "services.stack.launcher.raylet", "start", "--head", "--block"),
            *(part for key, value in options.items() for part in (f"--{key}", str(value))),
        ],
        environment,
        folder.logs / "ray.log",
        answers=lambda: _answers(f"{url}/api/version", folder.token),
        start_seconds=90,
        stop_seconds=45,
        hung_seconds=None,  # a restart would end every run
    )


def _api(
    settings: UpSettings, folder: StackFolder, state: StackState, port: int, environment: dict[str, str]
) -> Server:
    api_settings = {
        "redis_url": state.redis,
        "host": settings.host,
        "port": port,
        "runs": str(settings.runs),
        "ray_address": state.ray,
        "allow_code": settings.allow_code,
        "tracking_hosts": settings.tracking_host,
        "webhook_hosts": settings.webhook_host,
        "hosts": settings.known_as,
        "admin_token": folder.admin_token.read_text() if settings.guarded else None,
    }
    return Server(
        "API server",
        [sys.executable, "-m", "services.api.serve"],
        {**environment, **_signing_keys()},
        folder.logs / "api.log",
        answers=lambda: _answers(f"{state.server}/healthz"),
        start_seconds=90,
        stop_seconds=20,
        stdin=json.dumps(api_settings).encode(),
    )


def _environment(settings: UpSettings, folder: StackFolder) -> dict[str, str]:
    """Return the environment of the servers, which Ray passes on to all processes of all runs."""
    withheld = {"RAY_ADDRESS", *_signing_keys()}
    environment = {key: value for key, value in os.environ.items() if key not in withheld}
    if not settings.hub_token:
        environment = {key: value for key, value in environment.items() if key not in HUB_TOKENS}
        environment[NO_HUB_TOKEN] = "1"  # nor the token in a file of the account
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment["RAY_worker_niceness"] = "0"  # with Ray's default, a run would starve next to a busy editor
    environment["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    environment["RAY_prestart_worker_first_driver"] = "0"  # workers that seldom fit what a run asks for
    if settings.ray is None:
        if not folder.token.exists():
            replace_text(folder.token, secrets.token_urlsafe(32), mode=0o600)
        environment.pop("RAY_AUTH_TOKEN", None)
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder.token)}
        keep_to_loopback(environment)
    paths = [str(path) for path in settings.import_from] + [os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def _signing_keys() -> dict[str, str]:
    """Return the variables with the keys of webhooks, which only the API server needs: a job's code must not sign."""
    return {key: value for key, value in os.environ.items() if key.startswith(SECRET_PREFIX)}


# ---- the end -------------------------------------------------------------------------------------------------------


async def _end_runs(state: StackState, folder: StackFolder) -> None:
    """Stop the drivers in order, at a checkpoint, before Ray ends."""
    async with RayJobLauncher(state.ray, state.redis, token=folder.token.read_text()) as launcher:
        try:
            seconds = await launcher.ends_within()
            folder.write_state(dataclasses.replace(state, runs_end_by=time.time() + seconds))
            await launcher.stop_all(seconds)
        except HostError as error:  # a declared point: Ray kills the drivers, and the runs can still resume
            log.warning("the runs were not stopped in order: %s", error)


# ---- small parts ---------------------------------------------------------------------------------------------------


async def _answers(url: str, token: Path | None = None) -> None:
    headers = {"Authorization": f"Bearer {token.read_text()}"} if token else {}
    try:
        async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
            answer = await client.get(url, headers=headers)
    except httpx.HTTPError as error:
        raise HostError(f"{url} does not answer: {error}") from error
    if answer.status_code != 200:
        raise HostError(f"{url} answers {answer.status_code}")


def _url(host: str, port: int) -> str:
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reached}:{port}"


if __name__ == "__main__":
    sys.exit(main())
