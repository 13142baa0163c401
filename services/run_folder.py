"""The run folder: everything a run leaves behind, readable without Volley.

job.yaml            the resolved job
metrics.jsonl       one object a step
events.jsonl        one object an event
desired.json        what the user changed of the live run
import_from         folder of the job file it was started from: the job's own code lies there
ledger.jsonl        one object for each group trained on: its prompt and its step
samples.jsonl       an excerpt of samples with verdicts and advantages; of an eval or rft job every sample
kept.jsonl          what an rft job trained on: prompt, answer, reward
evaluations.jsonl   one object an evaluation
summary.json        how the run ended; how long its roles took to start
plots/              PNG
logs/               one file a process
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
from pathlib import Path
from typing import Any

from services.job_file import Job, dump_job, load_job
from volley.errors import HostError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run, and the appending of rows."""

    path: Path

    @classmethod
    def create(cls, parent: Path, job: Job) -> "RunFolder":
        """A new folder ``parent/<name>-<date>-<time>`` with the resolved job in it."""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
        return cls.at(parent / f"{job.name}-{stamp}", job)

    @classmethod
    def at(cls, path: Path, job: Job) -> "RunFolder":
        """The folder at ``path``, made if need be; raises `HostError` where it can not be written."""
        folder = cls(path.resolve())
        try:
            for part in (folder.logs, folder.plots, folder.checkpoints):
                part.mkdir(parents=True, exist_ok=True)
            (folder.path / "job.yaml").write_text(dump_job(job))
        except OSError as error:
            raise HostError(f"run folder {path} can not be written: {error.strerror or error}") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple["RunFolder", Job]:
        """An earlier run's folder and its job; raises `JobError` where there is none."""
        folder = cls(path.resolve())
        return folder, load_job(folder.path / "job.yaml")

    def keep_import_from(self, folder: Path) -> None:
        """Remember where the job's own code lies, for a resume from another directory."""
        (self.path / "import_from").write_text(f"{folder.resolve()}\n")

    def import_from(self) -> Path | None:
        """What `keep_import_from` was told, None where it was not."""
        file = self.path / "import_from"
        return Path(file.read_text().removesuffix("\n")) if file.exists() else None

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def logs(self) -> Path:
        return self.path / "logs"

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
        """Append ``rows`` to ``<name>.jsonl``, all of them or, where the disk is full (OSError), none."""
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with (self.path / f"{name}.jsonl").open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                while lines:
                    lines = lines[file.write(lines) :]
            except OSError:
                file.truncate(end)
                raise

    def read(self, name: str) -> list[dict[str, Any]]:
        """The rows of ``<name>.jsonl``; none if there is no such file. A last line cut off in its writing is no row."""
        file = self.path / f"{name}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def rewind(self, step: int, *, samples: bool = True) -> None:
        """Forget rows that a run resumed after ``step`` steps will write again.

        Args:
            samples: are they among these?
        """
        excerpt = (("samples", "step"),) if samples else ()
        for name, key in (("metrics", "step"), *excerpt, ("ledger", "step"), ("evaluations", "version")):
            # An evaluation of version s was made with s steps done; a step's rows are numbered from 0.
            last = step if key == "version" else step - 1
            kept = [row for row in self.read(name) if row[key] <= last]
            aside = self.path / f".{name}.partial"
            aside.write_text("".join(json.dumps(row) + "\n" for row in kept))
            aside.replace(self.path / f"{name}.jsonl")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep other processes from running in this folder; raises `HostError` while one does."""
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HostError(f"{self.path} is in use by a live run: stop that first") from None
            yield

    def summary(self) -> dict[str, Any]:
        """How the run stands, or ended."""
        return dict(json.loads((self.path / "summary.json").read_text()))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
