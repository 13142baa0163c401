"""A long run of honest and hostile programs with leak counters, while a neighbouring slot judges honest ones.

    python -m benchmarks.sandbox.soak --programs 100000

Every 1000 programs it prints the number of file descriptors, processes, mounts and cgroups. It exits with an error if
one of them grew, if an honest program did not pass, or if an attack got an unexpected verdict.
"""

import argparse
import sys
import threading
import time
from pathlib import Path

import psutil

from reward_servers.sandbox.health import Sandbox
from reward_servers.sandbox.judge import Case, same_tokens
from tests.integration.sandbox.attacks import ATTACKS, EXPECTED, STDIN
from volley.records import VerdictStatus
from volley.scoring import SandboxLimits, SandboxSpec

HONEST = b"print(sum(map(int, input().split())))\n"
CASES = [Case(STDIN, same_tokens(EXPECTED)), Case(b"10 20\n", same_tokens(b"30\n"))]
LIMITS = SandboxLimits(cpu_s=0.3, program_s=10, memory_mb=256, processes=24)
HOSTILE_EVERY = 50
SLACK = 4  # growth of a counter that running programs alone can cause


def counters() -> dict[str, int]:
    """Counters that must not grow."""
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "processes": len(psutil.Process().children(recursive=True)),
        "mounts": len(Path("/proc/mounts").read_text().splitlines()),
        "cgroups": sum(1 for path in Path("/sys/fs/cgroup").rglob("volley-slot-*") if path.is_dir()),
    }


def neighbour(stop: threading.Event, taken: list[float], failures: list[str]) -> None:
    """Judge honest programs until ``stop`` is set; appends their seconds to ``taken`` and problems to ``failures``."""
    sandbox = Sandbox(SandboxSpec())
    while not stop.is_set():
        began = time.perf_counter()
        result = sandbox.judge(HONEST, CASES)
        taken.append(time.perf_counter() - began)
        if result.status is not VerdictStatus.PASSED:
            failures.append(f"neighbour: {result}")
    sandbox.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100_000)
    options = parser.parse_args()
    failures: list[str] = []
    taken: list[float] = []
    stop = threading.Event()
    beside = threading.Thread(target=neighbour, args=(stop, taken, failures))
    beside.start()
    sandbox = Sandbox(SandboxSpec(limits=LIMITS))
    time.sleep(2)
    first: dict[str, int] | None = None
    for number in range(options.programs):
        if number % HOSTILE_EVERY == HOSTILE_EVERY - 1:
            attack = ATTACKS[number // HOSTILE_EVERY % len(ATTACKS)]
            status = sandbox.judge(attack.source.encode(), CASES, LIMITS).status.value
            if status not in attack.accepted:
                failures.append(f"{attack.name}: {status}")
        elif (result := sandbox.judge(HONEST, CASES, LIMITS)).status is not VerdictStatus.PASSED:
            failures.append(f"honest program {number}: {result}")
        if number % 1000 == 999 or number == 99:
            first = first or counters()
            print(number + 1, counters(), f"restarts {sandbox.restarts}", f"failures {len(failures)}", flush=True)
    last = counters()
    stop.set()
    beside.join()
    sandbox.close()
    grown = {name: (first[name], last[name]) for name in last if first and last[name] > first[name] + SLACK}
    ordered = sorted(taken)
    print(f"neighbour: {len(ordered)} programs, p99 {ordered[int(0.99 * len(ordered))] * 1e3:.0f} ms")
    print(f"grown: {grown or 'nothing'}; failures: {failures or 'none'}")
    sys.exit(1 if grown or failures else 0)


if __name__ == "__main__":
    main()
