"""Starts and stops the drivers of runs: each life of a run is one job of Ray's job server.

A submission is named ``<run>-<life>``. Ray refuses a name it has seen, so that one life is never started twice.
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
LIST_SECONDS = 1.0  # a listing of all jobs is good for so long
END_SECONDS = 60.0  # for a driver to end its processes and to flush what it has to tell


class Launcher(Protocol):
    """What the supervisor starts drivers with. Every call is bounded and raises `HostError` where nobody answers."""

    async def submit(self, run_id: str, life: int, grace_s: float) -> None:
        """Start the ``life``-th driver of a run; does nothing if that one was started before.

        Args:
            grace_s: that it takes for a checkpoint when it is asked to end.
        """

    async def status(self, run_id: str) -> JobStatus:
        """Is a driver of the run alive, did the last one end by itself, was it killed, or is none known?"""

    async def stop(self, run_id: str) -> None:
        """Ask the run's driver to end, and kill it if it does not."""

    async def logs(self, run_id: str, tail_bytes: int) -> str:
        """The end of what the run's last driver said before it had a log of its own."""


class RayJobLauncher:
    """Ray's job server over its REST API.

    Args:
        address: ``http://host:port`` of the job server.
        redis_url: where the drivers find the control plane.
        python: the interpreter on the cluster that has Volley.
        token: of the cluster; None takes what Ray itself would, see `ray_token`.
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
                "entrypoint": f"exec {shlex.quote(self._python)} -m services.driver {shlex.quote(run_id)}",
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
            raise HostError(f"Ray refuses the driver of {run_id}: {_last_line(answer.text)}")

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
        """Seconds that the drivers there are may take to end."""
        alive = [job["metadata"] for job in await self._all() if _is_driver(job) and _is_alive(job)]
        return max((float(about.get("volley_ends_within", END_SECONDS)) for about in alive), default=0.0)

    async def stop_all(self, seconds: float) -> None:
        """Stop the drivers of all runs and wait until they are gone, no longer than ``seconds``."""
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
        """The run's jobs that Ray knows, in the order of their lives."""
        mine = [job for job in await self._all() if _is_driver(job) and job["metadata"]["volley_run"] == run_id]
        return sorted(mine, key=lambda job: int(job["metadata"]["volley_life"]))

    async def _all(self) -> list[dict[str, Any]]:
        if time.monotonic() - self._listed[0] >= LIST_SECONDS:
            answer = await self._call("GET", "/api/jobs/", seconds=CALL_SECONDS)
            if answer.status_code != 200:
                raise HostError(f"Ray's job server at {self._address}: {_last_line(answer.text)}")
            self._listed = (time.monotonic(), answer.json())
        return self._listed[1]

    async def _call(self, method: str, path: str, *, seconds: float, json: Any = None) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, json=json, timeout=seconds)
        except httpx.HTTPError as error:
            raise HostError(
                f"Ray's job server at {self._address} does not answer: {type(error).__name__} {error}"
            ) from error
        if answer.status_code in (401, 403):
            raise HostError(
                f"Ray's job server at {self._address} wants a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
            )
        return answer


def kill_here(run_id: str, driver: str) -> bool:
    """Kill a run's driver, told as ``host:pid``, if it is a process of this host: a stopped one obeys nothing else."""
    host, _, pid = driver.rpartition(":")
    if host != socket.gethostname():
        return False
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if not {"services.driver", run_id} <= set(command):
            return False  # another process has its id
        os.kill(int(pid), signal.SIGKILL)
    except (OSError, ValueError):
        return False
    return True


def ray_token() -> str | None:
    """The token a Ray process of this environment sends, None where authentication is off.

    Raises:
        HostError: it is on, and no token is to be found where Ray looks for it.
    """
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text().strip()
    except OSError as error:
        raise HostError(f"RAY_AUTH_MODE is token, but {file} can not be read: {error.strerror}") from error


def _is_driver(job: dict[str, Any]) -> bool:
    return "volley_run" in (job.get("metadata") or {})


def _is_alive(job: dict[str, Any]) -> bool:
    return job["status"] in ("PENDING", "RUNNING")


def _was_killed(job: dict[str, Any]) -> bool:
    """Without an exit code it is Ray that lost it."""
    code = job.get("driver_exit_code")
    return job["status"] == "FAILED" and (code is None or code < 0)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" .")]
    return lines[-1][:300] if lines else "no reason given"
