"""Probe attacks: they try what the sandbox must deny, and so prove its tier.

One program contains all probes; the standard input of a test selects one, which prints ``denied`` if it was stopped.
"""

from reward_servers.sandbox.judge import Case, judge_program
from reward_servers.sandbox.slot import Slot
from reward_servers.sandbox.slot_config import SlotConfig
from reward_servers.sandbox.syscalls import machine_table
from volley.scoring import SandboxLimits

PROGRAM = b"""
import ctypes, errno, os, resource, socket, sys

libc = ctypes.CDLL(None, use_errno=True)
words = input().split()

def refused(action):
    try:
        action()
    except (OSError, MemoryError, ValueError):
        return True
    return False

def raw(number, *arguments):
    ctypes.set_errno(0)
    # missing arguments are -1, so that a call that is allowed fails with another error than EPERM
    result = libc.syscall(number, *arguments, *[-1] * (6 - len(arguments)))
    return result == -1 and ctypes.get_errno() == errno.EPERM

def processes():
    def fork_many():
        for _ in range(4096):
            if os.fork() == 0:
                os.read(hold, 1)
                os._exit(0)
    hold, _ = os.pipe()
    return refused(fork_many)

def leftovers():
    seen = any(os.path.exists(path) for path in ("/tmp/mark", "/dev/shm/mark"))
    for path in ("/tmp/mark", "/dev/shm/mark"):
        refused(lambda: open(path, "w").close())
    return not seen

def alone():
    try:
        return all(int(name) in (1, 2, os.getpid()) for name in os.listdir("/proc") if name.isdigit())
    except OSError:
        return True

probes = {
    "read": lambda: refused(lambda: os.open(words[1], os.O_RDONLY)),
    "write": lambda: refused(lambda: os.open(words[1], os.O_WRONLY | os.O_CREAT, 0o600)),
    "list": lambda: refused(lambda: os.listdir(words[1])),
    "socket": lambda: refused(lambda: socket.socket(int(words[1]), socket.SOCK_STREAM)),
    "pair": lambda: refused(lambda: socket.socketpair(socket.AF_UNIX, int(words[1]))),
    "send": lambda: refused(lambda: socket.socketpair()[0].sendto(b"x", b"\\0nobody")),
    "raw": lambda: raw(*map(int, words[1:])),
    "setuid": lambda: os.getuid() != 0 and refused(lambda: os.setuid(0)),
    "raise": lambda: refused(lambda: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)),
    "memory": lambda: refused(lambda: bytearray(1 << 33)),
    "files": lambda: refused(lambda: [os.dup(0) for _ in range(2000)]),
    "core": lambda: resource.getrlimit(resource.RLIMIT_CORE) == (0, 0),
    "descriptors": lambda: all(refused(lambda: os.fstat(fd)) for fd in range(3, 64)),
    "environment": lambda: not any("TOKEN" in name or "SECRET" in name or "RAY" in name for name in os.environ),
    "processes": processes,
    "leftovers": leftovers,
    "alone": alone,
    "kill": lambda: refused(lambda: os.kill(int(words[1]), 0)),
    "capabilities": lambda: libc.prctl(24, 0, 0, 0, 0) == -1,
}
print("denied" if probes[words[0]]() else "open")
"""

_ANYWHERE = (
    "read /etc/shadow", "read /etc/passwd", "read /proc/1/environ", "read /proc/1/mem", "list /", "list /root",
    "list /home", "list /work", "write /pwned", "write /usr/pwned", "write /etc/pwned", "write /dev/pwned",
    "setuid", "raise", "memory", "files", "core", "descriptors", "environment", "processes", "leftovers",
    "capabilities",
)  # fmt: skip
_SOCKETS = ("socket 2", "socket 10", "socket 16", "socket 17", "socket 40")  # inet, inet6, netlink, packet, vsock
_PAIRS = ("pair 2", "pair 5", "send")  # datagrams, packets, a message to a given address
_CALLS = (
    "unshare", "mount", "ptrace", "bpf", "keyctl", "perf_event_open", "io_uring_setup", "userfaultfd", "setns",
    "process_vm_readv", "open_by_handle_at", "mknodat", "sendmsg", "connect", "flock", "io_setup",
)  # fmt: skip
LIMITS = SandboxLimits(cpu_s=1.0, memory_mb=64, processes=8)


def run_probes(slot: Slot) -> tuple[int, list[str]]:
    """Judge all probes of the slot's tier like programs. Returns their number and the names of those not denied."""
    names = probes_of(slot.config)
    tests = [Case(name.encode() + b"\n", _denied) for name in names]
    failed = []
    for name, test in zip(names, tests, strict=True):
        # one program per test, but leftovers twice: its files must not even survive until the program's next test
        pair = [test, test] if name == "leftovers" else [test]
        if judge_program(slot, PROGRAM, pair, LIMITS).passed != len(pair):
            failed.append(name)
    return len(names), failed


def probes_of(config: SlotConfig) -> list[str]:
    """Return the probes that ``config``'s tier must deny."""
    if config.tier == "none":
        return []
    _, number = machine_table()
    calls = [f"raw {number[name]}" for name in _CALLS if name in number]
    inside = ["alone"] if config.tier != "C" else ["write /tmp/pwned", "kill 1", "read /proc/self/status"]
    return [*_ANYWHERE, *_SOCKETS, *_PAIRS, *calls, *inside]


def _denied(stdout: bytes) -> str | None:
    return None if stdout == b"denied\n" else f"not denied: {stdout[:60]!r}"
