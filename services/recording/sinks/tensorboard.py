"""TensorBoard: event files in two folders, ``train`` by step and ``evaluation`` by version."""

import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from services.recording.sinks.base import SinkRow, SinkRun
from volley.sinks import TensorBoardSink

QUEUE, FLUSH_SECONDS = 1000, 3600  # for the writer's own thread; every `write` flushes anyway


class TensorBoard:
    """When steps are done again, their new figures replace the old ones: TensorBoard purges outdated events."""

    def __init__(self, spec: TensorBoardSink, run: SinkRun, memory: Path) -> None:
        folder = run.folder / "tensorboard" if spec.path is None else spec.path / run.id
        self._writers = {
            "step": EventFileWriter(str(folder / "train"), QUEUE, FLUSH_SECONDS),
            "evaluation": EventFileWriter(str(folder / "evaluation"), QUEUE, FLUSH_SECONDS),
        }
        self.rewind(run.step)

    def rewind(self, step: int) -> None:
        start = SessionLog(status=SessionLog.START)
        # An evaluation of version s was made after s steps, so it is not made again.
        for kind, first in (("step", step), ("evaluation", step + 1 if step else 0)):
            self._writers[kind].add_event(Event(wall_time=time.time(), step=first, session_log=start))

    def write(self, rows: Sequence[SinkRow]) -> None:
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            event = Event(wall_time=row.time, step=row.number, summary=Summary(value=values))
            self._writers[row.kind].add_event(event)
        for writer in self._writers.values():
            writer.flush()

    def close(self, end: str) -> None:
        for writer in self._writers.values():
            writer.close()
