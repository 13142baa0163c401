"""Negative controls: with one layer off, a named attack succeeds, which shows that the suite tests that layer.

The module also tests properties of both mechanisms: honest programs pass, and a killed sandbox is replaced.
"""

import gc
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from reward_servers.sandbox.health import Sandbox
from reward_servers.sandbox.judge import Case, judge_program, same_tokens
from reward_servers.sandbox.probes import run_probes
from reward_servers.sandbox.slot import SandboxFailure, Slot
from reward_servers.sandbox.slot_config import SlotConfig, Tier
from tests.integration.sandbox.attacks import ATTACKS
from tests.integration.sandbox.idioms import IDIOMS
from volley.errors import HostError
from volley.records import VerdictStatus
from volley.scoring import SandboxLimits, SandboxSpec

pytestmark = pytest.mark.integration

LIMITS = SandboxLimits(cpu_s=1.0, program_s=20, memory_mb=128, processes=24)
SpawnSlot = Callable[..., Slot]


@pytest.fixture
def spawn(request: pytest.FixtureRequest) -> SpawnSlot:
    def start(tier: Tier, **settings: object) -> Slot:
        slot = Slot(21, SlotConfig(tier, limits=LIMITS, **settings))  # type: ignore[arg-type]
        request.addfinalizer(slot.close)
        slot.start()
        return slot

    return start


def output(slot: Slot, source: str, stdin: bytes = b"") -> bytes:
    with slot.program(source.encode(), LIMITS) as run:
        return bytes(run(stdin).stdout)


SOCKETS = "import socket\nsocket.socket(40, 1)\nprint('open')\n"
LIST_ROOT = "import os\nos.listdir('/')\nprint('open')\n"
HOST_FILES = "print('open' if open('/etc/passwd').read() else '')\n"
BOMB = (
    "import os, time\npids = []\nfor _ in range(8):\n pid = os.fork()\n if pid == 0:\n"
    "  x = bytearray(b'x') * (40 << 20)\n  os._exit(0 if x else 1)\n pids.append(pid)\n"
    "print('open' if all(os.waitpid(p, 0)[1] == 0 for p in pids) else 'stopped')\n"
).replace("os._exit(0 if x else 1)", "time.sleep(0.3)\n  os._exit(0 if x else 1)")


@pytest.mark.parametrize(
    ("tier", "without", "source"),
    [
        ("B", {"seccomp"}, SOCKETS),
        ("B", {"landlock"}, LIST_ROOT),
        ("C", {"landlock"}, HOST_FILES),
        ("B", {"cgroup"}, BOMB),
    ],
    ids=["seccomp", "landlock", "landlock-alone", "cgroup"],
)
def test_an_attack_succeeds_if_its_layer_is_off(spawn: SpawnSlot, tier: Tier, without: set[str], source: str) -> None:
    assert b"open" in output(spawn(tier, without=frozenset(without)), source)


@pytest.mark.parametrize(
    ("tier", "source"), [("A", SOCKETS), ("A", LIST_ROOT), ("C", HOST_FILES), ("A", BOMB)], ids=range(4)
)
def test_the_same_attack_fails_if_its_layer_is_on(spawn: SpawnSlot, tier: Tier, source: str) -> None:
    assert b"open" not in output(spawn(tier), source)


@pytest.mark.parametrize("layer", ["seccomp", "landlock"])
def test_probes_notice_a_missing_layer(spawn: SpawnSlot, layer: str) -> None:
    total, failed = run_probes(spawn("B", without=frozenset({layer})))
    assert 0 < len(failed) < total


def test_a_sandbox_without_a_layer_gives_no_reward() -> None:
    sandbox = Sandbox(SandboxSpec(limits=LIMITS), index=22)
    assert sandbox.report.ready
    slot = sandbox._slot
    slot.kill()
    slot.config = SlotConfig("B", without=frozenset({"seccomp"}))
    assert not sandbox.probe().ready
    result = sandbox.judge(b"print(1)", [Case(b"", same_tokens(b"1"))])
    sandbox.close()
    assert result.status is VerdictStatus.REFUSED
    assert "let through" in result.detail


PACKAGES = """
import glob, sys
roots = (sys.base_prefix, "/usr", "/usr/local")
for root in roots:
    for name in ("site", "dist"):
        for path in glob.glob(f"{root}/lib/python3*/{name}-packages") + [f"/usr/lib/python3/{name}-packages"]:
            sys.path.append(path)
            for file in glob.glob(f"{path}/*/*.py")[:20]:
                try: print("read", open(file).read()[:9])
                except OSError: pass
for module in ("pip", "setuptools", "wheel", "_distutils_hack"):
    try: __import__(module)
    except ImportError: continue
    except PermissionError: continue
    print("imported", module)
import json, sqlite3, email.mime.text, concurrent.futures, xml.etree.ElementTree
print("nothing")
"""


@pytest.mark.parametrize("tier", ["A", "B", "C"])
def test_what_is_installed_beside_the_interpreter_cannot_be_imported(spawn: SpawnSlot, tier: Tier) -> None:
    assert output(spawn(tier), PACKAGES) == b"nothing\n"


def test_a_host_that_cannot_isolate_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_servers.sandbox.launch.bubblewrap", lambda: None)
    with pytest.raises(
        HostError, match=r"bubblewrap is not installed: apt-get install bubblewrap(.|\n)*min_tier: none"
    ):
        Sandbox(SandboxSpec(min_tier="B"), index=23)


@pytest.mark.parametrize("mechanism", ["pooled", "fresh"])
def test_programs_run_as_in_a_plain_interpreter(spawn: SpawnSlot, mechanism: str) -> None:
    slot = spawn("A", mechanism=mechanism)
    failed = {}
    limits = SandboxLimits(cpu_s=4.0, memory_mb=512)
    for name, (source, stdin, expected) in IDIOMS.items():
        result = judge_program(slot, source.encode(), [Case(stdin, same_tokens(expected))], limits)
        if result.status is not VerdictStatus.PASSED:
            failed[name] = (result.detail, result.last and result.last.stderr[-300:])
    assert not failed


def test_the_fresh_mechanism_is_also_probed(spawn: SpawnSlot) -> None:
    """Each of forty programs has its own sandbox; none may still count towards the slot's processes."""
    slot = spawn("A", mechanism="fresh")
    total, failed = run_probes(slot)
    assert not failed
    assert slot.restarts > 30
    slot.kill()
    assert total > 30
    assert slot.group is not None
    assert (slot.group.pids / "pids.current").read_text() == "0\n"


@pytest.mark.parametrize("victim", ["bwrap", "python"])
def test_a_sandbox_killed_during_a_program_costs_one_retry(spawn: SpawnSlot, victim: str) -> None:
    slot = spawn("A")
    source = b"import time\ntime.sleep(0.4)\nprint(input())\n"

    def strike() -> None:
        time.sleep(0.15)
        tree = [psutil.Process(slot.pid), *psutil.Process(slot.pid).children(recursive=True)]
        named = [process for process in tree if process.name().startswith(victim)]
        os.kill(named[0].pid, signal.SIGKILL)

    striker = threading.Thread(target=strike)
    striker.start()
    result = judge_program(slot, source, [Case(b"5\n", same_tokens(b"5"))], LIMITS)
    striker.join()
    assert result.status is VerdictStatus.PASSED, result
    assert slot.restarts == 1


def test_a_stray_message_never_becomes_a_verdict(spawn: SpawnSlot) -> None:
    slot = spawn("A")
    slot.send({"id": 999, "op": "end"}, [])  # its answer, or its death, must not be taken for the next program's result
    result = judge_program(slot, b"print(input())", [Case(b"5\n", same_tokens(b"6"))], LIMITS)
    assert result.status is VerdictStatus.WRONG_ANSWER
    right = judge_program(slot, b"print(input())", [Case(b"5\n", same_tokens(b"5"))], LIMITS)
    assert right.status is VerdictStatus.PASSED


def test_many_programs_leak_no_resources(spawn: SpawnSlot) -> None:
    slot = spawn("A")
    case = [Case(b"5\n", same_tokens(b"5"))]

    def counters() -> tuple[int, int]:
        inside = len(psutil.Process(slot.pid).children(recursive=True))
        return inside, len(Path("/proc/mounts").read_text().splitlines())

    def descriptors() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    judge_program(slot, b"print(input())", case, LIMITS)
    time.sleep(0.2)
    before, open_before = counters(), descriptors()
    for _ in range(60):
        assert judge_program(slot, b"print(input())", case, LIMITS).status is VerdictStatus.PASSED
    time.sleep(0.2)
    assert counters() == before
    assert descriptors() < open_before + 20, "60 programs; other tests' libraries open a few meanwhile"
    assert slot.restarts == 0


def test_a_sandbox_that_stops_answering_is_replaced(spawn: SpawnSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_servers.sandbox.slot.GRACE_S", 1.0)
    slot = spawn("A")
    limits = SandboxLimits(cpu_s=1.0, wall_limit_s=1.0)

    def freeze() -> None:
        time.sleep(0.2)
        for process in psutil.Process(slot.pid).children(recursive=True):
            process.send_signal(signal.SIGSTOP)

    freezer = threading.Thread(target=freeze)
    freezer.start()
    began = time.monotonic()
    source = b"import time\ntime.sleep(0.5)\nprint(input())\n"
    result = judge_program(slot, source, [Case(b"5\n", same_tokens(b"5"))], limits)
    freezer.join()
    assert result.status is VerdictStatus.PASSED, result
    assert slot.restarts == 1
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("seed", range(5))
def test_garbage_on_the_control_channel_is_a_sandbox_failure(spawn: SpawnSlot, seed: int) -> None:
    rng = random.Random(seed)
    slot = spawn("B")
    pieces = [b"", b"{", b"[]", b"null", b'{"id": 1}', b'{"id": "1"}', b'{"id": -1}', b"\xff" * 40, rng.randbytes(300)]
    real = slot._sock
    for garbage in pieces:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        slot._sock = ours
        theirs.send(garbage) if garbage else theirs.close()
        with pytest.raises((SandboxFailure, ValueError)):
            slot.receive(7, 1.0)
        ours.close()
        theirs.close()
    slot._sock = real
    assert judge_program(slot, b"print(1)", [Case(b"", same_tokens(b"1"))], LIMITS).status is VerdictStatus.PASSED


def test_honest_programs_pass_beside_an_attacked_slot() -> None:
    stop = threading.Event()

    def attack() -> None:
        sandbox = Sandbox(SandboxSpec(limits=LIMITS), index=24)
        names = ("fork_bomb_catch", "mem_bomb_fork", "stdout_flood", "cpu_spin")
        bombs = [bomb for bomb in ATTACKS if bomb.name in names]
        while not stop.is_set():
            for bomb in bombs:
                sandbox.judge(bomb.source.encode(), [Case(b"", same_tokens(b"1"))], LIMITS)
        sandbox.close()

    attacker = threading.Thread(target=attack)
    attacker.start()
    sandbox = Sandbox(SandboxSpec(), index=25)
    case = [Case(b"3 4\n", same_tokens(b"7"))]
    statuses = set()
    end = time.monotonic() + 8
    while time.monotonic() < end:
        statuses.add(sandbox.judge(b"print(sum(map(int, input().split())))", case).status)
    stop.set()
    attacker.join()
    sandbox.close()
    assert statuses == {VerdictStatus.PASSED}
