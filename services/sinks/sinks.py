"""All sinks of a run: checked before it starts, fed while it goes on, closed with it."""

import asyncio
import importlib.util
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from services.context import RunStopped
from services.job_file import Job
from services.run_folder import RunFolder
from services.sinks.base import evaluation_row, step_row
from services.sinks.feed import Feed, Report
from volley.errors import JobError
from volley.sinks import SinkSpec

CLOSE_SECONDS = 30.0  # for what is left; a run that was stopped or failed waits a third of it
PACKAGES = {"mlflow": "mlflow-skinny", "tensorboard": "tensorboard", "wandb": "wandb"}


def check_sinks(specs: Sequence[SinkSpec]) -> None:
    """Raise `JobError` where a sink's package is not installed."""
    for spec in specs:
        if importlib.util.find_spec(spec.kind) is None:
            raise JobError(
                f"sinks: {spec.kind} needs a package that is not installed: pip install 'volley-rl[sinks]' "
                f"or {PACKAGES[spec.kind]}"
            )


class Sinks:
    """What a run tells of its steps and evaluations goes to each of the job's sinks. Use as a block.

    Args:
        report: told of a sink that fails, once for each.
    """

    def __init__(self, job: Job, folder: RunFolder, report: Report) -> None:
        self._report = report
        names = [spec.kind for spec in job.sinks]
        self._feeds = []
        for i, spec in enumerate(job.sinks):
            name = spec.kind if names.count(spec.kind) == 1 else f"{spec.kind}-{names[:i].count(spec.kind)}"
            opening = {
                "spec": spec.model_dump(mode="json"),
                "run": {"id": folder.run_id, "name": job.name, "folder": str(folder.path), "job": _told(job)},
                "memory": str(folder.path / "sinks" / f"{name}.json"),
            }
            self._feeds.append(Feed(name, opening, folder.logs / f"sink-{name}.log", report))

    def begin(self, step: int) -> None:
        """The steps from ``step`` on are about to be written, some of them perhaps again."""
        for feed in self._feeds:
            feed.rewind(step)

    def step(self, row: Mapping[str, Any]) -> None:
        """A row of ``metrics.jsonl``."""
        for feed in self._feeds:
            feed.put(step_row(row))

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """A row of ``evaluations.jsonl``."""
        for feed in self._feeds:
            feed.put(evaluation_row(row, time.time()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, RunStopped | asyncio.CancelledError)
        end = "done" if error is None else "stopped" if stopped else "failed"
        seconds = CLOSE_SECONDS if error is None else CLOSE_SECONDS / 3
        await asyncio.gather(*(feed.close(end, seconds) for feed in self._feeds))
        for feed in self._feeds:
            if feed.lost:
                await self._report(f"sink {feed.name}: {feed.lost} rows did not get there; the run folder has them")


def _told(job: Job) -> dict[str, Any]:
    """The job, without what may hold settings of the user's own code."""
    return job.model_dump(mode="json", exclude={"runtime_env", "sinks"})
