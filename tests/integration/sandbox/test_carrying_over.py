# ruff: noqa: E501 - one program a line
"""No test can tell the next one anything, neither on purpose nor by what it leaves lying about."""

from collections.abc import Iterator

import pytest

from reward_servers.sandbox.judge import Case, judge_program, same_tokens
from reward_servers.sandbox.slot import Slot
from reward_servers.sandbox.slot_config import SlotConfig, Tier
from volley.records import VerdictStatus
from volley.scoring import SandboxLimits

pytestmark = pytest.mark.integration

LIMITS = SandboxLimits(cpu_s=2.0, program_s=20, memory_mb=256, processes=24)


@pytest.fixture(params=["A-pooled", "A-fresh", "B-pooled", "B-fresh"])
def slot(request: pytest.FixtureRequest) -> Iterator[Slot]:
    tier: Tier
    tier, mechanism = request.param.split("-")
    one = Slot(62, SlotConfig(tier, mechanism, limits=LIMITS))
    one.start()
    yield one
    one.close()


LEAVES = {
    "a folder nobody may open": "import os\nprint(sorted(os.listdir('/tmp')))\nos.makedirs('/tmp/d/e')\nos.chmod('/tmp/d', 0)\n",
    "a /tmp nobody may open": "import os\nprint(oct(os.stat('/tmp').st_mode))\nos.chmod('/tmp', 0)\nos.chmod('/dev/shm', 0)\n",
    "a full /tmp": "import os\ntry:\n with open('/tmp/x', 'wb') as f:\n  while True: f.write(bytes(1 << 20))\nexcept OSError: print(len(os.listdir('/tmp')))\n",
    "process ids": "import os\nprint(os.getpid(), sorted(p for p in os.listdir('/proc') if p.isdigit()), os.readlink('/proc/self'))\nfor _ in range(7):\n if os.fork() == 0: os._exit(0)\n os.wait()\n",
    "a daemon": "import os, time\nprint(sorted(p for p in os.listdir('/proc') if p.isdigit()))\nif os.fork() == 0:\n os.setsid()\n for fd in (0, 1, 2): os.close(fd)\n time.sleep(99)\n",
    "an open folder": "import os\nprint(os.getcwd(), os.listdir('.'))\nos.mkdir('/tmp/deep')\nos.chdir('/tmp/deep')\n",
    "a mode for new files": "import os\nprint(os.umask(0o777))\n",
    "a signal mask": "import signal\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)))\n",
    "limits": "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE))\nresource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))\n",
    "processors": "import os\nprint(os.sched_getaffinity(0))\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n",
}  # fmt: skip


@pytest.mark.parametrize("left", LEAVES)
def test_what_one_test_leaves_no_other_sees(slot: Slot, left: str) -> None:
    said: list[bytes] = []
    tests = [Case(b"", lambda stdout: said.append(stdout)) for _ in range(3)]
    for _ in range(2):
        result = judge_program(slot, LEAVES[left].encode(), tests, LIMITS)
        assert result.status is VerdictStatus.PASSED, result
    assert len(said) == 6
    assert len(set(said)) == 1, said
    honest = judge_program(slot, b"print(3 + 4)", [Case(b"", same_tokens(b"7"))], LIMITS)
    assert honest.status is VerdictStatus.PASSED, honest
