"""Wall time to a given pass@1 and pass@8, compared with TRL's `GRPOTrainer`: countdown from the same start.

    python -m benchmarks.versus_trl.learning [--steps 100] [--folder demo/reproductions]

Three runs, one after the other: TRL with GRPO, Volley with GRPO's objective, and Volley with max@8. Measured are pass@k
on training prompts, each seen once, as a moving mean over 25 steps, and the seconds since the run's command started.
Levels are shares of TRL's greatest improvement.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.objectives.report import BLUE, RED, SKY, panels, print_table, save
from benchmarks.reproductions import countdown, harder
from benchmarks.reproductions.runs import Options, make_missing
from benchmarks.versus_trl.learning_sides import KS, PROMPTS, SAMPLES
from benchmarks.versus_trl.others import run_beside_others
from benchmarks.versus_trl.run import SECONDS
from services.recording.display import Display
from services.signals import run_in_foreground

NAMES = {"trl": "TRL, GRPO", "mean": "Volley, GRPO", "max@8": "Volley, max@8"}
WINDOW = 25  # steps
SHARES = (0.5, 0.75, 1.0)
Floats = NDArray[np.float64]
Curve = Mapping[str, Floats]  # seconds since the start, and moving means of pass@k, each [T]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("demo/reproductions"), help="where data and start are kept")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="where the figure is written")
    args = parser.parse_args()
    task = start(Options(args.folder.resolve(), args.out.resolve(), 1, args.steps, None))
    curves = {name: trained(side, task, args.steps) for side, name in NAMES.items()}
    report(curves)
    draw(curves, args.out)


def start(wanted: Options) -> Path:
    """Make the data of `harder` and the model that all sides start from, if missing; returns their folder."""
    harder.inputs(wanted, Display())
    run_in_foreground(make_missing([harder.warm_up(wanted)], wanted, Display()))
    return countdown.task(wanted, harder.NUMBERS)


def trained(side: str, task: Path, steps: int) -> Curve:
    """Train one side in its own process."""
    with tempfile.TemporaryDirectory() as outputs:
        out, log = Path(outputs) / "rows.json", Path(outputs) / "log"
        command = [sys.executable, "-m", "benchmarks.versus_trl.learning_sides", side, str(task), str(steps), str(out)]
        begun = time.time()
        code, others = run_beside_others(command, log, SECONDS)
        print(f"{NAMES[side]}: other processes took {others:.0%} of the machine", flush=True)
        if code:
            sys.exit(f"{side} failed:\n{log.read_text(errors='replace')[-3000:]}")
        rows = json.loads(out.read_text())
    means = {f"pass@{k}": moving([row[f"pass@{k}"] for row in rows]) for k in KS}
    return {"seconds": np.array([row["time"] - begun for row in rows]), **means}


def moving(values: list[float]) -> Floats:
    """Means of the last `WINDOW` values, or of fewer at the start."""
    sums = np.cumsum(values)
    sums[WINDOW:] = sums[WINDOW:] - sums[:-WINDOW]
    return np.asarray(sums / np.minimum(np.arange(1, len(values) + 1), WINDOW))


def report(curves: Mapping[str, Curve]) -> None:
    """Print speeds, final pass@k, and the seconds to each level that TRL reached."""
    lines = []
    for name, curve in curves.items():
        speed = (len(curve["seconds"]) - 1) / (curve["seconds"][-1] - curve["seconds"][0])
        ends = [f"{100 * curve[f'pass@{k}'][-1]:.1f}" for k in KS]
        lines.append([name, f"{curve['seconds'][0]:.0f}", f"{speed * PROMPTS * SAMPLES:.0f}", *ends])
    print_table(
        ["", "first step after s", "samples/s", *(f"pass@{k} of the last {WINDOW} steps, %" for k in KS)], lines
    )
    theirs = curves[NAMES["trl"]]
    for k in KS:
        metric = f"pass@{k}"
        first, best = theirs[metric][WINDOW - 1], theirs[metric][WINDOW - 1 :].max()
        levels = [first + share * (best - first) for share in SHARES]
        cells = [[name, *(reached(curve, metric, level) for level in levels)] for name, curve in curves.items()]
        print_table([f"seconds to {metric} of", *(f"{100 * level:.1f}%" for level in levels)], cells)


def reached(curve: Curve, metric: str, level: float) -> str:
    """Seconds until the mean of a full window reaches ``level``, or "never"."""
    found = np.flatnonzero(curve[metric][WINDOW - 1 :] >= level)
    return f"{curve['seconds'][WINDOW - 1 + found[0]]:.0f}" if len(found) else "never"


def draw(curves: Mapping[str, Curve], out: Path) -> None:
    """Plot pass@1 and pass@8 against wall time."""
    out.mkdir(parents=True, exist_ok=True)
    figure, axes = panels(len(KS))
    for axis, k in zip(axes, KS, strict=True):
        for colour, (name, curve) in zip((RED, SKY, BLUE), curves.items(), strict=True):
            axis.plot(curve["seconds"][WINDOW - 1 :], 100 * curve[f"pass@{k}"][WINDOW - 1 :], color=colour, label=name)
        axis.set(xlabel="seconds since the command", ylabel=f"pass@{k}, % of training prompts")
    axes[0].legend(frameon=False)
    save(figure, out, "versus_trl")


if __name__ == "__main__":
    main()
