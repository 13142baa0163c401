"""Starts and stops the drivers of runs. Each driver is a job of Ray's job server.

The n-th driver of a run is submitted as ``<run>-<n>``. Ray rejects a name it has seen, so no driver is started twice.
"""

import asyncio
import math
import os
import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import httpx

from volley.errors import HostError

JobStatus = Literal["none", "alive", "ended", "killed"]
CALL_SECONDS = 15.0
SUBMIT_SECONDS = 60.0
LIST_SECONDS = 1.0  # how long a list of all jobs is cached
END_SECONDS = 60.0  # time for a driver to end its processes and flush its writes, besides the checkpoint


class Launcher(Protocol):
    """Starts drivers for the supervisor. Every call has a timeout and raises `HostError` if there is no answer."""

    async def submit(self, run_id: str, life: int, grace_s: float) -> None:
        """Start driver number ``life`` of a run; does nothing if that one was started before.

        Args:
            grace_s: time that the driver may spend on a checkpoint when it is asked to end.
        """

    async def status(self, run_id: str) -> JobStatus:
        """Return whether a driver of the run is alive; if not, how the last one ended, or "none"."""

    async def stop(self, run_id: str) -> None:
        """Ask the run's driver to end; it is killed if it does not."""

    async def logs(self, run_id: str, tail_bytes: int) -> str:
        """Return the end of what the run's last driver printed before it opened its own log."""


class RayJobLauncher:
    """Ray's job server, used over its REST API.

    Args:
        address: ``http://host:port`` of the job server.
        redis_url: URL of Redis for the drivers.
        python: the interpreter on the cluster that has Volley installed.
        token: the cluster's token; None uses the one that Ray itself would, see `ray_token`.
    """

    def __init__(self, address: str, redis_url: str, *, python: str = sys.executable, token: str | None = None) -> None:
        self._python, self._redis_url = python, redis_url
        self._address = address
        token = token or ray_token()
        self._http = httpx.AsyncClient(
            base_url=address,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=CALL_SECONDS,
            trust_env=False,
        )
        self._listed: tuple[float, list[dict[str, Any]]] = (-LIST_SECONDS, [])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def submit(self, run_id: str, life: int, grace_s: float) -> None:
        ends_within = math.ceil(grace_s + END_SECONDS)
        answer = await self._call(
            "POST",
            "/api/jobs/",
            seconds=SUBMIT_SECONDS,
            json={
                "submission_id": f"{run_id}-{life}",
                "entrypoint": f"exec {shlex.quote(self._python)} -m services.runs.driver {shlex.quote(run_id)}",
                "metadata": {"volley_run": run_id, "volley_life": str(life), "volley_ends_within": str(ends_within)},
                "runtime_env": {
                    "env_vars": {
                        "VOLLEY_REDIS_URL": self._redis_url,
                        "RAY_JOB_STOP_WAIT_TIME_S": str(ends_within),  # between SIGTERM and SIGKILL
                    }
                },
            },
        )
        self._listed = (-LIST_SECONDS, [])
        if answer.status_code != 200 and "already exists" not in answer.text:
            raise HostError(f"Ray rejects the driver of {run_id}: {_last_line(answer.text)}")

    async def status(self, run_id: str) -> JobStatus:
        jobs = await self._jobs(run_id)
        if any(_is_alive(job) for job in jobs):
            return "alive"
        if not jobs:
            return "none"
        return "killed" if _was_killed(jobs[-1]) else "ended"

    async def stop(self, run_id: str) -> None:
        for job in await self._jobs(run_id):
            if _is_alive(job):
                await self._call("POST", f"/api/jobs/{job['submission_id']}/stop", seconds=CALL_SECONDS)
        self._listed = (-LIST_SECONDS, [])

    async def ends_within(self) -> float:
        """Return the longest time that a live driver may take to end, in seconds."""
        alive = [job["metadata"] for job in await self._all() if _is_driver(job) and _is_alive(job)]
        return max((float(about.get("volley_ends_within", END_SECONDS)) for about in alive), default=0.0)

    async def stop_all(self, seconds: float) -> None:
        """Stop the drivers of all runs and wait until they are gone. Raises `HostError` after ``seconds``."""
        deadline = time.monotonic() + seconds
        stopping: set[str] = set()
        while alive := {job["submission_id"] for job in await self._all() if _is_driver(job) and _is_alive(job)}:
            for name in sorted(alive - stopping):
                await self._call("POST", f"/api/jobs/{name}/stop", seconds=CALL_SECONDS)
            stopping |= alive
            if time.monotonic() > deadline:
                raise HostError(f"{', '.join(sorted(alive))} did not end within {seconds:g} s")
            await asyncio.sleep(LIST_SECONDS)

    async def logs(self, run_id: str, tail_bytes: int) -> str:
        jobs = await self._jobs(run_id)
        if not jobs:
            return ""
        answer = await self._call("GET", f"/api/jobs/{jobs[-1]['submission_id']}/logs", seconds=CALL_SECONDS)
        if answer.status_code != 200:
            return str(jobs[-1].get("message") or "")[-tail_bytes:]
        return str(answer.json()["logs"])[-tail_bytes:]

    async def _jobs(self, run_id: str) -> list[dict[str, Any]]:
        """Return the run's jobs that Ray knows, oldest first."""
        jobs = [job for job in await self._all() if _is_driver(job) and job["metadata"]["volley_run"] == run_id]
        return sorted(jobs, key=lambda job: int(job["metadata"]["volley_life"]))

    async def _all(self) -> list[dict[str, Any]]:
        if time.monotonic() - self._listed[0] >= LIST_SECONDS:
            answer = await self._call("GET", "/api/jobs/", seconds=CALL_SECONDS)
            if answer.status_code != 200:
                raise HostError(f"Ray's job server at {self._address}: {_last_line(answer.text)}")
            self._listed = (time.monotonic(), answer.json())
        return self._listed[1]

    async def _call(self, method: str, path: str, *, seconds: float, json: object = None) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, json=json, timeout=seconds)
        except httpx.HTTPError as error:
            raise HostError(
                f"Ray's job server at {self._address} does not answer: {type(error).__name__} {error}"
            ) from error
        if answer.status_code in (401, 403):
            raise HostError(
                f"Ray's job server at {self._address} requires a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
            )
        return answer


def kill_here(run_id: str, driver: str) -> bool:
    """Kill a run's driver, named as ``host:pid``, if it is on this host. A suspended process reacts to nothing else."""
    host, _, pid = driver.rpartition(":")
    if host != socket.gethostname():
        return False
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if not {"services.runs.driver", run_id} <= set(command):
            return False  # another process has this id by now
        os.kill(int(pid), signal.SIGKILL)
    except (OSError, ValueError):
        return False
    return True


def ray_token() -> str | None:
    """Return the token that a Ray process in this environment sends, or None if authentication is off.

    Raises:
        HostError: authentication is on, but the token cannot be read.
    """
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text().strip()
    except OSError as error:
        raise HostError(f"RAY_AUTH_MODE is token, but {file} cannot be read: {error.strerror}") from error


def _is_driver(job: dict[str, Any]) -> bool:
    return "volley_run" in (job.get("metadata") or {})


def _is_alive(job: dict[str, Any]) -> bool:
    return job["status"] in ("PENDING", "RUNNING")


def _was_killed(job: dict[str, Any]) -> bool:
    """Return whether a signal ended the driver, or Ray lost it, in which case there is no exit code."""
    code = job.get("driver_exit_code")
    return job["status"] == "FAILED" and (code is None or code < 0)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" .")]
    return lines[-1][:300] if lines else "no reason given"
