"""Tokens per second, share of the device's own matrix rate, and peak memory of training steps."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.setting import SHAPES, WHOLE, Row, Setting, batch_of, engine_of, groups_of
from learner.batch import Packer, RankBatch
from learner.engine import Engine
from learner.policy import checkpoint_layers
from learner.reinforce import Reinforcer
from volley.lora import LoraSpec
from volley.objectives import MaxAtK


@dataclass(frozen=True, slots=True)
class Load:
    """A batch: ``groups`` prompts of ``prompt`` tokens, ``n`` samples each of a length in the half-open range."""

    groups: int
    n: int
    prompt: int
    lengths: tuple[int, int]


LOADS = {
    "short": Load(8, 16, 512, (64, 193)),
    "reasoning": Load(4, 8, 256, (1024, 3073)),
    "one long row": Load(1, 2, 256, (32_000, 32_256)),
}
SMALL = {"short": Load(2, 4, 16, (4, 9))}


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this section."""
    setting.join()
    rate = matrix_rate(setting)
    yield Row("throughput", "large matrix product in bfloat16", f"{rate / 1e12:.1f} TFLOP/s")
    loads = SMALL if setting.small else LOADS
    engine = engine_of(setting.config(dtype="bfloat16"))
    for name in [each for each in ("short", "reasoning") if each in loads]:
        for shared, budget in (
            (False, 4096),
            (False, 8192),
            (False, 16_384),
            (False, 32_768),
            (True, 8192),
            (True, 16_384),
        ):
            yield measured(setting, engine, name, loads[name], shared=shared, budget=budget, rate=rate)
    checkpoint_layers(engine.module.lm)
    for name, budget in (("reasoning", 16_384), ("reasoning", 65_536), ("one long row", 16_384)):
        if name in loads:
            yield measured(
                setting, engine, name, loads[name], shared=False, budget=budget, rate=rate, note=", checkpointed"
            )
    del engine
    if setting.cuda:
        yield from _adapters(setting, rate)


def _adapters(setting: Setting, rate: float) -> Iterator[Row]:
    """Adapters on a 7B model: what fits a single device without sharding."""
    torch.cuda.empty_cache()
    large = replace(setting, size="7B")
    engine = engine_of(large.config(dtype="bfloat16", lora=LoraSpec()), checkpointed=True)
    yield measured(
        large, engine, "reasoning", LOADS["reasoning"], shared=False, budget=16_384, rate=rate, note=", 7B, LoRA"
    )


def matrix_rate(setting: Setting) -> float:
    """FLOP/s of a large bfloat16 product of random matrices."""
    side = 256 if setting.small else 8192
    left, right = (torch.randn(side, side, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 * 10 / setting.seconds(lambda: [left @ right for _ in range(10)])


def measured(
    setting: Setting, engine: Engine, name: str, load: Load, *, shared: bool, budget: int, rate: float, note: str = ""
) -> Row:
    """Time one step on ``load``; a step that does not fit the device says so."""
    batch = batch_of(*groups_of(setting, load.groups, n=load.n, prompt=load.prompt, lengths=load.lengths))
    worker = Reinforcer(WHOLE, engine, Packer(budget, SHAPES[setting.size][0], shared, engine.device))
    layout = "shared" if shared else "flat"
    what = f"{name}: {layout}, {budget} tokens per micro-batch{note}"
    try:
        peak = setting.peak(lambda: worker.step(batch, MaxAtK(k=2), 0))
        seconds = setting.seconds(lambda: worker.step(batch, MaxAtK(k=2), 0), repeats=2)
    except torch.OutOfMemoryError:
        engine.zero.zero_grad()
        torch.cuda.empty_cache()
        return Row("throughput", what, "does not fit the device")
    share = useful_flops(setting.size, batch) / seconds / rate
    figure = (
        f"{batch.tokens / seconds:,.0f} sample tokens/s, {100 * share:.0f} % of the matrix rate, peak {peak:.1f} GiB"
    )
    return Row("throughput", what, figure)


def useful_flops(size: str, batch: RankBatch) -> float:
    """FLOPs of a forward and a backward pass over each sample behind its prompt, however it is laid out.

    Per token 6 for each weight that multiplies it, and ``12 L H`` for each token it attends to, half a row on average;
    the output embedding counts for sample tokens only.
    """
    width, inner, layers, heads, pairs, vocabulary, _ = SHAPES[size]
    kept = 2 * width * width + 2 * width * width * pairs // heads + 3 * width * inner
    total = 6.0 * batch.tokens * width * vocabulary
    for group in batch.groups:
        for length in group.lengths_n:
            row = len(group.prompt_p) + int(length)
            total += 6.0 * row * layers * kept + 6.0 * layers * width * row * row
    return total
