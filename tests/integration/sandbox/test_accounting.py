# ruff: noqa: E501 - one program a line
"""What a test uses is charged to it and to no other: memory nobody frees, processes nobody waits for, wall time."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reward_servers.sandbox import cgroups
from reward_servers.sandbox.judge import Case, judge_program, same_tokens
from reward_servers.sandbox.metering import SLACK_BYTES
from reward_servers.sandbox.slot import Slot
from reward_servers.sandbox.slot_config import SlotConfig, Tier
from volley.records import VerdictStatus
from volley.scoring import SandboxLimits

pytestmark = pytest.mark.integration

LIMITS = SandboxLimits(cpu_s=1.0, program_s=20, memory_mb=256, processes=24)
ANY = [Case(b"", lambda _: None)]
HONEST = b"x = bytearray(b'x') * (200 << 20)\nprint(len(x))\n"
SpawnSlot = Callable[..., Slot]


@pytest.fixture
def spawn() -> Iterator[SpawnSlot]:
    slots: list[Slot] = []

    def start(tier: Tier, **settings: object) -> Slot:
        slots.append(Slot(63, SlotConfig(tier, limits=LIMITS, **settings)))  # type: ignore[arg-type]
        slots[-1].start()
        return slots[-1]

    yield start
    for slot in slots:
        slot.close()


# Two sockets that carry each other, and with them files in memory: no process holds them, and nothing frees them.
CYCLES = b"""
import os, socket
for i in range(3):
    folder = "/tmp" if i % 2 else "/dev/shm"
    fd = os.open(f"{folder}/{i}", os.O_RDWR | os.O_CREAT)
    for _ in range(7):
        os.write(fd, bytes(1 << 20))
    ours, theirs = socket.socketpair()
    socket.send_fds(ours, [b"x"], [fd, ours.fileno(), theirs.fileno()])
    socket.send_fds(theirs, [b"x"], [fd, ours.fileno(), theirs.fileno()])
print("held")
"""


@pytest.mark.parametrize("tier", ["A", "B", "C"])
def test_descriptors_cannot_outlive_a_test(spawn: SpawnSlot, tier: Tier) -> None:
    slot = spawn(tier)
    result = judge_program(slot, CYCLES, ANY, LIMITS)
    assert result.status is VerdictStatus.RUNTIME_ERROR, result
    assert slot.restarts == 0


def test_memory_that_outlives_a_program_is_not_charged_to_the_next(spawn: SpawnSlot) -> None:
    """With seccomp off the attack succeeds; the slot sees what its cgroup still holds, and starts with a new one."""
    slot = spawn("A", without=frozenset({"seccomp"}))
    for _ in range(30):  # on a busy machine the kernel may find the memory first
        for _ in range(4):
            assert judge_program(slot, CYCLES, ANY, LIMITS).status is VerdictStatus.PASSED
        honest = judge_program(slot, HONEST, ANY, LIMITS)
        assert honest.status is VerdictStatus.PASSED, honest
        if slot.restarts:
            return
    pytest.fail("the slot never saw what its cgroup still held")


def test_a_sandbox_is_not_replaced_for_the_files_that_programs_read(spawn: SpawnSlot) -> None:
    slot = spawn("A")
    reads = b"import os\nn = 0\nfor d, _, names in os.walk('/usr/lib'):\n for name in names:\n"
    reads += b"  try: n += len(open(d + '/' + name, 'rb').read())\n  except OSError: pass\n  if n > 60 << 20: print(n); raise SystemExit\n"
    for _ in range(3):
        assert judge_program(slot, reads, ANY, LIMITS).status is VerdictStatus.PASSED
        assert judge_program(slot, HONEST, ANY, LIMITS).status is VerdictStatus.PASSED
    assert slot.restarts == 0


def test_files_that_a_program_read_are_not_memory_in_use() -> None:
    """Their cache stays charged to the group; a slot that counted it would wait for it to be freed."""
    group = cgroups.create(f"{cgroups.PREFIX}{os.getpid()}-cache")
    if group is None:
        pytest.skip("no writable memory and pids cgroup")
    join = "".join(f"open({str(folder / 'cgroup.procs')!r}, 'w').write('0')\n" for folder in (group.memory, group.pids))
    try:
        with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
            read = (
                f"f = open({file.name!r}, 'wb')\nfor _ in range(64): f.write(bytes(1 << 20))\nf.flush(); os.fsync(f)\n"
            )
            subprocess.run([sys.executable, "-c", f"import os\n{join}{read}"], check=True)
            assert group.memory_bytes() < SLACK_BYTES
    finally:
        group.remove()


# Children that nobody waits for; the end of a pipe says that the last of them is done.
SPIN = """
import os, time
r, w = os.pipe()
for _ in range({n}):
    if os.fork() == 0:
        end = time.process_time() + {s}
        while time.process_time() < end: pass
        os._exit(0)
os.close(w)
os.read(r, 1)
print(7)
"""
IGNORED = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
SEVEN = [Case(b"", same_tokens(b"7"))]
PATIENT = SandboxLimits(cpu_s=1.0, wall_limit_s=60.0, program_s=120, memory_mb=256, processes=24)


@pytest.mark.parametrize("before", ["", IGNORED], ids=["orphans", "ignored"])
def test_processor_time_of_children_counts_though_nobody_waits_for_them(spawn: SpawnSlot, before: str) -> None:
    result = judge_program(spawn("A"), (before + SPIN.format(n=12, s=0.9)).encode(), SEVEN, PATIENT)
    assert result.status is VerdictStatus.TIMEOUT, result
    assert result.detail.startswith("processor time"), result
    assert 1000 < result.cpu_ms < 5000, (
        "it is stopped soon after it has used its time, long before the 10 s it would use"
    )


def test_without_a_cgroup_what_is_left_at_the_end_counts(spawn: SpawnSlot) -> None:
    result = judge_program(spawn("B"), SPIN.format(n=4, s=0.9).encode(), SEVEN, PATIENT)
    assert result.status is VerdictStatus.TIMEOUT, result
    assert result.cpu_ms > 3000, "no child's time is missing: each used 900"


@pytest.mark.parametrize("tier", ["A", "B"])
def test_children_within_the_limit_are_no_timeout(spawn: SpawnSlot, tier: Tier) -> None:
    result = judge_program(spawn(tier), SPIN.format(n=4, s=0.1).encode(), SEVEN, PATIENT)
    assert result.status is VerdictStatus.PASSED, result
    assert 300 < result.cpu_ms < 1000, "a tick of 10 ms may be missing from each of their times"


def test_a_program_ends_with_its_own_time_limit(spawn: SpawnSlot) -> None:
    """One test may take three times its processor time and a second: not where the program has less than that left."""
    limits = SandboxLimits(cpu_s=4.0, program_s=2.0)
    tests = [Case(b"", lambda _: None)] * 3
    began = time.monotonic()
    result = judge_program(spawn("A"), b"import time\ntime.sleep(1.5)\n", tests, limits)
    assert result.status is VerdictStatus.TIMEOUT
    assert result.detail == "all tests took over 2 s"
    assert result.passed == 1
    assert time.monotonic() - began < 5
