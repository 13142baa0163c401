"""No evasion gets anywhere, none chooses ``infra_error``, and the next honest program passes in the same sandbox."""

import platform
from collections.abc import Iterator

import pytest

from reward_servers.sandbox.judge import Case, judge_program, same_tokens
from reward_servers.sandbox.slot import Slot
from reward_servers.sandbox.slot_config import SlotConfig, Tier
from tests.integration.sandbox.evasions import EVASIONS, Evasion
from volley.scoring import SandboxLimits

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the evasions make system calls by their x86-64 numbers"),
]

LIMITS = SandboxLimits(cpu_s=1.0, wall_limit_s=2.5, program_s=20, memory_mb=256, processes=24)
TESTS = [Case(b"3 4\n", same_tokens(b"7"))]
HONEST = b"print(sum(map(int, input().split())))\n"


@pytest.fixture(scope="module", params=["A-pooled", "A-fresh", "B-pooled", "C-pooled"])
def slot(request: pytest.FixtureRequest) -> Iterator[Slot]:
    tier: Tier
    tier, mechanism = request.param.split("-")
    one = Slot(64, SlotConfig(tier, mechanism, limits=LIMITS))
    one.start()
    yield one
    one.close()


@pytest.mark.parametrize("evasion", EVASIONS, ids=lambda evasion: evasion.name)
def test_evasion(slot: Slot, evasion: Evasion) -> None:
    before = slot.restarts
    result = judge_program(slot, evasion.source.encode(), TESTS, LIMITS)
    assert result.status.bears_reward, result
    assert result.status.value != "passed", result
    after = judge_program(slot, HONEST, TESTS, LIMITS)
    assert after.status.value == "passed", after
    assert slot.config.mechanism == "fresh" or slot.restarts == before, "it made the sandbox fail, if only once"


def test_evasions_get_through_where_seccomp_and_landlock_are_off() -> None:
    """So the programs do what their names say, and it is these layers that stop them."""
    slot = Slot(65, SlotConfig("B", limits=LIMITS, without=frozenset({"seccomp", "landlock"})))
    slot.start()
    through = {
        evasion.name
        for evasion in EVASIONS
        if judge_program(slot, evasion.source.encode(), TESTS, LIMITS).status.value == "passed"
    }
    slot.close()
    assert through >= {
        "send_descriptors", "send_many", "datagram_to_a_path", "move_a_pair", "handle_of_the_first", "brother",
        "devices", "kernel_files", "mount_calls", "locks_on_shared_files", "locks_of_others",
        "what_is_cached", "watches_on_shared_folders", "another_architecture",
        "shared_memory_of_the_kernel", "asynchronous_io", "code_from_the_kernel",
    }, sorted(through)  # fmt: skip
    assert not through & {"memory_of_the_first", "trace_the_first", "namespaces_of_the_first", "out_through_a_folder"}


def test_there_are_forty_and_more() -> None:
    assert len({evasion.name for evasion in EVASIONS}) == len(EVASIONS) > 40
