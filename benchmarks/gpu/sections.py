"""Runs the sections of a GPU benchmark, each in a process of its own, and reports their rows as one table.

What a section leaves in memory, or dies of, does not touch the next. A section that fails or overruns is a line of the
table, and the command ends with 1.
"""

import argparse
import importlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.gpu.setting import SHAPES, Row, Setting
from benchmarks.objectives.report import print_table
from volley.processes import last_lines

# A class in a module, as `volley.errors.WorkerDied`, or one of Python's own.
EXCEPTION = re.compile(r"(\[rank\d+\]: )?(\w[\w.]*\.[A-Z]\w*|\w*(Error|Exception|Exit|Interrupt))(: |$)")
MARK = "ROW "  # begins the lines of a section's log that are rows


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A command.

    Attributes:
        module: its module in this package, and the name of its files.
        subject: of the table.
        sections: modules of this package that have ``run``.
        seconds: limit of a section.
    """

    module: str
    subject: str
    sections: tuple[str, ...]
    seconds: float


def main(benchmark: Benchmark, about_it: str | None) -> None:
    """Run the sections that the command line names, or one of them within its own process."""
    options = arguments(benchmark, about_it)
    if options.within is not None:
        run_section(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    failed = False
    print(about(options.device), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        setting_of(options, Path(scratch)).model()
        for section in options.sections or benchmark.sections:
            begun = time.perf_counter()
            found, problem = supervised(benchmark, section, options, Path(scratch))
            rows += found
            if problem:
                failed = True
                rows.append(Row(section, "FAILED", problem))
            print(f"{section}: {time.perf_counter() - begun:.0f} s", flush=True)
    report(benchmark, rows, options)
    sys.exit(1 if failed else 0)


def supervised(benchmark: Benchmark, section: str, options: argparse.Namespace, scratch: Path) -> tuple[list[Row], str]:
    """Run a section in a process of its own; returns its rows, and why it failed, or ""."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{benchmark.module}", section, "--within", str(scratch)]
    command += ["--device", options.device, "--size", options.size, "--out", str(options.out)]
    log = options.out / f"{section}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(options.limit)
            problem = f"exit status {code}: {reason(log)}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"no end within {options.limit:g} s"
        finally:
            end(process)
    lines = [line.removeprefix(MARK) for line in log.read_text().splitlines() if line.startswith(MARK)]
    return [Row(**json.loads(line)) for line in lines], problem


def reason(log: Path) -> str:
    """The last line that names an exception, which libraries' warnings may follow; without one, the last line."""
    lines = last_lines(log, 40).splitlines()
    named = [line for line in lines if EXCEPTION.match(line)]
    return (named or lines or [""])[-1]


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a section that has not ended, and whatever it started in its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_section(options: argparse.Namespace) -> None:
    """In the section's own process: print each row as it is measured."""
    (section,) = options.sections
    run = importlib.import_module(f"benchmarks.gpu.{section}").run
    rows: Iterator[Row] = run(setting_of(options, options.within))
    for row in rows:
        print(f"{MARK}{json.dumps(asdict(row))}", flush=True)


def setting_of(options: argparse.Namespace, scratch: Path) -> Setting:
    """Where and on what the sections run."""
    return Setting(options.device, options.size, scratch, small=options.size == "tiny")


def about(device: str) -> str:
    """The machine, in a line."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return f"{name}; {versions}"


def report(benchmark: Benchmark, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print the table; write it as JSON and as a page."""
    print_table(("section", "what", "figure"), [(row.section, row.what, row.figure) for row in rows])
    machine, file = about(options.device), options.out / benchmark.module
    content = {"machine": machine, "size": options.size, "rows": [asdict(row) for row in rows]}
    file.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [f"# {benchmark.subject} on {machine}, {options.size}", "", "| section | what | figure |", "|---|---|---|"]
    lines += [f"| {row.section} | {row.what} | {row.figure} |" for row in rows]
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")


def arguments(benchmark: Benchmark, about_it: str | None) -> argparse.Namespace:
    """The command line."""
    names = ", ".join(benchmark.sections)
    parser = argparse.ArgumentParser(description=about_it, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{names}; default: all")
    parser.add_argument("--size", choices=SHAPES, default="1.5B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-benchmark"), help="folder for logs, JSON and the page")
    parser.add_argument("--limit", type=float, default=benchmark.seconds, help="seconds after which a section is ended")
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.sections) - set(benchmark.sections):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {names}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: install its build for CUDA, or measure the CPU: --device cpu --size tiny")
    return options
