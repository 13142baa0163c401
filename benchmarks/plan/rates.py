"""Measures what a CPU can do, without the stages that are predicted from it.

Matmuls, reading and copying are measured with plain tensors; the matmuls of an engine with more weights than the
processor's cache holds, as few rows do not hide that they are read. Overheads are measured with models so small that
hardly anything else takes time: two that differ in their number of layers only, in a learner rank and in an engine.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import psutil

from benchmarks.plan.measured import Generated, Learned, generate, in_own_process, learn
from benchmarks.plan.models import Work, make
from volley.plan.machine import GIB, Device

FEW, MANY = 2, 10  # layers of the small models
SMALL = (32, 32, 1, 1)  # their hidden size, feed-forward size, heads, key-value heads
LONE, CROWD = 2, 32  # samples at once
ROWS, FEW_ROWS = 1024, 32  # of the matmuls of training, and of an engine
UNCACHED = 48  # matrices of 2.75 MiB
COPIED = 64 << 20
CACHE_BLOCK = 32  # as `actors.options` sets on CPUs


def measure_device(folder: Path, work: Work) -> Device:
    """Describe one process of this machine, with one thread."""
    plain = in_own_process(plain_rates, work.turns)
    alone = replace(work, groups=2, n=CROWD // 2)
    engines: dict[int, Generated] = {}
    learners: dict[int, Learned] = {}
    hidden, inner, heads, kv_heads = SMALL
    for layers in (FEW, MANY):
        model = make(folder / f"overhead-{layers}", (hidden, inner, layers, heads, kv_heads))
        engines[layers] = in_own_process(generate, model, alone, folder, (LONE, CROWD))
        learners[layers] = in_own_process(learn, model, replace(work, groups=1, n=2, tokens=4), folder)
    return _device(plain, engines, learners)


def _device(plain: dict[str, float], engines: dict[int, Generated], learners: dict[int, Learned]) -> Device:
    few, many = engines[FEW], engines[MANY]
    by_sample = {layers: (each.steps[CROWD] - each.steps[LONE]) / (CROWD - LONE) for layers, each in engines.items()}
    per_sample_layer = max(0.0, (by_sample[MANY] - by_sample[FEW]) / (MANY - FEW))
    per_sample = max(0.0, by_sample[FEW] - FEW * per_sample_layer)
    per_layer = max(0.0, (many.steps[LONE] - few.steps[LONE]) / (MANY - FEW) - LONE * per_sample_layer)
    per_step = max(0.0, few.steps[LONE] - FEW * (per_layer + LONE * per_sample_layer) - LONE * per_sample)
    publishing = {layers: engines[layers].load + learners[layers].store for layers in (FEW, MANY)}
    loading = max(0.0, (publishing[MANY] - publishing[FEW]) / (MANY - FEW))
    training = max(0.0, (learners[MANY].step - learners[FEW].step) / (MANY - FEW))
    return Device(
        name="one CPU thread",
        memory_gib=psutil.virtual_memory().total / GIB,
        tflops=plain["flops"] / 1e12,
        memory_gb_s=plain["reading"] / 1e9,
        host_gb_s=plain["copying"] / 1e9,
        link_gb_s=plain["copying"] / 1e9,
        train_share=1.0,
        prefill_share=min(1.0, plain["flops_few_rows"] / plain["flops"]),
        decode_share=1.0,
        write_gb_s=plain["copying"] / 1e9,
        update_us=1e6 * max(0.0, learners[FEW].step - FEW * training),
        train_layer_us=1e6 * training,
        decode_layer_us=1e6 * per_layer,
        step_us=1e6 * per_step,
        sample_us=1e6 * per_sample,
        sample_layer_us=1e6 * per_sample_layer,
        publish_us=1e6 * max(0.0, publishing[FEW] - FEW * loading),
        publish_layer_us=1e6 * loading,
        load_copies=3,  # to the engine's process, into its layers, into the layout of its matmuls
        cache_block=CACHE_BLOCK,
        gpu=False,
    )


def plain_rates(turns: int) -> dict[str, float]:
    """FLOP/s of matmuls with many and few rows, bytes per second of reading and of copying to new memory."""
    import numpy as np
    import torch

    from learner.linear import product

    torch.set_num_threads(1)
    weights = [torch.randn(1408, 512) for _ in range(UNCACHED)]
    many_TI, few_TI = torch.randn(ROWS, 512), torch.randn(FEW_ROWS, 512)
    matrix, vector = torch.randn(4096, 8192), torch.randn(8192)
    source = np.ones(COPIED, np.uint8)
    flops = 2 * weights[0].numel()

    def uncached() -> None:
        for weight_OI in weights:
            product(few_TI, weight_OI)

    return {
        "flops": ROWS * flops / _seconds(lambda: product(many_TI, weights[0]), 4 * turns),
        "flops_few_rows": UNCACHED * FEW_ROWS * flops / _seconds(uncached, turns),
        "reading": 4 * matrix.numel() / _seconds(lambda: matrix @ vector, 4 * turns),
        "copying": COPIED / _seconds(lambda: source.copy(), 4 * turns),
    }


def _seconds(call: Callable[[], object], turns: int) -> float:
    """Median CPU time over ``turns``, after a warm-up; other load on the machine changes it little."""
    found = []
    for _ in range(turns + 1):
        begun = time.process_time()
        call()
        found.append(time.process_time() - begun)
    return median(found[1:])
