"""The process of one sink: ``python -m services.recording.sinks.child``, started and fed by `.process`.

Standard input has one JSON message per line: first ``{"spec", "run", "memory"}``, then any number of
``{"rows": [...]}`` and ``{"rewind": step}``, at last ``{"end": how}``. Standard output has one line per message: ``{}``
when it was handled, or ``{"problem": "..."}`` before the process ends. What the sink's library prints goes to standard
error, which is the sink's log.
"""

import importlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from pydantic import TypeAdapter

from services.recording.sinks.base import Sink, SinkRow, SinkRun
from volley.processes import die_with_parent, take_stdout
from volley.sinks import MLflowSink, SinkSpec, TensorBoardSink, WandbSink

CLASSES = {"mlflow": "mlflow:MLflow", "tensorboard": "tensorboard:TensorBoard", "wandb": "wandb:Wandb"}
ORPHAN_SECONDS = 60  # to close properly after the run's process has died
SETTINGS = {  # short waits and no telemetry
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "WANDB_ERROR_REPORTING": "false",
}


def main() -> int:
    """Serve the sink; return the exit code, which is 1 after a problem that was reported to the run."""
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(ORPHAN_SECONDS))  # SIGALRM ends this process
    die_with_parent(signal.SIGTERM)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    answers = take_stdout()
    try:
        _serve(answers)
    except Exception as error:  # noqa: BLE001 - reported to the run, which tries again with another process
        print(json.dumps({"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}), file=answers)
        return 1
    return 0


def _serve(answers: TextIO) -> None:
    opening = json.loads(sys.stdin.readline())
    sink = open_sink(opening["spec"], opening["run"], Path(opening["memory"]))
    print("{}", file=answers)
    for line in sys.stdin:
        message = json.loads(line)
        if "rows" in message:
            sink.write([SinkRow(**row) for row in message["rows"]])
        elif "rewind" in message:
            sink.rewind(message["rewind"])
        else:
            sink.close(message["end"])
            print("{}", file=answers)
            return
        print("{}", file=answers)
    sink.close("failed")


def open_sink(spec: Mapping[str, Any], run: Mapping[str, Any], memory: Path) -> Sink:
    """Open the sink that ``spec`` describes. Its library is imported here and nowhere else."""
    adapter: TypeAdapter[MLflowSink | TensorBoardSink | WandbSink] = TypeAdapter(SinkSpec)
    checked = adapter.validate_python(spec)
    module, _, name = CLASSES[checked.kind].partition(":")
    opened = getattr(importlib.import_module(f"services.recording.sinks.{module}"), name)
    sink: Sink = opened(checked, SinkRun(**{**run, "folder": Path(run["folder"])}), memory)
    return sink


if __name__ == "__main__":
    sys.exit(main())
