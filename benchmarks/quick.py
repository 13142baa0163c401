"""Measure the speed ratios in a few minutes and compare them with a saved baseline: ``make bench-quick``.

    python -m benchmarks.quick [NAME ...] [--save] [--baseline benchmarks/baseline.json]

Both sides of a ratio run in one process or on one stack, so a ratio carries over between machines better than a speed
does. A ratio more than 15% below its baseline is flagged, and the exit code is then 1. ``--save`` writes the measured
ratios as the new baseline. Run nothing else meanwhile: the baseline of the ratios that involve several processes was
measured on an idle machine.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

BASELINE = Path(__file__).parent / "baseline.json"
LOSS = 0.15  # a ratio that is lower than the baseline by more than this share is flagged
SECONDS = 600  # time limit for one ratio


def objectives() -> float:
    """Max@k advantages of a batch, compared with a NumPy loop over its groups."""
    import numpy as np

    from benchmarks.objectives.speed import numpy_loop
    from volley.objectives import MaxAtK, advantages

    rewards_BN = np.random.default_rng(0).random((2048, 64))
    objective = MaxAtK(k=32, baseline="loo_minus_one")
    return _ratio(lambda: numpy_loop(rewards_BN, 32), lambda: advantages(rewards_BN, objective), turns=7)


def learner() -> float:
    """A learner step with a job's default settings, compared with a plain padded PyTorch loop; one thread."""
    times = _learner_times()
    return median(times["plain padded loop"]) / median(times["learner, ZeRO-3, as a job has it"])


def learner_flat() -> float:
    """A learner step that does the plain loop's work, one sample per row, with ZeRO-3 set up as for a large model."""
    times = _learner_times()
    return median(times["plain padded loop"]) / median(times["learner, ZeRO-3 as of a large model, flat"])


def sandbox() -> float:
    """Programs judged in the sandbox, compared with a bare subprocess per test."""
    from benchmarks.sandbox.speed import PROGRAMS, bare, measure, sandboxed
    from reward_servers.sandbox.health import Sandbox
    from volley.scoring import SandboxSpec

    judge, source = Sandbox(SandboxSpec()), PROGRAMS["trivial"]
    try:
        return median(measure(bare, source, 10, 4.0)) / median(measure(sandboxed(judge), source, 10, 4.0))
    finally:
        judge.close()


def generation() -> float:
    """Tokens through the actor pool, compared with the same vLLM engine called directly."""
    from benchmarks.generation.throughput import arguments, compare_on
    from examples.countdown.make_model import make

    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder) / "model")
        direct, pooled = asyncio.run(compare_on(arguments([str(model), "--rounds", "5"]), Path(folder)))
    return median(ours / theirs for ours, theirs in zip(pooled, direct, strict=True))


def asynchrony() -> float:
    """Samples per second of a job with lag 1, compared with lag 0."""
    from benchmarks.asynchrony.throughput import measure
    from examples.countdown.demo import make_inputs
    from services.recording.display import Display
    from services.signals import run_in_foreground

    with tempfile.TemporaryDirectory() as name:
        folder, quiet = Path(name), Display(quiet=True)
        make_inputs(folder, quiet, heldout=50)
        results = run_in_foreground(measure(folder, 1, 35, quiet, lags=(0, 1)))
    return results[1][0]["samples_per_second"] / results[0][0]["samples_per_second"]


RATIOS: dict[str, Callable[[], float]] = {
    each.__name__: each for each in (objectives, learner, learner_flat, sandbox, generation, asynchrony)
}


def _learner_times() -> dict[str, list[float]]:
    from benchmarks.learner.throughput import arguments, measure

    return measure(arguments(["--turns", "5"]))


def _ratio(slow: Callable[[], object], fast: Callable[[], object], *, turns: int) -> float:
    """Median over ``turns`` of CPU seconds of ``slow`` divided by those of ``fast``, after one warm-up turn."""
    ratios = []
    for _ in range(turns + 1):
        seconds = []
        for each in (slow, fast):
            begun = time.process_time()
            each()
            seconds.append(time.process_time() - begun)
        ratios.append(seconds[0] / seconds[1])
    return median(ratios[1:])


def measured(name: str) -> float:
    """Measure one ratio in its own process."""
    command = [sys.executable, "-m", "benchmarks.quick", "--one", name]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.splitlines()[-1])


def verdict(ratio: float, before: float | None) -> str:
    """Compare a ratio with its baseline: ``new``, ``ok`` or ``LOST`` with the loss."""
    if before is None:
        return "new"
    return f"LOST {1 - ratio / before:.0%}" if ratio < (1 - LOSS) * before else "ok"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f"any of {', '.join(RATIOS)}; default: all"
    parser.add_argument("names", nargs="*", type=_known, metavar="NAME", help=names)
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--save", action="store_true", help="write the measured ratios to the baseline file")
    parser.add_argument("--one", choices=list(RATIOS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(RATIOS[args.one]())
        return
    baseline: dict[str, float] = json.loads(args.baseline.read_text()) if args.baseline.exists() else {}
    print(f"{'ratio':14}{'measured':>10}{'baseline':>10}", flush=True)
    found: dict[str, float] = {}
    for name in args.names or RATIOS:
        found[name] = measured(name)
        known = baseline.get(name)
        shown = "" if known is None else f"{known:.2f}"
        print(f"{name:14}{found[name]:>10.2f}{shown:>10}  {verdict(found[name], known):10} {_about(name)}", flush=True)
    if args.save:
        args.baseline.write_text(json.dumps(baseline | {k: round(v, 3) for k, v in found.items()}, indent=2) + "\n")
    elif any(verdict(ratio, baseline.get(name)).startswith("LOST") for name, ratio in found.items()):
        sys.exit(1)


def _known(name: str) -> str:
    if name not in RATIOS:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(RATIOS)}")
    return name


def _about(name: str) -> str:
    return (RATIOS[name].__doc__ or "").rstrip(".")


if __name__ == "__main__":
    main()
