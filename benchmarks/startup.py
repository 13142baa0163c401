"""Seconds from ``volley run`` to the first trained step, stage by stage.

    python -m benchmarks.startup [--rounds 3] [--model FOLDER] [--service]

The job is the workload ``short`` of the comparison with TRL, with ``--model`` its workload ``sums``: one actor, one
reward worker, one learner rank. The times come from the files in the run folder. The three roles start at the same
time. With ``--service`` they count from ``volley submit``, in a service of its own, where each run follows another.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.versus_trl.volley_side import job_of
from benchmarks.versus_trl.workloads import WORKLOADS, write_inputs
from services.store.folder import RunFolder
from volley.state import ENDED

LOOK_SECONDS = 0.02
SECONDS = 300
LAUNCH = [sys.executable, "-c", "from services.cli import main; main()"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="folder of a pretrained model")
    parser.add_argument("--service", action="store_true", help="submit the job to a service")
    args = parser.parse_args()
    workload = WORKLOADS["sums" if args.model else "short"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = folder / "runs"
        write_inputs(workload, folder, model=args.model)
        job = folder / "job.yaml"
        job.write_text(json.dumps({**job_of(workload, folder, ""), "steps": 2}))
        with service(folder, runs) if args.service else contextlib.nullcontext(os.environ) as environment:
            command = ["submit", str(job)] if args.service else ["run", str(job), "--out", str(runs), "--quiet"]
            report([stage_ends(command, runs, environment) for _ in range(args.rounds)])


@contextlib.contextmanager
def service(folder: Path, runs: Path) -> Iterator[Mapping[str, str]]:
    """A service that keeps its run folders in ``runs``: the environment of its commands."""
    environment = {**os.environ, "VOLLEY_HOME": str(folder / "home"), "XDG_CONFIG_HOME": str(folder)}
    code = ("--import-from", str(Path.cwd()), "--allow-code", "benchmarks")
    up = [*LAUNCH, "up", "--port", "0", "--runs", str(runs), *code]
    subprocess.run(up, env=environment, stdout=subprocess.DEVNULL, check=True)
    try:
        yield environment
    finally:
        subprocess.run([*LAUNCH, "down"], env=environment, stdout=subprocess.DEVNULL, check=True)


def stage_ends(command: list[str], runs: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """Start one run; return when each of its stages ended, in seconds from the start, in order."""
    begun, known = time.time(), set(runs.glob("*"))
    process = subprocess.Popen([*LAUNCH, *command], env=environment, stdout=subprocess.DEVNULL)
    try:
        folder, checked = _wait_for_folder(runs, known, begun)
        while not (ended := folder.state in ENDED) and time.time() < begun + SECONDS:
            time.sleep(LOOK_SECONDS)
        process.wait(SECONDS)
    finally:
        process.kill()
    if process.returncode or not ended or folder.state != "done":
        sys.exit(f"{command[0]} exited with {process.returncode}; the run is {folder.state}")
    took = folder.summary()["start_seconds"]
    (started,) = [row["time"] for row in folder.read("events") if row["kind"] == "started"]
    roles_begun = started - max(took.values())
    ends = {"job and data checked": checked, "Redis and Ray up": roles_begun}
    ends |= {f"{role} ready": roles_begun + seconds for role, seconds in sorted(took.items(), key=lambda item: item[1])}
    row = folder.read("metrics")[0]
    ends["first batch generated and scored"] = started + row["seconds_wait"]
    ends["first step trained"] = started + row["seconds_wait"] + row["seconds_learn"]
    return {stage: end - begun for stage, end in ends.items()}


def _wait_for_folder(runs: Path, known: set[Path], begun: float) -> tuple[RunFolder, float]:
    """Wait for a new run folder, which is created once job and data are checked; return it with the time."""
    while not (found := [file for file in runs.glob("*/summary.json") if file.parent not in known]):
        if time.time() > begun + SECONDS:
            raise TimeoutError(f"no run folder was created within {SECONDS} s")
        time.sleep(LOOK_SECONDS)
    return RunFolder(found[0].parent), time.time()


def report(rounds: list[dict[str, float]]) -> None:
    """Print when each stage ended: the median over the rounds, and the range."""
    for stage in rounds[0]:
        times = [each[stage] for each in rounds]
        print(f"{stage:36} {statistics.median(times):6.1f} s   ({min(times):.1f} to {max(times):.1f})")


if __name__ == "__main__":
    main()
