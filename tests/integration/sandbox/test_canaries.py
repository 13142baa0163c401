"""Nothing of another program, another test or the judge is anywhere in what a program can read.

Every source, input, output and expected output holds a marker of its own. Each program searches its memory, its
descriptors, its environment, its files and its mounts for markers, and may find none but those it was given.
"""

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from reward_servers.sandbox.judge import Case, judge_program
from reward_servers.sandbox.slot import Slot
from reward_servers.sandbox.slot_config import SlotConfig, Tier
from reward_servers.scorers.cases import HARNESS, CallTest, make_cases
from volley.records import VerdictStatus
from volley.scoring import SandboxLimits

pytestmark = pytest.mark.integration

LIMITS = SandboxLimits(cpu_s=20.0, program_s=240, memory_mb=512)
MARKER = re.compile(r"CANARY-[0-9a-f]{32}")

SEARCH = """
import ctypes, os, re, sys

pattern = re.compile(rb"CANARY-[0-9a-f]{32}")
found = set()

def look(data):
    found.update(match.decode() for match in pattern.findall(data))

def look_at_file(path):
    try:
        with open(path, "rb") as file:
            look(file.read(1 << 22))
    except OSError:
        pass

def memory_by_map():
    try:
        maps, memory = open("/proc/self/maps").read().splitlines(), open("/proc/self/mem", "rb", 0)
    except OSError:
        return
    for line in maps:
        span, rights, _, _, _, *name = line.split()
        if rights[0] == "r" and name[:1] != ["[vvar]"]:
            begin, end = (int(part, 16) for part in span.split("-"))
            for at in range(begin, end, 1 << 20):
                try:
                    look(os.pread(memory.fileno(), min((1 << 20) + 64, end - at), at))
                except OSError:
                    break

def memory_by_write():
    # the kernel says EFAULT where a page is missing, so no file of /proc is needed
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    libc.write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    reader, writer = os.pipe()
    arena, heap = id(object()) & ~0xFFF, libc.sbrk(0) & ~0xFFF
    for begin, end in ((heap - (64 << 20), heap), (arena - (64 << 20), arena + (64 << 20))):
        before = b""
        for at in range(begin, end, 4096):
            page = os.read(reader, 4096) if libc.write(writer, at, 4096) == 4096 else b""
            look(before[-64:] + page)
            before = page

def files():
    for fd in range(256):
        try:
            look(os.readlink(f"/proc/self/fd/{fd}").encode())
        except OSError:
            pass
        try:
            look(os.pread(fd, 1 << 20, 0))
        except OSError:
            pass
    look(repr(os.environ).encode())
    for name in ("environ", "cmdline", "mountinfo", "mounts", "maps", "stat", "status", "cgroup"):
        for pid in ("self", "1", "2"):
            look_at_file(f"/proc/{pid}/{name}")
    for top in ("/tmp", "/dev", "/proc", "/site", "/mnt", "/run", "/var", "/home", "/root", "/work"):
        for folder, _, names in os.walk(top):
            look(folder.encode())
            for name in names:
                look(name.encode())
                if not top.startswith(("/proc", "/dev")) or folder.startswith("/dev/shm"):
                    look_at_file(os.path.join(folder, name))

def everything():
    files()
    memory_by_map()
    memory_by_write()
    return sorted(found)
"""


def marker() -> str:
    return f"CANARY-{secrets.token_hex(16)}"


@dataclass
class Seen:
    """One test's markers: its own, and what it found."""

    own: set[str]
    found: set[str] = field(default_factory=set)

    def check(self, stdout: bytes) -> str | None:
        self.found = set(MARKER.findall(stdout.decode()))
        return None


@pytest.fixture(params=["A-pooled", "A-fresh", "B-pooled", "B-fresh", "C-pooled", "C-fresh"])
def slot(request: pytest.FixtureRequest) -> Iterator[Slot]:
    tier: Tier
    tier, mechanism = request.param.split("-")
    one = Slot(61, SlotConfig(tier, mechanism, limits=LIMITS))
    one.start()
    yield one
    one.close()


def test_a_program_finds_only_its_own_markers(slot: Slot) -> None:
    end = "print(sys.stdin.read(), everything())\nprint('wrong' * 99, file=sys.stderr)\n"
    for _ in range(2):
        for size in (100, 3, 7, 9):  # freed memory of one size is used again at once, of another never
            of_victim = marker()
            tests = [Case(f"{marker()}\n".encode() * size, lambda _: None)] * 2
            victim = f"print(input())\n# {of_victim}\n" + f"# {of_victim}\n" * size
            assert judge_program(slot, victim.encode(), tests, LIMITS).status is VerdictStatus.PASSED
        of_source = marker()
        seen = [Seen({of_source, marker()}) for _ in range(3)]
        tests = [Case(f"{(one.own - {of_source}).pop()}\n".encode() * 9, one.check) for one in seen]
        result = judge_program(slot, f"# {of_source}\n{SEARCH}\n{end}".encode(), tests, LIMITS)
        assert result.status is VerdictStatus.PASSED, result
        for one in seen:
            assert one.own <= one.found, "the search does not find what is there"
            assert one.found <= one.own, "a program found what is not its own"


def test_a_compile_error_leaves_nothing_behind(slot: Slot) -> None:
    name = marker().replace("-", "_")
    broken = f"def f():\n {name} = 1\n global {name}\n"  # which the error names
    result = judge_program(slot, broken.encode(), [Case(b"", lambda _: None)], LIMITS)
    assert result.status is VerdictStatus.COMPILE_ERROR
    assert name in result.detail
    seen = Seen(set())
    search = SEARCH.replace("CANARY-", "CANARY_") + "print(str(everything()).replace('_', '-'))\n"
    assert judge_program(slot, search.encode(), [Case(b"", seen.check)], LIMITS).status is VerdictStatus.PASSED
    assert not seen.found


def test_a_call_finds_only_its_own_markers(slot: Slot) -> None:
    """The harness reads the program with its arguments: the next call finds neither them nor what was returned."""
    source = f"{SEARCH}\ndef f(text):\n    return text + str(everything())\n"
    own = [{marker()} for _ in range(2)]
    tests = [CallTest(function="f", args=[*one], expected=marker()) for one in own]
    seen = [Seen(one) for one in own]
    cases = make_cases(tests, source, None)
    cases = [Case(case.stdin, one.check) for case, one in zip(cases, seen, strict=True)]
    assert judge_program(slot, HARNESS, cases, LIMITS).status is VerdictStatus.PASSED
    for one in seen:
        assert one.found == one.own
