"""The run folder: everything a run writes, readable without Volley.

job.yaml            the resolved job
metrics.jsonl       one object per step
events.jsonl        one object per event
desired.json        the user's changes to the live run
import_from         folder of the job file, from which the job's own code is imported
ledger.jsonl        one object per group trained on: its prompt and its step
samples.jsonl       an excerpt of samples with verdicts and advantages; all samples of an eval or rft job
kept.jsonl          the samples that an rft job trained on: prompt, answer, reward
evaluations.jsonl   one object per evaluation
observed.json       the state as the run's driver reported it last, every few seconds while it is live
summary.json        how the run ended, and how long its roles took to start
rewards/            what scorer functions share: kept results, and locks of their limits
plots/              PNG
logs/               one file per process
checkpoints/        resumable state, the newest few
model/              the exported Hugging Face model
"""

import contextlib
import datetime
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from services.jobs.job_file import Job, dump_job, load_job
from volley.errors import HostError, JobError
from volley.files import partial_path, replace_text
from volley.state import Observed

OBSERVED = "observed.json"


class RunHasEnded(JobError):
    """What was asked makes no sense for a run that has ended."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run folder, and its tables of rows."""

    path: Path

    @classmethod
    def create(cls, parent: Path, job: Job) -> "RunFolder":
        """Create the folder ``parent/<name>-<date>-<time>`` with the resolved job in it."""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
        return cls.at(parent / f"{job.name}-{stamp}", job)

    @classmethod
    def at(cls, path: Path, job: Job) -> "RunFolder":
        """Create the folder at ``path`` if needed and write the job. Raises `HostError` if that is not possible."""
        folder = cls(path.resolve())
        try:
            for part in (folder.logs, folder.plots, folder.checkpoints):
                part.mkdir(parents=True, exist_ok=True)
            replace_text(folder.path / "job.yaml", dump_job(job))
        except OSError as error:
            raise HostError(f"run folder {path} cannot be written: {error.strerror or error}") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple["RunFolder", Job]:
        """Open an existing run folder and read its job. Raises `JobError` if there is none."""
        folder = cls(path.resolve())
        return folder, load_job(folder.path / "job.yaml")

    def keep_import_from(self, folder: Path) -> None:
        """Remember the folder with the job's own code, for a resume from another directory."""
        (self.path / "import_from").write_text(f"{folder.resolve()}\n")

    def import_from(self) -> Path | None:
        """Return the folder that `keep_import_from` stored, or None."""
        file = self.path / "import_from"
        return Path(file.read_text().removesuffix("\n")) if file.exists() else None

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def rewards(self) -> Path:
        return self.path / "rewards"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append ``rows`` to ``<name>.jsonl``: all of them, or none if it raises OSError, as on a full disk."""
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with (self.path / f"{name}.jsonl").open("ab+", buffering=0) as file:
            end = _drop_incomplete(file)
            try:
                while lines:
                    lines = lines[file.write(lines) :]
            except OSError:
                file.truncate(end)
                raise

    def read(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of ``<name>.jsonl``, ignoring an incomplete last line; no rows if there is no such file."""
        file = self.path / f"{name}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def rewind(self, step: int, *, samples: bool = True) -> None:
        """Remove the rows that a run resumed after ``step`` steps will write again.

        Args:
            samples: whether to remove rows of ``samples.jsonl`` too.
        """
        excerpt = (("samples", "step"),) if samples else ()
        for name, key in (("metrics", "step"), *excerpt, ("ledger", "step"), ("evaluations", "version")):
            # An evaluation of version s was done after s steps; the rows of steps are numbered from 0.
            last = step if key == "version" else step - 1
            kept = [row for row in self.read(name) if row[key] <= last]
            replace_text(self.path / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Lock the folder for the block. Raises `HostError` if another process has it locked."""
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HostError(f"{self.path} is in use by a live run: stop that run first") from None
            yield

    @property
    def is_live(self) -> bool:
        """Whether a process is running the run in this folder."""
        try:
            with self.in_use():
                return False
        except HostError:
            return True

    def summary(self) -> dict[str, Any]:
        """How the run stands, or ended."""
        return dict(json.loads((self.path / "summary.json").read_text()))

    @property
    def state(self) -> str:
        """The run's state according to its summary; "" before it has one."""
        return str(self.summary()["state"]) if (self.path / "summary.json").exists() else ""

    def observed(self) -> Observed | None:
        """The state that the run's driver reported last; None before its first report."""
        try:
            return Observed.model_validate_json((self.path / OBSERVED).read_bytes())
        except FileNotFoundError:
            return None

    def write_observed(self, observed: Observed) -> None:
        """Replace `OBSERVED`, atomically. It is not synced to disk: the next report replaces it."""
        partial = partial_path(self.path / OBSERVED)
        partial.write_text(observed.model_dump_json(indent=2) + "\n")
        partial.replace(self.path / OBSERVED)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        replace_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def _drop_incomplete(file: FileIO) -> int:
    """Remove what a crash left of a last row, which would spoil the next one; returns where that begins."""
    end = file.seek(0, os.SEEK_END)
    if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
        file.seek(0)
        end = file.truncate(file.readall().rfind(b"\n") + 1)
    return end
