"""Weights & Biases: one run of theirs for one of ours, under the same id."""

import os
from collections.abc import Sequence
from pathlib import Path

import wandb

from services.sinks.base import Memory, SinkRow, SinkRun, prefixed
from volley.sinks import WandbSink

EXIT_CODES = {"done": 0, "stopped": 130, "failed": 1}
AXES = {"step": "step", "evaluation": "evaluation/version"}


class Wandb:
    """Metrics of steps are drawn over ``step``, those of evaluations over ``evaluation/version``."""

    def __init__(self, spec: WandbSink, run: SinkRun, memory: Path) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._memory = Memory(memory)
        self._known: set[str] = set()
        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            group=spec.group,
            tags=spec.tags,
            mode=spec.mode,
            id=run.id,
            name=run.id,
            resume="allow",
            dir=run.folder,
            config=dict(run.job),
            # This process is the sink's own: its output, its code and its load say nothing of the run.
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
            ),
        )

    def rewind(self, step: int) -> None:
        """What was logged stays as it was."""

    def write(self, rows: Sequence[SinkRow]) -> None:
        fresh = self._memory.fresh(rows)
        for row in fresh:
            values, axis = prefixed(row), AXES[row.kind]
            for name in values.keys() - self._known:
                self._run.define_metric(name, step_metric=axis)
            self._known |= values.keys()
            self._run.log({**values, axis: row.number})
        self._memory.note(fresh)

    def close(self, end: str) -> None:
        self._run.finish(exit_code=EXIT_CODES[end])
