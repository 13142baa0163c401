"""Samples per second compared with TRL's `GRPOTrainer`, on the workloads of `workloads`.

    python -m benchmarks.versus_trl.run [short long code judge] [--rounds 3] [--folder demo/versus_trl]
    python -m benchmarks.versus_trl.run sums --model demo-llm/smollm2-135m-instruct [--set learner.threads_per_rank=2]

Both sides take turns, each in its own process, with the same model, prompts, number and length of samples, and
optimiser steps; start-up and the first three steps are not counted. The ratio is taken round by round. Each line also
shows the share of the machine's CPU time that other processes took: above a few percent, the round means little.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.versus_trl.others import run_beside_others
from benchmarks.versus_trl.workloads import SAMPLES, WORKLOADS, judge, write_inputs

WARM = 3  # steps
SIDES = ("trl", "volley")
SECONDS = 900  # time limit for one run


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one run of one side.

    Attributes:
        speed: samples per second.
        others: share of the machine's CPU time that other processes took.
    """

    speed: float
    others: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", type=_known, metavar="WORKLOAD", help="default: all but sums")
    parser.add_argument("--model", type=Path, help="folder of the pretrained model of sums")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change Volley's job")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("demo/versus_trl"))
    args = parser.parse_args()
    if "sums" in args.workloads and args.model is None:
        parser.error("sums needs --model FOLDER")
    print(f"{'workload':10}{'TRL':>9}{'Volley':>9}{'ratio':>9}   taken by other processes: TRL, Volley", flush=True)
    results = {}
    for name in args.workloads or [name for name, each in WORKLOADS.items() if each.tokens]:
        folder = args.folder.resolve() / name
        folder.mkdir(parents=True, exist_ok=True)
        write_inputs(WORKLOADS[name], folder, model=None if WORKLOADS[name].tokens else args.model)
        rounds: list[dict[str, Run]] = []
        with judge() if WORKLOADS[name].reward == "judge" else contextlib.nullcontext("") as url:
            for _ in range(args.rounds):
                rounds.append({side: run_side(side, name, folder, url, args.set) for side in SIDES})
                print(line(name, rounds[-1:]), flush=True)
        print(line(f"{name}, all", rounds), flush=True)
        results[name] = [{side: asdict(run) for side, run in each.items()} for each in rounds]
        (args.folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")


def _known(name: str) -> str:
    if name not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(WORKLOADS)}")
    return name


def run_side(side: str, name: str, folder: Path, url: str, changes: Sequence[str] = ()) -> Run:
    """Run one side once in its own process; ``changes`` are Volley's."""
    with tempfile.TemporaryDirectory() as outputs:
        out, log = Path(outputs) / "seconds.json", Path(outputs) / "log"
        command = [sys.executable, "-m", f"benchmarks.versus_trl.{side}_side", name, str(folder), str(out)]
        own = [f"--set={each}" for each in changes] if side == "volley" else []
        code, others = run_beside_others([*command, *([url] if url else []), *own], log, SECONDS)
        if code:
            sys.exit(f"{side} on {name} failed:\n{log.read_text(errors='replace')[-3000:]}")
        seconds = json.loads(out.read_text())[WARM:]
    return Run(len(seconds) * WORKLOADS[name].prompts * SAMPLES / sum(seconds), others)


def line(name: str, rounds: list[dict[str, Run]]) -> str:
    """One row of the table: medians over ``rounds``."""
    speeds = [statistics.median(each[side].speed for each in rounds) for side in SIDES]
    ratio = statistics.median(each["volley"].speed / each["trl"].speed for each in rounds)
    others = ", ".join(f"{statistics.median(each[side].others for each in rounds):.0%}" for side in SIDES)
    return f"{name:10}{speeds[0]:>9.1f}{speeds[1]:>9.1f}{ratio:>8.2f}x   {others}"


if __name__ == "__main__":
    main()
