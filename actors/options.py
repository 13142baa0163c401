"""Turns a job's settings into vLLM's arguments."""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from actors.config import ActorConfig
from actors.weight_engine import BACKEND
from volley.errors import JobError

OWN_OPTIONS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "max_model_len": "sampling.max_tokens and the data",
    "max_num_seqs": "actors.max_num_seqs",
    "kv_cache_memory_bytes": "actors.kv_cache_gb",
}
FIXED_OPTIONS = frozenset(
    {"logprobs_mode", "skip_tokenizer_init", "weight_transfer_config", "worker_extension_cls", "data_parallel_size"}
)


def engine_args(config: ActorConfig, index: int) -> AsyncEngineArgs:
    """vLLM's arguments for actor ``index``: Volley's defaults, overridden by ``actors.engine``.

    Raises:
        JobError: ``actors.engine`` has an option that vLLM does not have, or that is set elsewhere.
    """
    spec = config.actors
    known = {field.name for field in fields(AsyncEngineArgs)}
    for option in spec.engine:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            raise JobError(
                f"actors.engine: vLLM has no option {option!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        if option in OWN_OPTIONS:
            raise JobError(f"actors.engine: {option!r} is set by {OWN_OPTIONS[option]}; remove it")
        if option in FIXED_OPTIONS:
            raise JobError(f"actors.engine: {option!r} is set by Volley and cannot be changed; remove it")
    options: dict[str, Any] = {
        "model": str(config.model.folder),
        "dtype": config.model.dtype,
        "seed": config.seed + index,
        "max_model_len": config.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": "actors.weight_engine.ServedWeights",
        "disable_log_stats": True,
        "generation_config": "vllm",
    }
    if spec.gpus == 0:
        options["enforce_eager"] = True
        # Only whole blocks are shared, and vLLM's own on CPUs has 128 tokens, more than many prompts: each of a group's
        # samples would compute its prompt. Its attention wants a multiple of 32.
        options["block_size"] = 32
    if spec.gpus < 1:  # on a part of a GPU vLLM would count what others take there while it measures
        options["kv_cache_memory_bytes"] = int(spec.kv_cache_gb * 2**30)
    if 0 < spec.gpus < 1:  # vLLM refuses to start unless this share of the GPU is free
        options["gpu_memory_utilization"] = spec.gpus
    if spec.gpus and config.sleeps:
        options["enable_sleep_mode"] = True
    options |= spec.engine
    overrides = options.get("hf_overrides", {})
    # As the learner's head is; on CPUs vLLM would convert all of it for every token.
    if spec.gpus and config.model.dtype == "bfloat16" and isinstance(overrides, dict):
        options["hf_overrides"] = {"head_dtype": "float32"} | overrides
    return AsyncEngineArgs(**options)
