"""Compare what ``volley plan`` predicts with what a CPU does, for random models of 1, 3 and 30 million parameters.

    python -m benchmarks.plan [--sizes 1M 3M 30M] [--turns 3] [--json] [--machine FILE]

It first measures this machine's rates without the stages that it then predicts (see `benchmarks.plan.rates`). Each
stage runs alone, on one thread: a step of the learner, an engine that generates, publishing and loading a version.
``--machine`` writes the rates to a file for ``volley plan --machine``. Run nothing else meanwhile.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.objectives.report import print_table
from benchmarks.plan.measured import generate, in_own_process, learn
from benchmarks.plan.models import SIZES, Work, job_of, load_of, make
from benchmarks.plan.rates import measure_device
from volley.plan.machine import Device, Hardware
from volley.plan.memory import shape_of
from volley.plan.report import Plan, make_plan

TRAINED, DRAWN, TOKENS = (2, 8), (2, 16), 64  # groups and samples of each, and tokens per sample


@dataclass(frozen=True, slots=True)
class Row:
    """One stage of one model; ``unit`` is that of both figures."""

    size: str
    parameters: int
    stage: str
    unit: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def compare(size: str, device: Device, folder: Path, turns: int) -> Iterator[Row]:
    """Predict and measure the stages of one model."""
    model = make(folder / size, SIZES[size])
    training, drawing = Work(*TRAINED, TOKENS, turns), Work(*DRAWN, TOKENS, turns)
    trained, drawn = plan(model, training, device), plan(model, drawing, device)
    learned = in_own_process(learn, model, training, folder)
    made = in_own_process(generate, model, drawing, folder, (drawing.groups * drawing.n,))
    parameters = trained.shape.parameters

    predicted = learned.tokens / trained.stages.training.seconds
    yield Row(size, parameters, "train", "tokens/s", predicted, learned.tokens / learned.step)
    generating = drawn.stages.generation.tokens_per_second
    yield Row(size, parameters, "generate", "tokens/s", generating, made.tokens_per_second)
    yield Row(size, parameters, "publish", "s", trained.stages.publish, learned.store + made.load)


def plan(model: Path, work: Work, device: Device) -> Plan:
    job = job_of(model, work)
    return make_plan(job, shape_of(job.model, model), Hardware(device=device, gpus=0), load_of(work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--turns", type=int, default=3, help="turns of each measurement, after a warm-up")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--machine", type=Path, help="write the machine's rates to this file")
    args = parser.parse_args()
    if args.turns < 1:
        parser.error("--turns: write 1 at least")
    with tempfile.TemporaryDirectory() as name:
        device = measure_device(Path(name), Work(2, 16, TOKENS, args.turns))
        print(device.model_dump_json(indent=2), file=sys.stderr, flush=True)
        if args.machine:
            args.machine.write_text(device.model_dump_json(indent=2) + "\n")
        rows = []
        for size in args.sizes:
            for row in compare(size, device, Path(name), args.turns):
                print(f"{row.size} {row.stage}: predicted / measured {row.ratio:.2f}", file=sys.stderr, flush=True)
                rows.append(row)
    if args.json:
        print(json.dumps({"device": device.model_dump(), "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}))
        return
    cells = [(row.size, row.stage, row.unit, row.predicted, row.measured, row.ratio) for row in rows]
    print_table(("model", "stage", "unit", "predicted", "measured", "predicted / measured"), cells)


if __name__ == "__main__":
    main()
