# ruff: noqa: BLE001, PTH112, PTH120, PTH123, PTH207, PTH208, S102, SIM115, T201 - this script stands in for the interpreter
"""The process inside the sandbox. It never runs model-written code itself; it forks the processes that do.

It runs as a single-file script with only the standard library, since nothing else of Volley is visible inside. Its
argument is the file descriptor of the control socket. Each packet is one JSON object, with file descriptors attached.
The judge's requests and the replies are:

    {"preload", "filter", "layers", ...}  once, with the cgroup.procs files to join -> {"id": 0, "ready": true}
    {"id", "op": "begin"} + program source                                          -> {"id", "begun": true}
    {"id", "op": "test", "limits"} + standard input, output, error, note            -> {"id", "exit", "cpu_s", ...}
    {"id", "op": "kill"}  while test ``id`` runs and exceeds a limit that the judge checks
    {"id", "op": "end"}  with the id of its begin, answered when all processes ended -> {"id", "ended": true}

Every reply carries the id of its request; the judge kills the whole sandbox if anything unexpected arrives.

A forked process inherits the memory and descriptors of its parent. So neither this process nor the first process of a
program reads any source, input or output: they pass descriptors on, and only the process that becomes the program
reads them. If that process cannot start the program, it reports why to the judge through ``note``.
"""

import _sitebuiltins
import atexit
import base64
import builtins
import contextlib
import ctypes
import gc
import glob
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn

CONTROL_FD = NOTE_FD = 3  # the control socket; in the process that becomes a program, the note to the judge
LOST = -1  # an id of no request, which makes the judge end the sandbox
CLONE_VM, CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 1 << 8, 1 << 17, 1 << 26, 1 << 27
CLONE_NEWUSER, CLONE_NEWPID = 1 << 28, 1 << 29
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
MS_NOSUID, MS_NODEV, MS_NOEXEC, MNT_DETACH = 2, 4, 8, 2
SYS_LANDLOCK, SYS_CAPSET = 444, {"x86_64": 126, "aarch64": 91}[os.uname().machine]
SETUP_FAILED, COMPILE_FAILED = b"S", b"C"
STACK_BYTES = 1 << 16
WAIT_FOR_ALL = 0x40000000  # __WALL: children of any kind
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

libc = ctypes.CDLL(None, use_errno=True)
libc.clone.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


def call(name: str, *arguments: Any) -> int:
    """Call a libc function. Raises OSError if it returns a negative value."""
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def main() -> None:
    control = int(sys.argv[1])
    if control != CONTROL_FD:
        os.dup2(control, CONTROL_FD)
        os.close(control)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # with a handler, programs could interrupt the first process
    sock = socket.socket(fileno=CONTROL_FD)
    config, fds = receive(sock)
    for fd in fds:
        os.write(fd, b"0")
        os.close(fd)
    sys.path += config["import_path"]
    for module in config["preload"]:
        importlib.import_module(module)
    compile("", "warm-up", "exec")  # the first compile() of a process costs a millisecond
    exec(config["warm_up"], {})
    box = Box(config)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # nothing in the sandbox may inspect this process
    gc.collect()
    gc.freeze()  # so that the collector does not touch, and thereby unshare, pages shared with children
    reply(sock, 0, ready=True)
    while True:
        request, fds = receive(sock)
        if request["op"] == "begin":
            serve_program(sock, box, request["id"], fds[0])


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return one message and its file descriptors; exit when the judge has closed the socket."""
    data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 8)
    if not data:
        os._exit(0)
    return json.loads(data), fds


def reply(sock: socket.socket, request_id: int, **fields: Any) -> None:
    sock.send(json.dumps({"id": request_id, **fields}).encode())


# ---------------------------------------------------------------------------------------------------------- per program


def serve_program(sock: socket.socket, box: "Box", request_id: int, source: int) -> None:
    """Serve one program until the judge ends it, in its own namespaces if the box has any."""
    if not box.nested:
        drop_bounding_set()
        reply(sock, request_id, begun=True)
        serve_tests(sock, box, source)
        os.close(source)
        reply(sock, request_id, ended=True)
        return
    child = os.fork()
    if child:
        os.close(source)
        _, status = os.waitpid(child, 0)
        if status == 0:
            reply(sock, request_id, ended=True)
        else:
            reply(sock, LOST, error="the program's first process died")
        return

    status = 1
    try:
        enter_namespaces()
        init = os.fork()
        if init == 0:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
            drop_bounding_set()
            reply(sock, request_id, begun=True)
            serve_tests(sock, box, source)
            os._exit(0)
        _, status = os.waitpid(init, 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1 if status else 0)


def enter_namespaces() -> None:
    """Enter new user, pid, mount, ipc and uts namespaces, in which only this account exists."""
    uid, gid = os.getuid(), os.getgid()
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # only a dumpable process may write its own uid_map
    call("unshare", CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def serve_tests(sock: socket.socket, box: "Box", source: int) -> None:
    """Run the tests of one program until the judge ends it."""
    own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if box.nested else -1
    while True:
        request, fds = receive(sock)
        if request["op"] == "end":
            return
        if request["op"] == "test":
            surroundings = Surroundings(box, own_namespace)
            outcome = run_test(sock, box, source, request, fds, surroundings)
            reply(sock, request["id"], **outcome)
            surroundings.close()


# ------------------------------------------------------------------------------------------------------------- per test


def run_test(
    sock: socket.socket, box: "Box", source: int, request: dict[str, Any], fds: list[int], surroundings: "Surroundings"
) -> dict[str, Any]:
    """Fork the program, wait for it up to its limits and kill whatever it leaves behind."""
    began, own_began = time.monotonic(), time.process_time()
    child = os.fork()
    if child == 0:
        become_program(box, source, request["limits"], fds)
    for fd in fds:
        os.close(fd)
    timed_out = wait_or_kill(sock, child, request["id"], began, request["limits"], surroundings.proc(child))
    _, status, usage = os.wait4(child, 0)
    left_behind_s = surroundings.kill(child)
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "timed_out": timed_out,
        "cpu_s": usage.ru_utime + usage.ru_stime + left_behind_s,
        "own_cpu_s": time.process_time() - own_began,
        "wall_s": time.monotonic() - began,
        "peak_mb": usage.ru_maxrss / 1024,
    }


def wait_or_kill(
    sock: socket.socket, child: int, request_id: int, began: float, limits: dict[str, Any], proc: str
) -> bool:
    """Wait for the child to end; return True if its time ran out first. The judge may request a kill at any moment.

    Time that the child spends waiting for a processor does not count, up to ``credit_s``: a busy host is not its fault.
    """
    deadline = began + limits["wall_s"]
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(sock, select.POLLIN)
    try:
        while True:
            events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if any(fd == handle for fd, _ in events):
                return False
            if not events:
                deadline = began + limits["wall_s"] + min(seconds_starved(proc), limits["credit_s"])
                if time.monotonic() < deadline:
                    continue
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return True
            request, _ = receive(sock)
            if request == {"id": request_id, "op": "kill"}:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return False
    finally:
        os.close(handle)


def seconds_starved(proc: str) -> float:
    """Return how long the longest-waiting thread has waited for a processor; 0 if the kernel does not count it."""
    longest = 0
    with contextlib.suppress(OSError, IndexError, ValueError):
        for task in os.listdir(f"{proc}/task"):
            with open(f"{proc}/task/{task}/schedstat") as file:
                longest = max(longest, int(file.read().split()[1]))
    return longest / 1e9


def become_program(box: "Box", source: int, limits: dict[str, Any], fds: list[int]) -> NoReturn:
    """Confine the forked child, compile the program and run it."""
    try:
        os.setsid()
        text = os.pread(source, os.fstat(source).st_size, 0)
        for target, fd in enumerate(fds):
            os.dup2(fd, target, inheritable=target != NOTE_FD)
        for begin, end in ((NOTE_FD + 1, box.ruleset), (max(NOTE_FD, box.ruleset) + 1, 1 << 12)):
            os.closerange(begin, end)
        call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # for /proc/self; this memory holds nothing of other programs
        box.confine(limits, text)
    except BaseException as problem:
        os.write(NOTE_FD, SETUP_FAILED + f"{type(problem).__name__}: {problem}".encode())
        os._exit(125)
    try:
        code = compile(text, box.program_path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as problem:
        os.write(NOTE_FD, COMPILE_FAILED + f"{type(problem).__name__}: {problem}".encode(errors="replace")[:2000])
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os.close(NOTE_FD)
    run_as_main(code, box.program_path)


def run_as_main(code: types.CodeType, path: str) -> NoReturn:
    """Behave like ``python program.py``: real files for standard streams, ``__main__``, exit codes, exit handlers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    builtins.exit, builtins.quit = (_sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)") for name in ("exit", "quit"))
    main_module = types.ModuleType("__main__")
    vars(main_module).update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = main_module
    sys.argv, sys.path[:0] = [path], [os.path.dirname(path)]
    try:
        exec(code, main_module.__dict__)
        exit_code = 0
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        exit_code = 1
    try:
        vars(threading)["_shutdown"]()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        exit_code = exit_code or 1
    os._exit(exit_code & 0xFF)


# ---------------------------------------------------------------------------------------------------------- confinement


class Box:
    """The layers, paths and mounts of this sandbox, from the judge's configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.layers = frozenset(config["layers"])
        self.nested = config["nested"]
        self.program_path = config["program_path"]
        self.scratch = config["scratch"]
        self.scratch_options = config["scratch_options"].encode()
        readable = sorted({os.path.realpath(path) for path in (*config["readable"], sys.base_prefix)})
        hidden = {path for root in readable for pattern in config["hidden"] for path in glob.glob(f"{root}/{pattern}")}
        rules = [rule for root in readable for rule in reading_rules(root, hidden)]
        self.rules = [*rules, *((path, EVERYTHING) for path in config["writable"])]
        # with mounts of its own, each test needs a new ruleset
        self.ruleset = landlock_ruleset(self.rules) if "landlock" in self.layers and not self.nested else -1
        program = base64.b64decode(config["filter"])
        self._instructions = ctypes.create_string_buffer(program, len(program))
        self._filter = FilterProgram(len(program) // 8, ctypes.addressof(self._instructions))

    def confine(self, limits: dict[str, Any], source: bytes) -> None:
        """Apply the limits and the policy to this process, irrevocably."""
        if self.nested:  # /proc shows the pid namespace of the process that mounts it
            mount("/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, b"hidepid=2,subset=pid")
        if self.scratch:
            os.chdir(self.scratch[0])
            with open(self.program_path, "wb") as file:
                file.write(source)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # when memory runs out, the kernel kills the program, not the zygote
        for name, (soft, hard) in limits["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (soft, hard))
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if "landlock" in self.layers:
            restrict(self.ruleset if self.ruleset >= 0 else landlock_ruleset(self.rules))
        drop_capabilities()
        if "seccomp" in self.layers:
            call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(self._filter), 0, 0)


class Surroundings:
    """New processes, /proc, /tmp and /dev/shm for every test, so that no test can pass anything to the next.

    If the box has namespaces, each test gets a pid namespace. Its first process only waits to be killed, which kills
    every process of the test at once. It shares this process's memory, because copying that would be wasteful.
    """

    def __init__(self, box: Box, own_namespace: int) -> None:
        self._own_namespace = own_namespace
        self._mounts = box.scratch if box.nested else []
        if not box.nested:
            self._first = 0
            return
        self._stack = ctypes.create_string_buffer(STACK_BYTES)
        top = (ctypes.addressof(self._stack) + STACK_BYTES) & ~0xFF
        pause = ctypes.cast(libc.pause, ctypes.c_void_p)
        call("unshare", CLONE_NEWPID)
        self._first = call("clone", pause, top, CLONE_VM | signal.SIGCHLD, None)
        for path in box.scratch:
            mount(path, b"tmpfs", MS_NOSUID | MS_NODEV, box.scratch_options)

    def proc(self, child: int) -> str:
        """Return the folder of the program ``child`` in /proc; in its own pid namespace it is process 2."""
        return "/proc/2" if self._first else f"/proc/{child}"

    def kill(self, session: int) -> float:
        """Kill the processes that the program left behind; return the processor seconds they used.

        Without namespaces, only processes in the program's session are killed, and the result is 0.
        """
        if not self._first:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(session, signal.SIGKILL)
            return 0.0
        used = sum(processor_seconds(entry) for entry in os.listdir("/proc") if entry.isdigit())
        os.kill(self._first, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:  # once all children are reaped, the namespace is gone
                os.waitpid(-1, WAIT_FOR_ALL)
        return used

    def close(self) -> None:
        """Unmount everything and return to this process's own pid namespace for children."""
        for path in self._mounts:
            call("umount2", path.encode(), MNT_DETACH)
        if self._first:
            libc.umount2(b"/proc", MNT_DETACH)  # fails if the process died before mounting it
            call("setns", self._own_namespace, CLONE_NEWPID)


def mount(path: str, kind: bytes, flags: int, options: bytes) -> None:
    call("mount", kind, path.encode(), kind, flags, options)


def processor_seconds(pid: str) -> float:
    """Return the processor seconds of one process and of the children it has waited for."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS_PER_S


class FilterProgram(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def drop_bounding_set() -> None:
    """Empty the bounding set, so that no child can ever gain a capability."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break


def drop_capabilities() -> None:
    call("syscall", SYS_CAPSET, struct.pack("=Ii", 0x20080522, 0), bytes(24))


EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, DEVICE_IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | DEVICE_IOCTL
READ, EVERYTHING = EXECUTE | READ_FILE | READ_DIR, (1 << 16) - 1


def reading_rules(root: str, hidden: set[str]) -> list[tuple[str, int]]:
    """Return Landlock rules to read everything below ``root`` except ``hidden`` folders, whose names stay visible."""
    if not any(path.startswith(f"{root}/") for path in hidden):
        return [] if root in hidden else [(root, READ)]
    entries = [entry.path for entry in os.scandir(root) if not entry.is_symlink()]
    return [(root, READ_DIR), *(rule for path in entries for rule in reading_rules(path, hidden))]


def landlock_ruleset(rules: list[tuple[str, int]]) -> int:
    """Create a ruleset that denies all other paths, TCP, and signals and abstract sockets of processes outside.

    Uses as much of this as the kernel's version of Landlock supports.
    """
    version = call("syscall", SYS_LANDLOCK, None, 0, 1)
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network, scoped = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("=QQQ", rights, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = call("syscall", SYS_LANDLOCK, attributes, len(attributes), 0)
    for path, granted in rules:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        access = granted & rights if os.path.isdir(path) else granted & rights & FILE_RIGHTS
        call("syscall", SYS_LANDLOCK + 1, ruleset, 1, struct.pack("=Qi", access, fd), 0)
        os.close(fd)
    return ruleset


def restrict(ruleset: int) -> None:
    call("syscall", SYS_LANDLOCK + 2, ruleset, 0)
    os.close(ruleset)


if __name__ == "__main__":
    main()
