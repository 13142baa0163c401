"""Where commands read a run: in the service, by its id, or in a run folder on this machine."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from services.cli.client import ApiClient, Event, Refused
from services.cli.options import local_folder, service_run
from services.jobs.job_file import Job
from services.store.desired import read_desired
from services.store.folder import RunFolder
from services.store.logs import log_files, read_log
from services.store.state import ENDED, Observed, RunRecord, objective_text
from volley.base import replaced
from volley.objectives.tries import with_tries

MATCHES_SHOWN = 5
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

    def log_piece(self, process: str, most: int, offset: int | None = None) -> tuple[str, int]:
        """Return at most ``most`` bytes of a log from ``offset`` (None: the log's end), and the next offset."""
        ...

    def events(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest events, oldest first."""
        ...

    def follow(self) -> Iterator[Event]:
        """Yield what happens in the run from now on, without end."""
        ...


@contextlib.contextmanager
def open_run(run: str, server: str | None) -> Iterator[RunSource]:
    """The run folder ``run`` if that is a folder, else the run of the service whose id begins with ``run``."""
    if local_folder(run) is not None:
        yield FolderRun.open(Path(run))
        return
    with service_run(run, server) as found:
        yield found


def find_id(api: ApiClient, prefix: str) -> str:
    """Return the id of the run whose id is, or begins with, ``prefix``.

    Raises:
        Refused: no run or several runs match.
    """
    found = [each["id"] for each in api.runs(MATCHES_SHOWN + 1, id_prefix=prefix)]
    if prefix in found or not found:
        return str(api.run(prefix)["record"]["id"])  # refused if there is no such run
    if len(found) > 1:
        shown = ", ".join(found[:MATCHES_SHOWN]) + (", ..." if len(found) > MATCHES_SHOWN else "")
        raise Refused(404, f"several runs begin with {prefix}: {shown}; write more of the id")
    return str(found[0])


@dataclass(frozen=True, slots=True)
class ServiceRun:
    """A run of the service."""

    api: ApiClient
    run_id: str

    def view(self) -> dict[str, Any]:
        return self.api.run(self.run_id)

    def newest_metrics(self, steps: int) -> dict[str, float]:
        found = self.api.metrics(self.run_id, points=5000, first=max(0, steps - RECENT))
        row = {name: values[-1] for name, values in found["series"].items() if values}
        return {"step": found["steps"][-1], **_numbers(row)} if found["steps"] else {}

    def evaluations(self) -> list[dict[str, Any]]:
        return self.api.evaluations(self.run_id)

    def ledger(self) -> dict[str, int]:
        return self.api.ledger(self.run_id)

    def processes(self) -> list[dict[str, Any]]:
        return self.api.processes(self.run_id)

    def log_piece(self, process: str, most: int, offset: int | None = None) -> tuple[str, int]:
        return self.api.log_piece(self.run_id, process, most, offset)

    def events(self, limit: int) -> list[dict[str, Any]]:
        return self.api.events(self.run_id, limit, newest=True)

    def follow(self) -> Iterator[Event]:
        return self.api.follow(self.run_id)


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

    def log_piece(self, process: str, most: int, offset: int | None = None) -> tuple[str, int]:
        piece = read_log(self.folder.path, process, most, offset)
        if piece is None:
            names = ", ".join(file["process"] for file in self.processes())
            raise Refused(404, f"{self.folder.path} has no log of {process}; it has {names or 'no logs'}")
        return piece.text, piece.next

    def events(self, limit: int) -> list[dict[str, Any]]:
        return self.folder.read("events")[-limit:]

    def follow(self) -> Iterator[Event]:
        """Yield new rows of the folder's tables, and the state whenever it changes."""
        seen = {name: len(self.folder.read(name)) for name in TABLES}
        before = ""
        while True:
            for name in TABLES:
                rows = self.folder.read(name)
                new, seen[name] = rows[seen[name] :], len(rows)  # a resumed run has rewound its tables: fewer rows
                if new:
                    yield Event(name, {"rows" if name == "metrics" else "items": new})
            view = self.view()
            if (state := json.dumps([view["observed"], view["desired"]])) != before:
                before = state
                yield Event("observed", {key: view[key] for key in ("desired", "observed", "state")})
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
