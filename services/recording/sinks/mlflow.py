"""MLflow: one MLflow run per Volley run; its id is kept in the run folder."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from services.recording.sinks.base import Memory, SinkRow, SinkRun, prefixed
from volley.sinks import MLflowSink

STATUSES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MAX_METRICS, MAX_PARAMS, MAX_PARAM_LENGTH = 1000, 100, 500  # limits of a server, per request
T = TypeVar("T")


class MLflow:
    """Metrics of steps are logged at their step, those of evaluations at the version; job keys become parameters."""

    def __init__(self, spec: MLflowSink, run: SinkRun, memory: Path) -> None:
        self._memory = Memory(memory)
        self._client = MlflowClient(tracking_uri=spec.tracking_uri or (run.folder / "mlruns").as_uri())
        if "run" in self._memory.about:
            self._id = self._memory.about["run"]
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._create(spec, run)

    def _create(self, spec: MLflowSink, run: SinkRun) -> str:
        experiment = self._client.get_experiment_by_name(spec.experiment)
        where = experiment.experiment_id if experiment else self._client.create_experiment(spec.experiment)
        created = self._client.create_run(where, run_name=run.id, tags={"volley.run": run.id})
        made = str(created.info.run_id)
        self._memory.about["run"] = made
        self._memory.save()
        params = [Param(name, text[:MAX_PARAM_LENGTH]) for name, text in flat(run.job)]
        for piece in pieces(params, MAX_PARAMS):
            self._client.log_batch(made, params=piece)
        return made

    def rewind(self, step: int) -> None:
        """MLflow keeps what was logged first."""

    def write(self, rows: Sequence[SinkRow]) -> None:
        unwritten = self._memory.unwritten(rows)
        metrics = [
            Metric(name, value, int(row.time * 1000), row.number)
            for row in unwritten
            for name, value in prefixed(row).items()
        ]
        for piece in pieces(metrics, MAX_METRICS):
            self._client.log_batch(self._id, metrics=piece, synchronous=True)
        self._memory.note(unwritten)

    def close(self, end: str) -> None:
        self._client.set_terminated(self._id, STATUSES[end])


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The tree's leaves under dotted names, without null and empty ones."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif value is not None and value != []:
            yield f"{prefix}{key}", str(value)


def pieces(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """``items`` in pieces of at most ``size``."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
