"""An interpreter in a sandbox that executes one piece of code after another and keeps what these define.

Each piece has the limits of one test. If it exceeds one, or ends the process, all that was defined is lost, and the
next piece starts with nothing.
"""

import contextlib
import itertools
import math
import os
import secrets
import select
import time
from pathlib import Path
from typing import Any

from reward_servers.sandbox.metering import LOOK_S, Meter
from reward_servers.sandbox.outcome import Outcome, classify
from reward_servers.sandbox.pipes import Pipes
from reward_servers.sandbox.slot import CREDIT, GRACE_S, NOTE_BYTES, SETUP_FAILED, SandboxFailure, Slot
from reward_servers.sandbox.slot_config import rlimits
from volley.scoring import SandboxLimits

REPL = Path(__file__).with_name("repl.py")
SESSION_S = 86_400.0  # no episode is longer
MOST_CPU_S = 3600  # of all pieces together, for each process
MARK_BYTES = 64
RAISED = b"\0raised"  # as in repl.py


class Interpreter:
    """Runs in ``slot`` from its first piece of code until `close`. Must be used from the slot's thread.

    Attributes:
        raised: whether the last piece of code ended with an exception, which is printed and no failure.
    """

    def __init__(self, slot: Slot, limits: SandboxLimits) -> None:
        self._slot, self._limits = slot, limits
        self._ids = itertools.count(1 << 32)  # no other request of the slot has these
        self._open = contextlib.ExitStack()
        self._request = 0
        self._pipes: Pipes | None = None
        self._writer = -1
        self.raised = False

    @property
    def running(self) -> bool:
        """Whether what was defined is still there."""
        return self._pipes is not None

    def run(self, source: bytes) -> Outcome:
        """Execute ``source``; see `raised` for exceptions.

        Raises:
            SandboxFailure: the sandbox failed and was killed.
            SlotEnded: the slot was ended.
        """
        self.raised = False
        mark = b"\0" + secrets.token_hex(8).encode() + b"\n"
        try:
            pipes = self._pipes or self._start()
            group = self._slot.group
            ooms, meter = group.oom_kills() if group else 0, Meter(group, self._limits.cpu_s)
            with self._slot.failures():
                head = b"%s %d %g\n" % (mark[1:-1], len(source), self._limits.cpu_s)
                answer = self._follow(pipes, head + source, mark, meter)
                stdout, stderr, note = pipes.take()
                if answer is None:
                    errors = stderr.partition(mark)[0]
                    self.raised = errors.endswith(RAISED)
                    return Outcome(None, stdout.partition(mark)[0], errors.removesuffix(RAISED), 0.0, 0.0, 0.0)
                answer["compile_error"], setup_failed = "", note[:1] == SETUP_FAILED
                answer["setup_error"] = note[1:].decode(errors="replace") if setup_failed else ""
                killed = group is not None and group.oom_kills() > ooms
                outcome = classify(answer, stdout, stderr, self._limits, flooded=pipes.over, killed_for_memory=killed)
        except BaseException:
            self._forget()
            raise
        self._forget()
        return outcome

    def close(self) -> None:
        """End the process and all that it started."""
        if self._pipes is None:
            return
        with contextlib.suppress(SandboxFailure), self._slot.failures():  # the slot then starts another sandbox
            self._kill(self._pipes)
        self._forget()

    def _start(self) -> Pipes:
        limits, slot = self._limits, self._slot
        self._open.enter_context(slot.program(REPL.read_bytes(), limits))
        bounds = ((limits.stdout_kb << 10) + MARK_BYTES, (limits.stderr_kb << 10) + MARK_BYTES, NOTE_BYTES)
        pipes = self._open.enter_context(Pipes(*bounds, owner=slot.uid))
        reader, self._writer = os.pipe2(os.O_CLOEXEC)
        self._open.callback(os.close, self._writer)
        os.set_blocking(self._writer, False)
        if slot.uid is not None:
            os.fchown(reader, slot.uid, -1)
        self._request = next(self._ids)
        cpu = {"RLIMIT_CPU": (math.ceil(limits.cpu_s) + 1, MOST_CPU_S)}
        of_process = {"wall_s": SESSION_S, "credit_s": 0.0, "rlimits": rlimits(limits, slot.config) | cpu}
        try:
            with slot.failures():
                slot.send({"id": self._request, "op": "test", "limits": of_process}, [reader, *pipes.writers])
        finally:
            os.close(reader)
        pipes.close_writers()
        self._pipes = pipes
        return pipes

    def _follow(self, pipes: Pipes, data: bytes, mark: bytes, meter: Meter) -> dict[str, Any] | None:
        """Write ``data`` and read the outputs until both have ``mark``: None. If the process ends first, how it did."""
        poll, control = select.poll(), self._slot.control()
        for fd in (*pipes.open, control.fileno()):
            poll.register(fd, select.POLLIN)
        poll.register(self._writer, select.POLLOUT)
        patience = self._limits.wall_limit_s or self._limits.wall_s * (1 + CREDIT)
        deadline, view = time.monotonic() + patience, memoryview(data)
        while not all(mark in output for output in pipes.contents()[:2]):
            left = deadline - time.monotonic()
            over = meter.over()
            if left <= 0 or over or pipes.over:
                answer = self._kill(pipes)
                return {**answer, "timed_out": left <= 0, "cpu_s": self._limits.cpu_s if over else 0.0}
            for fd, _ in poll.poll(min(left, LOOK_S) * 1000):
                if fd == control.fileno():
                    return {**self._ended(pipes), "timed_out": False, "cpu_s": 0.0}
                if fd == self._writer:
                    with contextlib.suppress(BrokenPipeError, BlockingIOError):
                        view = view[os.write(fd, view) :]
                    if not view:
                        poll.unregister(fd)
                elif not pipes.read(fd):
                    poll.unregister(fd)
        return None

    def _kill(self, pipes: Pipes) -> dict[str, Any]:
        self._slot.send({"id": self._request, "op": "kill"}, [])
        return self._ended(pipes)

    def _ended(self, pipes: Pipes) -> dict[str, Any]:
        """How the process ended; its last output is read."""
        answer = self._slot.receive(self._request, GRACE_S)
        deadline = time.monotonic() + GRACE_S
        while pipes.open:
            ready, _, _ = select.select(list(pipes.open), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise SandboxFailure("a process outlived the interpreter and holds its output open")
            for fd in ready:
                pipes.read(fd)
        return answer

    def _forget(self) -> None:
        self._pipes = None
        with contextlib.suppress(SandboxFailure):  # the sandbox was killed, so the program cannot be ended in order
            self._open.close()
