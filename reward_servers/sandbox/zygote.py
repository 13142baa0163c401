# ruff: noqa: BLE001, PTH108, PTH112, PTH120, PTH123, PTH208, S102, SIM115, T201 - it stands for the interpreter itself
"""The process inside the sandbox: it never runs model-written code itself, it forks processes that do.

Started as a plain script (standard library only, nothing of Volley is visible in there) with the control socket as
the file descriptor its argument names, one JSON object per datagram, file descriptors attached. Judge to zygote:

    {"preload", "filter", "layers", ...}  once, with cgroup.procs files to join     -> {"id": 0, "ready": true}
    {"id", "op": "begin"} + program source                                          -> {"id", "begun": true}
    {"id", "op": "test", "limits"} + standard input, output, error                  -> {"id", "exit", "cpu_s", ...}
    {"id", "op": "kill"}  while test ``id`` runs: its output is over the limit
    {"id", "op": "end"}                                                             -> {"id", "ended": true}

Every reply carries the id of its request; the judge kills the whole sandbox at any surprise.
"""

import _sitebuiltins
import atexit
import base64
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn

CONTROL_FD = 3
LOST = -1  # the id of a message that answers nothing: the judge ends the sandbox
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
MS_NOSUID, MS_NODEV, MS_NOEXEC, MNT_DETACH = 2, 4, 8, 2
SYS_LANDLOCK, SYS_CAPSET = 444, {"x86_64": 126, "aarch64": 91}[os.uname().machine]
SETUP_FAILED, COMPILE_FAILED = b"S", b"C"

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """A libc function that returns -1 and sets errno when it fails."""
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def main() -> None:
    given = int(sys.argv[1])
    if given != CONTROL_FD:
        os.dup2(given, CONTROL_FD)
        os.close(given)
    sock = socket.socket(fileno=CONTROL_FD)
    config, fds = receive(sock)
    for fd in fds:
        os.write(fd, b"0")
        os.close(fd)
    sys.path += config["import_path"]
    for module in config["preload"]:
        importlib.import_module(module)
    exec(config["warm_up"], {})
    box = Box(config)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # nothing in the sandbox may look into this process
    gc.collect()
    gc.freeze()  # the children share these pages as long as nobody counts references in them
    reply(sock, 0, ready=True)
    while True:
        request, fds = receive(sock)
        if request["op"] == "begin":
            serve_program(sock, box, request, fds)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One message and its file descriptors. A closed socket means the judge is gone."""
    data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 8)
    if not data:
        os._exit(0)
    return json.loads(data), fds


def reply(sock: socket.socket, request_id: int, **fields: Any) -> None:
    sock.send(json.dumps({"id": request_id, **fields}).encode())


# ---------------------------------------------------------------------------------------------------------- per program


def serve_program(sock: socket.socket, box: "Box", request: dict[str, Any], fds: list[int]) -> None:
    """Serve one program to its end; with namespaces of its own where the box says so."""
    source = read_all(fds[0])
    for fd in fds:
        os.close(fd)
    if not box.nested:
        serve_tests(sock, box, source, request["id"])
        return
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status != 0:
            reply(sock, LOST, error="the program's first process died")
        return

    status = 1
    try:
        enter_namespaces()
        init = os.fork()
        if init == 0:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            mount_fresh("/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, b"hidepid=2,subset=pid")
            for path in box.scratch:
                box.mount_scratch(path)
            call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
            serve_tests(sock, box, source, request["id"])
        else:
            _, status = os.waitpid(init, 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1 if status else 0)


def read_all(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def enter_namespaces() -> None:
    """New user, pid, mount, ipc and uts namespaces, in which this account is the only one."""
    uid, gid = os.getuid(), os.getgid()
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # only a dumpable process may write its own uid_map
    call("unshare", CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount_fresh(path: str, kind: bytes, flags: int, options: bytes) -> None:
    call("mount", kind, path.encode(), kind, flags, options)


def serve_tests(sock: socket.socket, box: "Box", source: bytes, request_id: int) -> None:
    """The loop of one program. Ends with the program where it has namespaces, else returns to wait for the next."""
    reply(sock, request_id, begun=True)
    while True:
        request, fds = receive(sock)
        if request["op"] == "end":
            reply(sock, request["id"], ended=True)
            if box.nested:
                os._exit(0)
            return
        if request["op"] == "test":
            outcome = run_test(sock, box, source, request, fds)
            box.freshen()
            reply(sock, request["id"], **outcome)


# ------------------------------------------------------------------------------------------------------------- per test


def run_test(sock: socket.socket, box: "Box", source: bytes, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Fork, run, wait with a bound, kill what is left."""
    began = time.monotonic()
    status_in, status_out = os.pipe()
    child = os.fork()
    if child == 0:
        become_program(box, source, request["limits"], fds, status_out)
    os.close(status_out)
    for fd in fds:
        os.close(fd)
    timed_out = wait_or_kill(sock, child, request["id"], began, request["limits"])
    _, status, usage = os.wait4(child, 0)
    box.sweep(child)
    os.set_blocking(status_in, False)
    note = b""
    with contextlib.suppress(BlockingIOError):
        note = os.read(status_in, 2000)
    os.close(status_in)
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "timed_out": timed_out,
        "setup_error": note[1:].decode(errors="replace") if note[:1] == SETUP_FAILED else "",
        "compile_error": note[1:].decode(errors="replace") if note[:1] == COMPILE_FAILED else "",
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.monotonic() - began,
        "peak_mb": usage.ru_maxrss / 1024,
    }


def wait_or_kill(sock: socket.socket, child: int, request_id: int, began: float, limits: dict[str, Any]) -> bool:
    """Wait for the child's end; True where its time ran out first. The judge may ask for its end at any moment.

    The wall clock stands still, within a bound, while the child waits for a processor: a loaded host is not its fault.
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
                deadline = began + limits["wall_s"] + min(seconds_starved(child), limits["credit_s"])
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


def seconds_starved(pid: int) -> float:
    """How long the longest-waiting thread of ``pid`` was ready to run without a processor; 0 where nobody counts."""
    longest = 0
    with contextlib.suppress(OSError, IndexError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                longest = max(longest, int(file.read().split()[1]))
    return longest / 1e9


def become_program(box: "Box", source: bytes, limits: dict[str, Any], fds: list[int], status: int) -> NoReturn:
    """In the forked child: give up everything, compile, run. Never returns."""
    try:
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.dup2(status, CONTROL_FD, inheritable=False)
        os.closerange(CONTROL_FD + 1, 1 << 12)
        call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # for /proc/self; nothing secret is left in this memory
        box.confine(limits, source)
    except BaseException as problem:
        os.write(CONTROL_FD, SETUP_FAILED + f"{type(problem).__name__}: {problem}".encode())
        os._exit(125)
    try:
        code = compile(source, box.program_path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as problem:
        os.write(CONTROL_FD, COMPILE_FAILED + f"{type(problem).__name__}: {problem}".encode(errors="replace"))
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os.close(CONTROL_FD)
    run_as_main(code, box.program_path)


def run_as_main(code: types.CodeType, path: str) -> NoReturn:
    """What ``python program.py`` does: real files for the standard streams, ``__main__``, exit codes, exit handlers."""
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
    """What the judge's configuration makes of this sandbox: which layers, which paths, which mounts."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.layers = frozenset(config["layers"])
        self.nested = config["nested"]
        self.program_path = config["program_path"]
        self.scratch = config["scratch"]
        self.scratch_options = config["scratch_options"].encode()
        self.readable, self.writable = [*config["readable"], sys.base_prefix], config["writable"]
        program = base64.b64decode(config["filter"])
        self._instructions = ctypes.create_string_buffer(program, len(program))
        self._filter = FilterProgram(len(program) // 8, ctypes.addressof(self._instructions))

    def mount_scratch(self, path: str) -> None:
        mount_fresh(path, b"tmpfs", MS_NOSUID | MS_NODEV, self.scratch_options)

    def sweep(self, session: int) -> None:
        """Kill every other process of this pid namespace; without one, those that stayed in the program's session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)
        while os.getpid() == 1:  # for anybody else -1 means every process of the account
            try:
                os.kill(-1, signal.SIGKILL)
                while True:
                    os.waitpid(-1, 0)
            except (ProcessLookupError, ChildProcessError):
                return

    def freshen(self) -> None:
        """New /tmp and /dev/shm, so that a test can not tell the next one anything."""
        if self.nested:
            os.chdir("/")
            for path in self.scratch:
                call("umount2", path.encode(), MNT_DETACH)
                self.mount_scratch(path)
            return
        for path in self.scratch:
            for entry in os.scandir(path):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)

    def confine(self, limits: dict[str, Any], source: bytes) -> None:
        """From here to the end of the process: limits, no capability, no path, no system call beyond the policy's."""
        if self.scratch:
            os.chdir(self.scratch[0])
            with open(self.program_path, "wb") as file:
                file.write(source)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # out of memory, the kernel takes the program, not the zygote
        for name, (soft, hard) in limits["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (soft, hard))
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if "landlock" in self.layers:
            landlock(self.readable, self.writable)
        drop_capabilities()
        if "seccomp" in self.layers:
            call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(self._filter), 0, 0)


class FilterProgram(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def drop_capabilities() -> None:
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    call("syscall", SYS_CAPSET, struct.pack("=Ii", 0x20080522, 0), bytes(24))


READ_FILE, READ_DIR, EXECUTE = 1 << 2, 1 << 3, 1 << 0
FILE_RIGHTS = EXECUTE | 1 << 1 | READ_FILE | 1 << 14 | 1 << 15  # write, truncate, device ioctl


def landlock(readable: list[str], writable: list[str]) -> None:
    """Deny every path but these, TCP, signals and abstract sockets to others: as much of it as this kernel has."""
    version = call("syscall", SYS_LANDLOCK, None, 0, 1)
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network, scoped = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("=QQQ", rights, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = call("syscall", SYS_LANDLOCK, attributes, len(attributes), 0)
    for paths, granted in ((readable, READ_FILE | READ_DIR | EXECUTE), (writable, rights)):
        for path in paths:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            access = granted & rights if os.path.isdir(path) else granted & rights & FILE_RIGHTS
            call("syscall", SYS_LANDLOCK + 1, ruleset, 1, struct.pack("=Qi", access, fd), 0)
            os.close(fd)
    call("syscall", SYS_LANDLOCK + 2, ruleset, 0)
    os.close(ruleset)


if __name__ == "__main__":
    main()
