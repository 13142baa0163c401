"""The DeepSpeed options that jobs sent to the API may set: numbers and a few names. Others take paths or code."""

from collections.abc import Iterator, Mapping

# Allowed values by option: nested options, or the names that are allowed besides numbers, true, false and null.
Allowed = Mapping[str, "Allowed"] | frozenset[str]

_DTYPES = frozenset({"fp32", "fp16", "bf16", "bfp16"})
_DEVICES = frozenset({"cpu", "none"})
_NUMBERS: frozenset[str] = frozenset()


def _numbers(*names: str) -> dict[str, Allowed]:
    return dict.fromkeys(names, _NUMBERS)


_OFFLOAD: dict[str, Allowed] = {
    "device": _DEVICES,
    **_numbers("buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
}
_ZERO: dict[str, Allowed] = {
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
DEEPSPEED_OPTIONS: Mapping[str, Allowed] = {
    **_numbers("prescale_gradients", "gradient_predivide_factor", "steps_per_print"),
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


def rejected_options(options: object, pointer: str, allowed: Allowed = DEEPSPEED_OPTIONS) -> Iterator[tuple[str, str]]:
    """Yield the JSON pointer of every option that is not known to be harmless, and what is wrong with it."""
    if not isinstance(allowed, Mapping):
        yield from _rejected_value(options, pointer, allowed)
    elif not isinstance(options, Mapping):
        yield pointer, f"must be a mapping with keys among {', '.join(sorted(allowed))}"
    else:
        for name, value in options.items():
            where = f"{pointer}/{name}"
            if name in allowed:
                yield from rejected_options(value, where, allowed[name])
            else:
                yield where, "may name code or files; only a server whose setting allow_code contains * accepts it"


def _rejected_value(value: object, pointer: str, names: frozenset[str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and value in names:
        return
    if value is not None and not isinstance(value, bool | int | float):
        also = f" or {', '.join(sorted(names))}" if names else ""
        yield pointer, f"must be a number, true, false{also}; only a server whose allow_code contains * accepts more"
