"""The environment an actor's process and its engine's live in, set before vLLM is imported."""

import os
import sys
import tempfile
from pathlib import Path

from volley.job import ActorsSpec
from volley.scratch import own


def engine_environment(spec: ActorsSpec) -> dict[str, str]:
    """Variables for one actor: threads where the job says, no telemetry, no plug-ins but ours, quiet."""
    variables = {
        "VLLM_PLUGINS": "volley",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "OMP_NUM_THREADS": str(spec.threads),
    }
    if spec.gpus == 0:
        # vLLM would pin every engine of the machine to the same first cores; the kernel's scheduler does better.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Keeps the model in the engine's own process: a third process costs seconds to start and a hop per step.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Runs eagerly what vLLM compiles even so: counting ranks, which costs seconds at the first sample.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    return variables


def enter(spec: ActorsSpec, log: Path, scratch: Path) -> int:
    """Apply the environment to this process and send its output, and its children's, to the end of ``log``.

    vLLM leaves its sockets and rendezvous files behind: they go to ``scratch``, for the caller to remove, or for who
    comes next where the caller is killed; see `volley.scratch.own`, whose result this returns.
    """
    lock = own(scratch)
    tempfile.tempdir = str(scratch)
    os.environ |= engine_environment(spec) | {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    return lock


def last_lines(log: Path, count: int = 20) -> str:
    """The end of ``log``; empty where it can not be read, as on another machine."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 1024 * count))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:])
