"""The environment of an actor's process and its engine's, which must be set before vLLM is imported."""

import os
import tempfile
from pathlib import Path

from volley.job import ActorsSpec
from volley.processes import redirect_output
from volley.scratch import own


def engine_environment(spec: ActorsSpec) -> dict[str, str]:
    """Environment variables of one actor: its threads, no telemetry, no vLLM plug-ins but ours, quiet logs."""
    variables = {
        "VLLM_PLUGINS": "volley",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
        "OMP_NUM_THREADS": str(spec.threads),
    }
    if spec.gpus == 0:
        # vLLM would pin every engine of the machine to the same first cores; the kernel's scheduler does better.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Keeps the model in the engine's process: a third process takes seconds to start and adds a hop per step.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # vLLM compiles the counting of log-prob ranks even in eager mode, which delays the first sample by seconds.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    else:
        # FlashInfer's sampler returns no log-probs of what it draws, so vLLM would load it and never call it.
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return variables


def enter(spec: ActorsSpec, log: Path, scratch: Path) -> int:
    """Apply the environment to this process, and append its output and its children's to ``log``.

    vLLM leaves sockets and rendezvous files behind. They go to ``scratch``, which the caller removes; if it is killed,
    the next owner of a scratch folder does.

    Returns:
        The descriptor that `volley.scratch.own` returns.
    """
    lock = own(scratch)
    tempfile.tempdir = str(scratch)
    os.environ |= engine_environment(spec) | {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
    redirect_output(log)
    return lock
