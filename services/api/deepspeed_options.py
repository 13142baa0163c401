"""DeepSpeed's options that a job over the API may set: numbers, and names of a few. Others take paths or code."""

from collections.abc import Iterator, Mapping
from typing import Any

_DTYPES = frozenset({"fp32", "fp16", "bf16", "bfp16"})
_DEVICES = frozenset({"cpu", "none"})
_NUMBERS: frozenset[str] = frozenset()  # no text: a number, true, false or null


def _numbers(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, _NUMBERS)


_OFFLOAD = {"device": _DEVICES, **_numbers("buffer_count", "buffer_size", "max_in_cpu", "pin_memory")}
_ZERO = {
    **_numbers("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "sub_group_size"),
    **_numbers("allgather_partitions", "allgather_bucket_size", "allgather_sequential", "overlap_comm"),
    **_numbers("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    **_numbers("max_live_parameters", "max_reuse_distance", "module_granularity_threshold"),
    **_numbers("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters"),
    **_numbers(
        "stage3_model_persistence_threshold", "stage3_max_reuse_distance", "stage3_module_granularity_threshold"
    ),
    **_numbers("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "round_robin_gradients"),
    **_numbers("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"),
    **_numbers("memory_efficient_linear", "log_trace_cache_warnings", "enable_sanity_checks"),
    "offload_param": _OFFLOAD,
    "offload_optimizer": {**_OFFLOAD, **_numbers("pipeline_read", "pipeline_write", "fast_init", "ratio")},
}
# A set holds the names that a leaf may have beside numbers.
DEEPSPEED_OPTIONS: Mapping[str, Any] = {
    **_numbers("gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "steps_per_print"),
    **_numbers("wall_clock_breakdown", "memory_breakdown", "disable_allgather", "dump_state"),
    "communication_data_type": _DTYPES,
    "data_types": {"grad_accum_dtype": _DTYPES},
    "zero_optimization": _ZERO,
    "bf16": _numbers("enabled", "immediate_grad_update", "check_grad_overflow"),
    "fp16": _numbers("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis")
    | _numbers("consecutive_hysteresis", "min_loss_scale"),
    "activation_checkpointing": _numbers("partition_activations", "cpu_checkpointing", "number_checkpoints")
    | _numbers("contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile"),
}


def not_taken(options: Any, pointer: str, known: Any = DEEPSPEED_OPTIONS) -> Iterator[tuple[str, str]]:
    """What of ``options`` is not known to be harmless: where it is, and what to write."""
    if not isinstance(known, Mapping):
        yield from _bad_leaf(options, pointer, known)
    elif not isinstance(options, Mapping):
        yield pointer, f"is to be a mapping with keys among {', '.join(sorted(known))}"
    else:
        for name, value in options.items():
            where = f"{pointer}/{name}"
            if name in known:
                yield from not_taken(value, where, known[name])
            else:
                yield where, "may name code or files; only a server whose setting allow_code holds * takes it"


def _bad_leaf(value: Any, pointer: str, names: frozenset[str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and value in names:
        return
    if value is not None and not isinstance(value, bool | int | float):
        also = f" or {', '.join(sorted(names))}" if names else ""
        yield pointer, f"is to be a number, true, false{also}; only a server whose allow_code holds * takes more"
