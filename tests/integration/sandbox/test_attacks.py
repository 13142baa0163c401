"""Every attack gets an accepted status; afterwards an honest program passes immediately and no process is left."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reward_servers.sandbox.judge import Case, judge_program, same_tokens
from reward_servers.sandbox.slot import Slot
from reward_servers.sandbox.slot_config import SlotConfig, Tier
from tests.integration.sandbox.attacks import ATTACKS, CONTROLS, EXPECTED, NEEDS_PROCESSES, STDIN, Attack
from volley.scoring import SandboxLimits

pytestmark = pytest.mark.integration

LIMITS = SandboxLimits(cpu_s=1.0, wall_limit_s=2.5, program_s=20, memory_mb=256, processes=24)
TESTS = [Case(STDIN, same_tokens(EXPECTED)), Case(b"10 20\n", same_tokens(b"30\n"))]
HONEST = b"print(sum(map(int, input().split())))\n"
SLOT_INDEX = {"A": 11, "B": 12, "C": 13}


@pytest.fixture(scope="module", params=["A", "B", "C"])
def slot(request: pytest.FixtureRequest) -> Iterator[Slot]:
    tier: Tier = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANARY_TOKEN", "secret")
        one = Slot(SLOT_INDEX[tier], SlotConfig(tier, limits=LIMITS))
        one.start()
        yield one
        one.close()


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("canary") / "answers.txt"
    path.write_text("7")
    return path


def accepted(attack: Attack, tier: Tier) -> frozenset[str]:
    """The accepted statuses; tier C denies files, processes and namespaces immediately, so attacks end earlier."""
    return attack.accepted | {"runtime_error", "wrong_answer", "timeout"} if tier == "C" else attack.accepted


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_gets_an_accepted_status(slot: Slot, attack: Attack, canary: Path) -> None:
    result = judge_program(slot, attack.source.encode(), TESTS, LIMITS)
    assert result.status.value in accepted(attack, slot.config.tier), result
    began = time.monotonic()
    after = judge_program(slot, HONEST, TESTS, LIMITS)
    assert after.status.value == "passed", after
    assert time.monotonic() - began < 3.0, "the next honest program waited; half a second on an idle machine"
    assert settles(slot), "a process was left"
    assert canary.read_text() == "7"
    assert not Path("/pwned").exists()


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_an_honest_program_passes(slot: Slot, control: Attack) -> None:
    limits = LIMITS.model_copy(update={"cpu_s": 2.0})
    result = judge_program(slot, control.source.encode(), TESTS[:1], limits)
    if slot.config.tier == "C" and control.name in NEEDS_PROCESSES:
        assert result.status.value == "runtime_error"
    else:
        assert result.status.value == "passed", result


def settles(slot: Slot) -> bool:
    """Whether within a second only bubblewrap's processes and the zygote are left."""
    for _ in range(50):
        if processes_of(slot) <= 3:
            return True
        time.sleep(0.02)
    return False


def processes_of(slot: Slot) -> int:
    """Processes that run as the slot's account."""
    uid = os.geteuid() if slot.uid is None else slot.uid
    found = 0
    for entry in os.scandir("/proc"):
        try:
            found += entry.name.isdigit() and entry.stat().st_uid == uid
        except FileNotFoundError:
            continue
    return found if os.geteuid() == 0 else 0
