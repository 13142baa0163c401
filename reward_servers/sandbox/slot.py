"""One slot: a sandbox process of its own account and cgroup, driven over a socket, replaced at any surprise."""

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
from dataclasses import dataclass, field
from typing import Any, Literal

from reward_servers.sandbox import accounts, cgroups, launch, policy, seccomp
from reward_servers.sandbox.outcome import Outcome, classify
from volley.scoring import SandboxLimits

log = logging.getLogger(__name__)

Tier = Literal["A", "B", "C", "none"]
START_DEADLINE_S = 60.0  # the packages to import first may be heavy
GRACE_S = 5.0  # what the zygote may take beyond a test's own wall time
CREDIT = 2.0  # share of a test's wall time that waiting for a processor may add to it
STEP_DEADLINE_S = 10.0
CHUNK = 1 << 16
ADD_SEALS, ALL_SEALS = 1033, 15


class SandboxFailure(Exception):
    """The sandbox itself failed: says nothing about the program."""


class SlotEnded(Exception):
    """The slot was told to end while it ran a program: there is no verdict, and nobody waits for one."""


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """What a slot is made of.

    Attributes:
        tier: which layers surround a program.
        mechanism: ``pooled`` serves many programs from one sandbox, ``fresh`` starts one for each.
        packages: importable inside.
        preload: imported before the first program, so that programs need not wait for them.
        warm_up: trusted code run once before the first program, to fill caches that every program then shares.
        limits: of one test, unless a program brings its own.
        without: layers switched off; for tests that show what each layer is for.
    """

    tier: Tier
    mechanism: Literal["pooled", "fresh"] = "pooled"
    packages: tuple[str, ...] = ()
    preload: tuple[str, ...] = policy.PRELOAD
    warm_up: str = ""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    without: frozenset[str] = frozenset()

    @property
    def namespaced(self) -> bool:
        return self.tier in ("A", "B") and "namespaces" not in self.without

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers in force, outermost first."""
        have = {
            "A": ("account", "cgroup", "namespaces", "landlock", "seccomp", "rlimits"),
            "B": ("account", "namespaces", "landlock", "seccomp", "rlimits"),
            "C": ("account", "landlock", "seccomp", "rlimits"),
            "none": ("rlimits",),
        }[self.tier]
        return tuple(name for name in have if name not in self.without and (name != "account" or os.geteuid() == 0))


class Slot:
    """Runs programs one test at a time. Must be used from one thread: the sandbox ends with the thread that made it.

    Another thread may `end` it.
    """

    def __init__(self, index: int, config: SlotConfig) -> None:
        self.index, self.config = index, config
        self.restarts = -1
        self._ids = itertools.count(1)
        self._group = cgroups.create(f"{cgroups.PREFIX}{os.getpid()}-{index}") if "cgroup" in config.layers else None
        if "cgroup" in config.layers and self._group is None:
            raise SandboxFailure("no writable memory and pids cgroup")
        self._account = accounts.claim(index) if "account" in config.layers else None
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._limits: SandboxLimits | None = None
        self._ending = threading.Lock()  # held while the process begins or goes, so that `end` finds it or prevents it
        self._ended = False

    # ---------------------------------------------------------------------------- life of the sandbox

    def start(self) -> None:
        """Start the sandbox where none runs. Raises SandboxFailure, or SlotEnded."""
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
            command = launch.namespaced_command(
                inside, self.uid, control.fileno(), first_process=self.config.mechanism == "fresh"
            )
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
        config, nested = self.config, self.config.namespaced and self.config.mechanism == "pooled"
        strict = not config.namespaced
        members = self._group.open_members() if self._group else []
        self._apply_limits(config.limits)
        message = {
            "import_path": launch.interpreter(config.packages).import_path(namespaced=config.namespaced),
            "warm_up": config.warm_up,
            "preload": [*config.preload, *config.packages],
            "filter": base64.b64encode(
                seccomp.allow_filter() if strict and config.tier == "C" else seccomp.deny_filter()
            ).decode(),
            "layers": list(config.layers),
            "nested": nested,
            "program_path": "program.py" if strict else f"{policy.TMP}/program.py",
            "scratch": [] if strict else [policy.TMP, policy.SHM],
            "scratch_options": f"size={policy.SCRATCH_BYTES},nr_inodes={policy.SCRATCH_INODES},mode=1777",
            "readable": [*(policy.READABLE_STRICT if strict else policy.READABLE), *self._bare_packages()],
            "writable": [] if strict else list(policy.WRITABLE),
        }
        self._send(message, members)
        for fd in members:
            os.close(fd)
        if not self._receive(0, START_DEADLINE_S).get("ready"):
            raise SandboxFailure("the sandbox did not report ready")

    def _bare_packages(self) -> list[str]:
        return [] if self.config.namespaced else [path for path, _ in launch.interpreter(self.config.packages).packages]

    def kill(self) -> None:
        """End the sandbox and everything in it."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        with self._ending:
            if self._process is not None:
                launch.end(self._process, namespaced=self.config.namespaced)
                self._process = None
        self._limits = None
        for _ in range(200):
            left = self._group.processes() if self._group else []
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def end(self) -> None:
        """From any thread: whatever runs is killed, nothing starts again, and the slot's own thread gets SlotEnded."""
        with self._ending:
            self._ended = True
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _raise_if_ended(self, problem: Exception) -> None:
        if self._ended:
            raise SlotEnded from problem

    def close(self) -> None:
        """End the sandbox, remove its cgroup and give its account back."""
        self.kill()
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.remove()
        if self._account is not None:
            self._account.release()

    @property
    def uid(self) -> int | None:
        """The account programs run as; None where it is that of this process."""
        return self._account.uid if self._account else None

    @property
    def pid(self) -> int:
        """Process id of the sandbox's outermost process; 0 where none runs."""
        return self._process.pid if self._process else 0

    # ------------------------------------------------------------------------------------ one program

    @contextlib.contextmanager
    def program(self, source: bytes, limits: SandboxLimits | None = None) -> Any:
        """Everything between ``begin`` and ``end`` of one program: yields ``run(stdin) -> Outcome``.

        Raises:
            SandboxFailure: the sandbox did not do what it was asked; it has been killed and may be used again.
            SlotEnded: `end` was called.
        """
        limits = limits or self.config.limits
        try:
            self.start()
            self._apply_limits(limits)
            with _sealed(source) as fd:
                self._ask("begin", STEP_DEADLINE_S, [fd])
            yield lambda stdin: self._run(stdin, limits)
            if self.config.mechanism == "fresh":
                self.kill()
            else:
                self._ask("end", STEP_DEADLINE_S, [])
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
        if self._group is not None and limits != self._limits:
            self._group.limit(limits.memory_mb, limits.processes)
        self._limits = limits

    def _ask(self, op: str, bound: float, fds: list[int]) -> None:
        request_id = next(self._ids)
        self._send({"id": request_id, "op": op}, fds)
        self._receive(request_id, bound)

    def _run(self, stdin: bytes, limits: SandboxLimits) -> Outcome:
        request_id = next(self._ids)
        out_in, out = os.pipe2(os.O_CLOEXEC)
        err_in, err = os.pipe2(os.O_CLOEXEC)
        if self.uid is not None:
            for pipe in (out, err):
                os.fchown(pipe, self.uid, -1)  # or the program could not open its own /dev/stdout
        ooms = self._group.oom_kills() if self._group else 0
        test_limits = {
            "wall_s": limits.wall_s,
            "credit_s": CREDIT * limits.wall_s,
            "rlimits": rlimits(limits, self.config),
        }
        try:
            with _sealed(stdin) as fd:
                self._send({"id": request_id, "op": "test", "limits": test_limits}, [fd, out, err])
            os.close(out)
            os.close(err)
            out = err = -1
            reader = _Reader({out_in: limits.stdout_kb << 10, err_in: limits.stderr_kb << 10})
            answer = self._follow(reader, request_id, limits)
        finally:
            for pipe in (out_in, err_in, *(fd for fd in (out, err) if fd >= 0)):
                os.close(pipe)
        killed_for_memory = self._group is not None and self._group.oom_kills() > ooms
        stdout, stderr = bytes(reader.data[out_in]), bytes(reader.data[err_in])
        return classify(answer, stdout, stderr, limits, flooded=reader.over, killed_for_memory=killed_for_memory)

    def _follow(self, reader: "_Reader", request_id: int, limits: SandboxLimits) -> dict[str, Any]:
        """Read the test's output while waiting for its end, both with a bound."""
        control = self._control()
        poll = select.poll()
        for fd in (*reader.data, control.fileno()):
            poll.register(fd, select.POLLIN)
        bound, answer, asked = (1 + CREDIT) * limits.wall_s + GRACE_S, None, False
        deadline = time.monotonic() + bound
        while answer is None or reader.open:
            events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                if answer is None:
                    raise SandboxFailure(f"no reply within {bound:.0f} s")
                raise SandboxFailure("something outlived its test and holds its output open")
            for fd, _ in events:
                if fd == control.fileno():
                    answer = self._receive(request_id, 0)
                    poll.unregister(fd)
                    deadline = time.monotonic() + GRACE_S
                elif not reader.read(fd):
                    poll.unregister(fd)
            if reader.over and not asked and answer is None:
                self._send({"id": request_id, "op": "kill"}, [])
                asked = True
        return answer

    # ---------------------------------------------------------------------------------------- messages

    def _control(self) -> socket.socket:
        if self._sock is None:
            raise SandboxFailure("no sandbox runs")
        return self._sock

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        socket.send_fds(self._control(), [json.dumps(message).encode()], fds)

    def _receive(self, request_id: int, bound: float) -> dict[str, Any]:
        control = self._control()
        if not select.select([control], [], [], bound)[0]:
            raise SandboxFailure(f"no reply within {bound:.0f} s")
        data = control.recv(CHUNK)
        if not data:
            raise SandboxFailure("the sandbox ended")
        message = json.loads(data)
        if not isinstance(message, dict) or message.get("id") != request_id:
            raise SandboxFailure(f"a reply to another request: {data[:200]!r}")
        return message


class _Reader:
    """Collects pipes up to a bound each, and goes on emptying them beyond it."""

    def __init__(self, bounds: dict[int, int]) -> None:
        self._bounds = bounds
        self.data = {fd: bytearray() for fd in bounds}
        self.open = set(bounds)
        self.over = False

    def read(self, fd: int) -> bool:
        """Take what is there; False at the end of the pipe."""
        piece = os.read(fd, CHUNK)
        if not piece:
            self.open.discard(fd)
            return False
        room = self._bounds[fd] - len(self.data[fd])
        self.data[fd] += piece[: max(0, room)]
        self.over |= len(piece) > room
        return True


def rlimits(limits: SandboxLimits, config: SlotConfig) -> dict[str, tuple[int, int]]:
    """(soft, hard) per-process limits of one test. Without a cgroup the address space has to stand in for memory."""
    memory = limits.memory_mb << 20
    space = 4 * memory + (1 << 30) if "cgroup" in config.layers else memory + (256 << 20)
    equal = {
        "RLIMIT_AS": space,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_FSIZE": limits.file_mb << 20,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_MEMLOCK": 0,
    }
    cpu = math.ceil(limits.cpu_s)
    return {name: (value, value) for name, value in equal.items()} | {"RLIMIT_CPU": (cpu, cpu + 1)}


@contextlib.contextmanager
def _sealed(data: bytes) -> Any:
    """A read-only file that holds ``data``; not even its reader can open it for writing again."""
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
