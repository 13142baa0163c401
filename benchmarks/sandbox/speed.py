"""Programs per second by sandbox mechanism and by what programs import, compared with a bare subprocess.

    python -m benchmarks.sandbox.speed [--seconds 5] [--tests 10]

Each program is judged on ``--tests`` passing tests. It prints a Markdown table; its ratios carry over between machines.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from reward_servers.sandbox.health import Sandbox
from reward_servers.sandbox.judge import Case, same_tokens
from reward_servers.scorers.math import Math
from volley.records import Prompt, VerdictStatus
from volley.scoring import MathScorer, SandboxLimits, SandboxSpec

BODY = "a, b = map(int, input().split())\nprint(a + b)\n"
STANDARD = (
    "collections heapq itertools functools math re bisect string random copy datetime statistics decimal fractions"
)
PROGRAMS = {
    "trivial": BODY,
    "standard imports": f"import {STANDARD.replace(' ', ', ')}\n{BODY}",
    "numpy": f"import numpy\n{BODY}",
}
ATTACK = b"import os\nwhile True:\n try: os.fork()\n except OSError: pass\n"


def bare(source: str, cases: list[Case]) -> None:
    """Run each test in a fresh interpreter without any isolation, the fastest common practice."""
    for case in cases:
        done = subprocess.run(
            [sys.executable, "-c", source], input=case.stdin, capture_output=True, check=True, timeout=60
        )
        if case.check(done.stdout) is not None:
            raise RuntimeError("the bare subprocess gave a wrong answer")


def sandboxed(sandbox: Sandbox) -> Callable[[str, list[Case]], None]:
    """A function that judges one program in ``sandbox``."""

    def run(source: str, cases: list[Case]) -> None:
        result = sandbox.judge(source.encode(), cases)
        if result.status is not VerdictStatus.PASSED:
            raise RuntimeError(f"an honest program got {result.status}: {result.detail}")

    return run


def measure(run: Callable[[str, list[Case]], None], source: str, tests: int, seconds: float) -> list[float]:
    """Judge the program for about ``seconds``; returns the seconds of each time, without the first."""
    cases = [Case(f"{i} {i}\n".encode(), same_tokens(str(2 * i).encode())) for i in range(tests)]
    run(source, cases)
    taken: list[float] = []
    end = time.monotonic() + seconds
    while not taken or time.monotonic() < end:
        began = time.perf_counter()
        run(source, cases)
        taken.append(time.perf_counter() - began)
    return taken


def quantiles(taken: list[float]) -> tuple[float, float]:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(taken)
    return statistics.median(ordered) * 1e3, ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3


def attack_for(stop: threading.Event) -> None:
    """Judge fork bombs in a neighbouring slot until ``stop`` is set."""
    limits = SandboxLimits(cpu_s=0.5, memory_mb=128, processes=32)
    sandbox = Sandbox(SandboxSpec(limits=limits))
    while not stop.is_set():
        sandbox.judge(ATTACK, [Case(b"", same_tokens(b"1"))], limits)
    sandbox.close()


def maths_per_second(seconds: float) -> tuple[float, float]:
    """Exact and symbolic comparisons of the math scorer per second."""
    scorer = Math(MathScorer())
    rates = []
    for gold, answer in (("\\frac{{{i}}}{{7}}", "{i}/7"), ("x^2+{i}", "{i}+x^2")):
        done, end = 0, time.monotonic() + seconds
        began = time.perf_counter()
        while time.monotonic() < end:
            text = f"\\boxed{{{answer.format(i=done)}}}"
            (verdict,) = scorer.score(Prompt("p", "", {"answer": gold.format(i=done)}), [text])
            if verdict.reward != 1.0:
                raise RuntimeError(f"{gold.format(i=done)} and {answer.format(i=done)}: {verdict.detail}")
            done += 1
        rates.append(done / (time.perf_counter() - began))
    scorer.close()
    return rates[0], rates[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="measuring time per cell of the table")
    parser.add_argument("--tests", type=int, default=10)
    options = parser.parse_args()

    results: dict[str, dict[str, list[float]]] = {}
    mechanisms: dict[str, tuple[Callable[[str, list[Case]], None], Sandbox | None]] = {"bare subprocess": (bare, None)}
    for mechanism in ("fresh", "pooled"):
        sandbox = Sandbox(SandboxSpec.model_validate({"mechanism": mechanism, "packages": ["numpy"]}))
        mechanisms[f"{mechanism}, tier {sandbox.report.tier}"] = (sandboxed(sandbox), sandbox)
    for name, (run, _) in mechanisms.items():
        results[name] = {
            kind: measure(run, source, options.tests, options.seconds) for kind, source in PROGRAMS.items()
        }

    print(f"programs/s on one slot, {options.tests} passing tests each (ratio to bare)\n")
    print("| mechanism | " + " | ".join(PROGRAMS) + " | p50, p99 trivial |")
    print("|---|" + "---|" * (len(PROGRAMS) + 1))
    for name, cells in results.items():
        rates = {kind: len(taken) / sum(taken) for kind, taken in cells.items()}
        base = {kind: len(taken) / sum(taken) for kind, taken in results["bare subprocess"].items()}
        shown = [f"{rates[kind]:.1f} ({rates[kind] / base[kind]:.1f}x)" for kind in PROGRAMS]
        median, tail = quantiles(cells["trivial"])
        print(f"| {name} | " + " | ".join(shown) + f" | {median:.0f} ms, {tail:.0f} ms |")

    stop = threading.Event()
    neighbour = threading.Thread(target=attack_for, args=(stop,))
    neighbour.start()
    time.sleep(3)
    run = next(run for name, (run, _) in mechanisms.items() if name.startswith("pooled"))
    median, tail = quantiles(measure(run, PROGRAMS["trivial"], options.tests, options.seconds))
    stop.set()
    neighbour.join()
    print(f"\nbeside a slot of fork bombs: p50 {median:.0f} ms, p99 {tail:.0f} ms")
    exact, symbolic = maths_per_second(options.seconds)
    print(f"math comparisons per second: exact {exact:.0f}, symbolic {symbolic:.1f}")
    print(json.dumps({name: {kind: len(t) / sum(t) for kind, t in cells.items()} for name, cells in results.items()}))
    for _, sandbox_or_none in mechanisms.values():
        if sandbox_or_none is not None:
            sandbox_or_none.close()


if __name__ == "__main__":
    main()
