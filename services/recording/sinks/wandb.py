"""Weights & Biases: one W&B run per Volley run, under the same id."""

import os
from collections.abc import Sequence
from pathlib import Path

import wandb

from services.recording.sinks.base import Memory, SinkRow, SinkRun, prefixed
from volley.sinks import WandbSink

EXIT_CODES = {"done": 0, "stopped": 130, "failed": 1}
AXES = {"step": "step", "evaluation": "evaluation/version"}


class Wandb:
    """Metrics of steps are plotted over ``step``, those of evaluations over ``evaluation/version``."""

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
            # This process serves the sink only: its output, code and load say nothing about the run.
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
            ),
        )

    def rewind(self, step: int) -> None:
        """W&B keeps what was logged first."""

    def write(self, rows: Sequence[SinkRow]) -> None:
        unwritten = self._memory.unwritten(rows)
        for row in unwritten:
            values, axis = prefixed(row), AXES[row.kind]
            for name in values.keys() - self._known:
                self._run.define_metric(name, step_metric=axis)
            self._known |= values.keys()
            self._run.log({**values, axis: row.number})
        self._memory.note(unwritten)

    def close(self, end: str) -> None:
        self._run.finish(exit_code=EXIT_CODES[end])
