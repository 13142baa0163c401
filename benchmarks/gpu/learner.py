"""The learner on a GPU, as one command: `python -m benchmarks.gpu.learner [--size 1.5B] [--out FOLDER] [SECTIONS]`.

Needs torch, transformers, DeepSpeed, pydantic; neither Ray nor vLLM. Models are random and made on the spot. About ten
minutes on one GPU. `--device cpu --size tiny` tries every line in a minute, and its figures say nothing.

Each section has a process of its own, so that what one leaves in memory, or dies of, does not touch the next. A section
that fails or overruns is a line of the table, and the command ends with 1.
"""

import argparse
import importlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu.setting import SHAPES, Row, Setting
from benchmarks.objectives.report import print_table
from volley.processes import last_lines

MARK = "ROW "  # begins the lines of a section's log that are rows
SECTIONS = ("exactness", "group", "publishing", "checkpoints", "throughput")


def main() -> None:
    options = arguments()
    if options.within is not None:
        run_section(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    failed = False
    print(about(options.device), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        setting_of(options, Path(scratch)).model()
        for section in options.sections or SECTIONS:
            begun = time.perf_counter()
            found, problem = supervised(section, options, Path(scratch))
            rows += found
            if problem:
                failed = True
                rows.append(Row(section, "FAILED", problem))
            print(f"{section}: {time.perf_counter() - begun:.0f} s", flush=True)
    report(rows, options)
    sys.exit(1 if failed else 0)


def supervised(section: str, options: argparse.Namespace, scratch: Path) -> tuple[list[Row], str]:
    """Run a section in a process of its own; returns its rows, and why it failed, or ""."""
    command = [sys.executable, "-m", "benchmarks.gpu.learner", section, "--within", str(scratch)]
    command += ["--device", options.device, "--size", options.size, "--out", str(options.out)]
    log = options.out / f"{section}.log"
    problem = ""
    with log.open("w") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=options.limit, check=False)
            if done.returncode:
                problem = f"exit status {done.returncode}: {last_lines(log, 1)}"
        except subprocess.TimeoutExpired:
            problem = f"no end within {options.limit:g} s"
    lines = [line.removeprefix(MARK) for line in log.read_text().splitlines() if line.startswith(MARK)]
    return [Row(**json.loads(line)) for line in lines], problem


def run_section(options: argparse.Namespace) -> None:
    """In the section's own process: print each row as it is measured."""
    (section,) = options.sections
    run = importlib.import_module(f"benchmarks.gpu.{section}").run
    setting = setting_of(options, options.within)
    rows: Iterator[Row] = run(setting)
    for row in rows:
        print(f"{MARK}{json.dumps(asdict(row))}", flush=True)


def setting_of(options: argparse.Namespace, scratch: Path) -> Setting:
    return Setting(options.device, options.size, scratch, small=options.size == "tiny")


def about(device: str) -> str:
    """The machine, in a line."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return f"{name}; {versions}"


def report(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print the table; write it as JSON and as a page."""
    print_table(("section", "what", "figure"), [(row.section, row.what, row.figure) for row in rows])
    machine = about(options.device)
    (options.out / "learner.json").write_text(
        json.dumps({"machine": machine, "size": options.size, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
    )
    lines = [f"# The learner on {machine}, {options.size}", "", "| section | what | figure |", "|---|---|---|"]
    lines += [f"| {row.section} | {row.what} | {row.figure} |" for row in rows]
    (options.out / "learner.md").write_text("\n".join(lines) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; default: all")
    parser.add_argument("--size", choices=SHAPES, default="1.5B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("gpu-benchmark"), help="folder for logs, JSON and the page")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a section is ended")
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(SECTIONS)}")
    return options


if __name__ == "__main__":
    main()
