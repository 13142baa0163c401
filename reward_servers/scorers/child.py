"""A child process that calls one trusted function and can be killed if it hangs."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

START_DEADLINE_S = 60.0  # the user's imports may be heavy
KILL_SECONDS = 10.0
EXIT_SECONDS = 1.0


class Child:
    """A process that has imported the function. Requests and answers are single lines of JSON."""

    def __init__(self, target: str) -> None:
        command = [sys.executable, "-m", "reward_servers.scorers.python_child", target]
        importable = os.pathsep.join(path for path in sys.path if path)  # the child can import what this process can
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": importable},
            start_new_session=True,
        )
        try:
            self._read_line(START_DEADLINE_S, "start")
        except BaseException:
            self.kill()
            raise

    def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one request and return the answer.

        Raises:
            TimeoutError, EOFError, OSError, ValueError: the call failed; the child must not be used again.
        """
        if self._process.stdin is None:
            raise OSError("the child has no standard input")
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = json.loads(self._read_line(timeout_s, "answer"))
        if not isinstance(answer, dict):
            raise ValueError("the child's answer is not a JSON object")
        return answer

    def _read_line(self, timeout_s: float, awaited: str) -> bytes:
        if self._process.stdout is None:
            raise OSError("the child has no standard output")
        line, deadline = b"", time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no {awaited} within {timeout_s:g} s")
            piece = self._process.stdout.read1(65536)  # type: ignore[attr-defined]
            if not piece:
                with contextlib.suppress(subprocess.TimeoutExpired):  # it may have closed its output only
                    self._process.wait(EXIT_SECONDS)
                raise EOFError(f"the process ended with exit status {self._process.poll()} before its {awaited}")
            line += piece
        return line

    def kill(self) -> None:
        """Kill the child and all processes of its session; never waits for a pipe that another process holds open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(KILL_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unflushed data has no reader any more
                    pipe.close()
