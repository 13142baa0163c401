"""Where commands read a run: in the service, by its id, or in a run folder on this machine."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from services.cli.options import local_folder, service_run
from services.jobs.job_file import Job
from services.store.desired import read_desired
from services.store.folder import RunFolder
from services.store.logs import log_files, read_log
from volley.base import replaced
from volley.client import LiveEvent, LogPiece, Run
from volley.errors import NotFound
from volley.objectives.tries import with_tries
from volley.state import ENDED, Observed, RunRecord, objective_text

POLL_SECONDS = 1.0
RECENT = 20  # steps among which the newest row is looked for
TABLES = ("metrics", "events", "evaluations")


class RunSource(Protocol):
    """One run, wherever it is."""

    @property
    def run_id(self) -> str: ...

    def view(self) -> dict[str, Any]:
        """Return record, desired, observed and state, as `GET /v1/runs/{run_id}` does."""
        ...

    def newest_metrics(self, steps: int) -> dict[str, float]:
        """Return the numbers of the newest step, given that ``steps`` are done; empty before the first."""
        ...

    def evaluations(self) -> list[dict[str, Any]]: ...

    def ledger(self) -> dict[str, int]: ...

    def processes(self) -> list[dict[str, Any]]: ...

    def log_piece(self, process: str, most: int, offset: int | None = None) -> LogPiece:
        """Return at most ``most`` bytes of a log from ``offset`` (None: the log's end)."""
        ...

    def follow(self) -> Iterator[LiveEvent]:
        """Yield what happens in the run from now on; the last event is ``ended``, after everything the run wrote."""
        ...


@contextlib.contextmanager
def open_run(run: str, server: str | None) -> Iterator[RunSource]:
    """The run folder ``run`` if that is a folder, else the run of the service whose id begins with ``run``."""
    if local_folder(run) is not None:
        yield FolderRun.open(Path(run))
        return
    with service_run(run, server) as found:
        yield found


@dataclass(frozen=True, slots=True)
class ServiceRun:
    """A run of the service."""

    run: Run

    @property
    def run_id(self) -> str:
        return self.run.id

    def view(self) -> dict[str, Any]:
        return self.run.view().model_dump(mode="json")

    def newest_metrics(self, steps: int) -> dict[str, float]:
        found = self.run.metrics(first=max(0, steps - RECENT))
        if not len(found.steps):
            return {}
        row = {name: float(values[-1]) for name, values in found.items() if np.isfinite(values[-1])}
        return {"step": int(found.steps[-1]), **_numbers(row)}

    def evaluations(self) -> list[dict[str, Any]]:
        return list(self.run.evaluations().rows)

    def ledger(self) -> dict[str, int]:
        return self.run.ledger()

    def processes(self) -> list[dict[str, Any]]:
        return [file.model_dump(mode="json") for file in self.run.processes()]

    def log_piece(self, process: str, most: int, offset: int | None = None) -> LogPiece:
        return self.run.log_piece(process, most, offset)

    def follow(self) -> Iterator[LiveEvent]:
        return self.run.live()


@dataclass(frozen=True, slots=True)
class FolderRun:
    """A run folder on this machine."""

    folder: RunFolder
    job: Job

    @classmethod
    def open(cls, path: Path) -> "FolderRun":
        """Open the folder. Raises `JobError` if it is not a run folder."""
        return cls(*RunFolder.open(path))

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    def view(self) -> dict[str, Any]:
        observed = self._observed()
        record = RunRecord(
            id=self.run_id,
            name=self.job.name,
            kind=self.job.kind,
            job=self.job.model_dump(mode="json"),
            created=observed.started or (self.folder.path / "job.yaml").stat().st_mtime,
            folder=str(self.folder.path),
        )
        return {
            "record": record.model_dump(mode="json"),
            "desired": read_desired(self.folder).model_dump(mode="json"),
            "observed": observed.model_dump(mode="json"),
            "state": "lost" if observed.lost() else observed.state,
        }

    def newest_metrics(self, steps: int) -> dict[str, float]:
        rows = self.folder.read("metrics")
        return _numbers(rows[-1]) if rows else {}

    def evaluations(self) -> list[dict[str, Any]]:
        return self.folder.read("evaluations")

    def ledger(self) -> dict[str, int]:
        row = self.newest_metrics(0)
        return {name.removeprefix("groups_"): int(row[name]) for name in row if name.startswith("groups_")}

    def processes(self) -> list[dict[str, Any]]:
        return [asdict(file) for file in log_files(self.folder.path)]

    def log_piece(self, process: str, most: int, offset: int | None = None) -> LogPiece:
        piece = read_log(self.folder.path, process, most, offset)
        if piece is None:
            names = ", ".join(file["process"] for file in self.processes())
            raise NotFound(f"{self.folder.path} has no log of {process}; it has {names or 'no logs'}", 404)
        return LogPiece(piece.text, piece.next)

    def follow(self) -> Iterator[LiveEvent]:
        """Yield new rows of the folder's tables, and the state whenever it changes, until the run has ended."""
        seen = {name: len(self.folder.read(name)) for name in TABLES}
        before = ""
        while True:
            view = self.view()  # before the tables: a run writes its last rows before its last state
            for name in TABLES:
                rows = self.folder.read(name)
                new, seen[name] = rows[seen[name] :], len(rows)  # a resumed run has rewound its tables: fewer rows
                if new:
                    yield LiveEvent(name, {"rows" if name == "metrics" else "items": new})
            if (state := json.dumps([view["observed"], view["desired"]])) != before:
                before = state
                yield LiveEvent("observed", {key: view[key] for key in ("desired", "observed", "state")})
            if view["state"] in ENDED:
                yield LiveEvent("ended", {"state": view["state"]})
                return
            time.sleep(POLL_SECONDS)

    def _observed(self) -> Observed:
        """What the run's driver reported last, completed by how the run ended."""
        reported = self.folder.observed()
        summary = self.folder.path / "summary.json"
        if reported is None:
            rows, updated = self.folder.read("metrics"), summary.stat().st_mtime if summary.exists() else 0.0
            step = rows[-1]["step"] + 1 if rows else 0
            reported = Observed(step=step, steps=getattr(self.job, "steps", 0), version=step, updated=updated)
        state = self.folder.state
        if state and (state in ENDED or reported.state == "queued"):
            problem = str(self.folder.summary().get("problem", ""))
            reported = replaced(reported, state=state, problem=problem)
        return reported


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The row's numbers. Tables, such as histograms, have one number per bin or tag and are left out."""
    return {
        name: value
        for name, value in row.items()
        if "." not in name and isinstance(value, int | float) and not isinstance(value, bool)
    }


def run_object(view: Mapping[str, Any], **more: object) -> dict[str, Any]:
    """The JSON object of a run: the fields that `volley ls --json` prints, then ``folder``, ``job`` and its state."""
    record, observed, desired = view["record"], view["observed"], view["desired"]
    job = record["job"]
    return {
        **{key: record[key] for key in ("id", "name", "kind")},
        "state": view["state"],
        "step": observed["step"],
        "steps": observed["steps"] or job.get("steps") or 0,
        "created": record["created"],
        "updated": observed["updated"] or record["created"],
        **{key: observed[key] for key in ("problem", "actors", "reward_workers", "environment_workers")},
        "objective": objective_text(with_tries(job.get("objective", {}), desired["objective"])),
        "tags": record["tags"],
        "folder": record["folder"],
        "job": job,
        "desired": desired,
        "observed": observed,
        **more,
    }
