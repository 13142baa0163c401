"""All sinks of a run: checked before it starts, fed while it runs, closed when it ends."""

import asyncio
import importlib.util
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from services.jobs.job_file import Job
from services.recording.sinks.base import evaluation_row, step_row
from services.recording.sinks.process import Report, SinkProcess
from services.store.folder import RunFolder
from volley.errors import JobError, RunStopped
from volley.sinks import SinkSpec

CLOSE_SECONDS = 30.0  # for the last rows; a run that was stopped or has failed waits a third of it
PACKAGES = {"mlflow": "mlflow-skinny", "tensorboard": "tensorboard", "wandb": "wandb"}


def check_sinks(specs: Sequence[SinkSpec]) -> None:
    """Raise `JobError` if a sink's package is not installed."""
    for spec in specs:
        if importlib.util.find_spec(spec.kind) is None:
            raise JobError(
                f"sinks: {spec.kind} needs a package that is not installed: pip install 'volley-rl[sinks]' "
                f"or {PACKAGES[spec.kind]}"
            )


class Sinks:
    """Passes a run's rows on to each of the job's sinks. Used as an async context manager.

    Args:
        report: awaited with the problem once for each sink that fails, and once for each that loses rows.
    """

    def __init__(self, job: Job, folder: RunFolder, report: Report) -> None:
        self._report = report
        names = [spec.kind for spec in job.sinks]
        self._processes = []
        for i, spec in enumerate(job.sinks):
            name = spec.kind if names.count(spec.kind) == 1 else f"{spec.kind}-{names[:i].count(spec.kind)}"
            opening = {
                "spec": spec.model_dump(mode="json"),
                "run": {"id": folder.run_id, "name": job.name, "folder": str(folder.path), "job": _public(job)},
                "memory": str(folder.path / "sinks" / f"{name}.json"),
            }
            self._processes.append(SinkProcess(name, opening, folder.logs / f"sink-{name}.log", report))

    def begin(self, step: int) -> None:
        """Expect the rows of ``step`` and later steps next, some of them perhaps for a second time."""
        for process in self._processes:
            process.rewind(step)

    def step(self, row: Mapping[str, Any]) -> None:
        """Pass on a row of ``metrics.jsonl``."""
        for process in self._processes:
            process.put(step_row(row))

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Pass on a row of ``evaluations.jsonl``."""
        for process in self._processes:
            process.put(evaluation_row(row, time.time()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, RunStopped | asyncio.CancelledError)
        end = "done" if error is None else "stopped" if stopped else "failed"
        seconds = CLOSE_SECONDS if error is None else CLOSE_SECONDS / 3
        await asyncio.gather(*(process.close(end, seconds) for process in self._processes))
        for process in self._processes:
            if process.lost:
                await self._report(
                    f"sink {process.name}: {process.lost} rows were not delivered; the run folder has them"
                )


def _public(job: Job) -> dict[str, Any]:
    """The job as JSON, without the parts that may hold secrets of the user's own code or accounts."""
    return job.model_dump(mode="json", exclude={"runtime_env", "sinks", "notify"})
