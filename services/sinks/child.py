"""The process of one sink: ``python -m services.sinks.child``, started and fed by `services.sinks.feed`.

Standard input: first ``{"spec", "run", "memory"}``, then ``{"rows": [...]}``, ``{"rewind": step}``, ``{"end": how}``.
What was standard output: a line for each of them, ``{}`` when it is done, ``{"problem": "..."}`` before the end.
The libraries may print: their output goes to standard error, which is the sink's log.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from services.sinks.base import Sink, SinkRow, SinkRun
from volley.sinks import SinkSpec

CLASSES = {"mlflow": "mlflow:MLflow", "tensorboard": "tensorboard:TensorBoard", "wandb": "wandb:Wandb"}
PR_SET_PDEATHSIG = 1
ORPHAN_SECONDS = 60  # to close in order when the run's process is gone
SETTINGS = {  # short waits, and nothing is told to anybody but the sink
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "WANDB_ERROR_REPORTING": "false",
}


def main() -> int:
    """The exit code: 1 after a problem, which was told."""
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(ORPHAN_SECONDS))  # whose default is the end of this process
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        _serve(answers)
    except Exception as error:  # noqa: BLE001 - a fault-tolerance point: the run goes on, another process tries again
        print(json.dumps({"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}), file=answers)
        return 1
    return 0


def _serve(answers: Any) -> None:
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
    """The sink of ``spec``; its library is imported here and nowhere else."""
    adapter: TypeAdapter[Any] = TypeAdapter(SinkSpec)
    checked = adapter.validate_python(spec)
    module, _, name = CLASSES[checked.kind].partition(":")
    opened = getattr(importlib.import_module(f"services.sinks.{module}"), name)
    sink: Sink = opened(checked, SinkRun(**{**run, "folder": Path(run["folder"])}), memory)
    return sink


if __name__ == "__main__":
    sys.exit(main())
