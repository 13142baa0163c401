"""A slot: one sandbox process with its own account and cgroup, controlled over a socket and replaced on any failure."""

import base64
import contextlib
import fcntl
import itertools
import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from reward_servers.sandbox import accounts, cgroups, launch, policy, seccomp
from reward_servers.sandbox.metering import LOOK_S, Meter, Rest
from reward_servers.sandbox.outcome import Outcome, classify
from reward_servers.sandbox.pipes import Pipes
from reward_servers.sandbox.slot_config import SlotConfig, rlimits
from volley.scoring import SandboxLimits

log = logging.getLogger(__name__)

START_DEADLINE_S = 60.0  # long, because packages are imported
GRACE_S = 5.0  # allowed to the zygote beyond a test's wall time
CREDIT = 2.0  # waiting for a processor may add up to this multiple of a test's wall time
STEP_DEADLINE_S = 10.0
MESSAGE_BYTES = 1 << 16
MIN_WALL_S = 0.1
NOTE_BYTES = 1 << 13
SETUP_FAILED, COMPILE_FAILED = b"S", b"C"  # first byte of a note, sent if the program could not start
ADD_SEALS, ALL_SEALS = 1033, 15


class SandboxFailure(Exception):
    """The sandbox itself failed; this says nothing about the program."""


class SlotEnded(Exception):
    """`Slot.end` was called, so there is no verdict."""


class Slot:
    """Runs programs one test at a time.

    Must be used from one thread, because the sandbox ends with the thread that started it; only `end` may be called
    from another.
    """

    def __init__(self, index: int, config: SlotConfig) -> None:
        self.index, self.config = index, config
        self.restarts = -1
        self._ids = itertools.count(1)
        self.group = self._make_group() if "cgroup" in config.layers else None
        self._at_rest = Rest()
        self._account = accounts.claim(index) if "account" in config.layers else None
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._limits: SandboxLimits | None = None
        self._ending = threading.Lock()  # held while starting or killing, so that `end` cannot miss a process
        self._ended = False

    # ---------------------------------------------------------------------------- life of the sandbox

    def _make_group(self) -> cgroups.SlotGroup:
        group = cgroups.create(f"{cgroups.PREFIX}{os.getpid()}-{self.index}")
        if group is None:
            raise SandboxFailure("no writable memory and pids cgroup")
        return group

    def _replace_group(self, group: cgroups.SlotGroup) -> None:
        """Kill the sandbox and create a new cgroup; memory that the kernel cannot free stays charged to the old one."""
        self.kill()
        try:
            group.remove()
        except OSError as problem:
            raise SandboxFailure(f"the slot's cgroup cannot be removed: {problem}") from problem
        self.group = self._make_group()

    def start(self) -> None:
        """Start the sandbox unless it runs already; replace it if a program left something behind.

        Raises:
            SandboxFailure: the sandbox did not start.
            SlotEnded: `end` was called.
        """
        if self.group is not None and (excess := self._at_rest.excess(self.group)):
            log.warning("slot %d: a program left behind %s; replacing the sandbox", self.index, excess)
            self._replace_group(self.group)
        if self._process is not None:
            return
        self.restarts += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock = ours
        try:
            with theirs, self._ending:
                if self._ended:
                    raise SlotEnded
                self._process = self._spawn(theirs)
            self._configure()
        except (OSError, ValueError, SandboxFailure) as problem:
            self.kill()
            self._raise_if_ended(problem)
            raise SandboxFailure(f"the sandbox did not start: {problem}") from problem

    def _spawn(self, control: socket.socket) -> subprocess.Popen[bytes]:
        inside = launch.interpreter(self.config.packages)
        if self.config.namespaced:
            command = launch.namespaced_command(inside, self.uid, control.fileno())
        else:
            command = launch.bare_command(inside, self.uid, control.fileno())
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=dict(policy.ENVIRONMENT),
            pass_fds=[control.fileno()],
            start_new_session=True,
        )

    def _configure(self) -> None:
        config = self.config
        strict = not config.namespaced
        members = self.group.open_members() if self.group else []
        self._apply_limits(config.limits)
        message = {
            "import_path": launch.interpreter(config.packages).import_path(namespaced=config.namespaced),
            "warm_up": config.warm_up,
            "preload": [*config.preload, *config.packages],
            "filter": base64.b64encode(
                seccomp.allow_filter() if strict and config.tier == "C" else seccomp.deny_filter()
            ).decode(),
            "layers": list(config.layers),
            "nested": config.namespaced,
            "program_path": "program.py" if strict else f"{policy.TMP}/program.py",
            "scratch": [] if strict else [policy.TMP, policy.SHM],
            "scratch_options": f"size={policy.SCRATCH_BYTES},nr_inodes={policy.SCRATCH_INODES},mode=1777",
            "readable": [*(policy.READABLE_STRICT if strict else policy.READABLE), *self._bare_packages()],
            "writable": [] if strict else list(policy.WRITABLE),
            "hidden": list(policy.PACKAGE_FOLDERS) if strict else [],
        }
        self.send(message, members)
        for fd in members:
            os.close(fd)
        if not self.receive(0, START_DEADLINE_S).get("ready"):
            raise SandboxFailure("the sandbox did not report ready")
        if self.group is not None:
            self._at_rest = Rest(self.group.memory_bytes(), self.group.process_count())

    def _bare_packages(self) -> list[str]:
        return [] if self.config.namespaced else [path for path, _ in launch.interpreter(self.config.packages).packages]

    def kill(self) -> None:
        """Kill the sandbox and everything in it."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        with self._ending:
            if self._process is not None:
                launch.end(self._process, namespaced=self.config.namespaced)
                self._process = None
        self._limits, self._at_rest = None, Rest()
        for _ in range(200):
            left = self.group.processes() if self.group else []
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def end(self) -> None:
        """Kill whatever runs and prevent further starts: the slot's own thread gets SlotEnded. For any thread."""
        with self._ending:
            self._ended = True
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _raise_if_ended(self, problem: Exception) -> None:
        if self._ended:
            raise SlotEnded from problem

    def close(self) -> None:
        """Kill the sandbox, remove its cgroup and release its account."""
        self.kill()
        if self.group is not None:
            with contextlib.suppress(OSError):
                self.group.remove()
        if self._account is not None:
            self._account.release()

    @property
    def uid(self) -> int | None:
        """The account that programs run as; None if it is that of this process."""
        return self._account.uid if self._account else None

    @property
    def pid(self) -> int:
        """Process id of the sandbox's outermost process; 0 if it does not run."""
        return self._process.pid if self._process else 0

    # ------------------------------------------------------------------------------------ one program

    @contextlib.contextmanager
    def program(self, source: bytes, limits: SandboxLimits | None = None) -> Iterator["RunTest"]:
        """Set up one program and clean up after it; yields a function that runs one test.

        Raises:
            SandboxFailure: the sandbox failed and was killed; the slot can be used again.
            SlotEnded: `end` was called.
        """
        limits = limits or self.config.limits
        with self.failures():
            self.start()
            self._apply_limits(limits)
            with _sealed(source) as fd:
                program_id = next(self._ids)
                self._ask(program_id, "begin", [fd])
        try:
            yield lambda stdin, within_s=math.inf: self._run(stdin, limits, within_s)
        except BaseException:
            self.kill()
            raise
        with self.failures():
            if self.config.mechanism == "fresh":
                self.kill()
            else:
                self._ask(program_id, "end", [])

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Kill the sandbox if the block raises anything; turn errors of the exchange into SandboxFailure."""
        try:
            yield
        except (OSError, ValueError, KeyError, SandboxFailure) as problem:
            self.kill()
            self._raise_if_ended(problem)
            if isinstance(problem, SandboxFailure):
                raise
            raise SandboxFailure(f"{type(problem).__name__}: {problem}") from problem
        except BaseException:
            self.kill()
            raise

    def _apply_limits(self, limits: SandboxLimits) -> None:
        if self.group is not None and limits != self._limits:
            self.group.limit(limits.memory_mb, limits.processes)
        self._limits = limits

    def _ask(self, request_id: int, op: str, fds: list[int]) -> None:
        self.send({"id": request_id, "op": op}, fds)
        self.receive(request_id, STEP_DEADLINE_S)

    def _run(self, stdin: bytes, limits: SandboxLimits, within_s: float) -> Outcome:
        request_id = next(self._ids)
        ooms = self.group.oom_kills() if self.group else 0
        meter = Meter(self.group, limits.cpu_s)
        wall_s = min(limits.wall_s, max(within_s, MIN_WALL_S))
        credit_s = max(0.0, min(CREDIT * limits.wall_s, within_s - wall_s))
        test_limits = {"wall_s": wall_s, "credit_s": credit_s, "rlimits": rlimits(limits, self.config)}
        bounds = (limits.stdout_kb << 10, limits.stderr_kb << 10, NOTE_BYTES)
        with self.failures(), Pipes(*bounds, owner=self.uid) as pipes:
            with _sealed(stdin) as fd:
                self.send({"id": request_id, "op": "test", "limits": test_limits}, [fd, *pipes.writers])
            pipes.close_writers()
            answer = self._follow(pipes, request_id, wall_s + credit_s + GRACE_S, meter)
            killed_for_memory = self.group is not None and self.group.oom_kills() > ooms
            stdout, stderr, note = pipes.contents()
            answer["setup_error"], answer["compile_error"] = (
                note[1:].decode(errors="replace") if note[:1] == kind else "" for kind in (SETUP_FAILED, COMPILE_FAILED)
            )
            answer["cpu_s"] += meter.hidden_s(answer["cpu_s"] + answer["own_cpu_s"])
            return classify(answer, stdout, stderr, limits, flooded=pipes.over, killed_for_memory=killed_for_memory)

    def _follow(self, pipes: Pipes, request_id: int, bound: float, meter: Meter) -> dict[str, Any]:
        """Wait for the test to end, at most ``bound`` seconds, and read its output; have it killed at a limit."""
        control = self.control()
        poll = select.poll()
        for fd in (*pipes.readers, control.fileno()):
            poll.register(fd, select.POLLIN)
        answer, asked = None, False
        deadline = time.monotonic() + bound
        while answer is None or pipes.open:
            left = max(0.0, deadline - time.monotonic())
            events = poll.poll(min(left, LOOK_S) * 1000)
            if not events and left == 0.0:
                if answer is None:
                    raise SandboxFailure(f"no reply within {bound:.0f} s")
                raise SandboxFailure("a process outlived its test and holds its output open")
            for fd, _ in events:
                if fd == control.fileno():
                    answer = self.receive(request_id, 0)
                    poll.unregister(fd)
                    deadline = time.monotonic() + GRACE_S
                elif not pipes.read(fd):
                    poll.unregister(fd)
            if answer is None and not asked and (pipes.over or meter.over()):
                self.send({"id": request_id, "op": "kill"}, [])
                asked = True
        return answer

    # ---------------------------------------------------------------------------------------- messages

    def control(self) -> socket.socket:
        """The socket to the zygote; raises SandboxFailure if the sandbox does not run."""
        if self._sock is None:
            raise SandboxFailure("the sandbox is not running")
        return self._sock

    def send(self, message: dict[str, Any], fds: list[int]) -> None:
        """Send a request to the zygote."""
        socket.send_fds(self.control(), [json.dumps(message).encode()], fds)

    def receive(self, request_id: int, bound: float) -> dict[str, Any]:
        """The zygote's reply to a request; raises SandboxFailure if another or none comes within ``bound`` seconds."""
        control = self.control()
        if not select.select([control], [], [], bound)[0]:
            raise SandboxFailure(f"no reply within {bound:.0f} s")
        data = control.recv(MESSAGE_BYTES)
        if not data:
            raise SandboxFailure("the sandbox ended")
        message = json.loads(data)
        if not isinstance(message, dict) or message.get("id") != request_id:
            raise SandboxFailure(f"unexpected reply: {data[:200]!r}")
        return message


class RunTest(Protocol):
    """Runs one test of a program in at most ``within_s`` seconds of wall time."""

    def __call__(self, stdin: bytes, within_s: float = math.inf) -> Outcome:
        """Run the program on ``stdin``. Raises SandboxFailure or SlotEnded."""
        ...


@contextlib.contextmanager
def _sealed(data: bytes) -> Iterator[int]:
    """Yield a read-only descriptor of a file with ``data`` that nobody can change, not even by reopening it."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, ADD_SEALS, ALL_SEALS)
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)
    try:
        yield read_only
    finally:
        os.close(read_only)
