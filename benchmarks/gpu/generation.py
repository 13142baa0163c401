"""An actor on a GPU: tokens per second by samples in flight, and weights that change while it generates."""

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import ray

from actors.config import ActorConfig, BroadcastReport, GenerateRequest
from actors.pool import ActorPool
from benchmarks.gpu.jobs import inputs, shape
from benchmarks.gpu.setting import Row, Setting
from benchmarks.local_ray import local_ray
from volley.job import ActorsSpec
from volley.model import ModelSpec
from volley.records import WeightBucket, WeightUpdate

PROMPT = 32  # tokens


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this section."""
    with local_ray(cpus=2):
        yield from asyncio.run(measure(setting))


async def measure(setting: Setting) -> list[Row]:
    """Start an actor, generate with it, change its weights, and stop it."""
    model, _ = inputs(setting)
    most = 8 if setting.small else 256
    config = ActorConfig(
        model=ModelSpec(path=model, dtype="bfloat16" if setting.cuda else "float32"),
        actors=ActorsSpec(gpus=float(setting.cuda), max_num_seqs=most, kv_cache_gb=0.2),
        max_model_len=PROMPT + shape(setting)["tokens"] + 1,
        seed=0,
        log_dir=setting.folder,
    )
    pool = await ActorPool.start(config)
    try:
        rows = [Row("generation", "start of the engine", f"{pool.infos[0].start_seconds:.1f} s")]
        for samples in (most // 8, most // 2, most):
            rows.append(
                Row("generation", f"{samples} samples in flight", f"{await speed(pool, setting, samples):.0f} tokens/s")
            )
        generating = asyncio.create_task(speed(pool, setting, most))
        await asyncio.sleep(0.1)
        report = await pool.broadcast(update_of(setting))
        await generating
        return [*rows, changed(report)]
    finally:
        await pool.stop()


async def speed(pool: ActorPool, setting: Setting, samples: int) -> float:
    """Tokens per second of one group of ``samples``, after one that warms up."""
    rng = np.random.default_rng(0)
    for _ in range(2):
        prompt_p = rng.integers(3, setting.vocabulary, PROMPT).astype(np.int32)
        begun = time.perf_counter()
        request = GenerateRequest(0, "p", prompt_p, samples, 1.0, 1.0, shape(setting)["tokens"])
        _, meta = await pool.generate(request)
    return float(meta.sample_tokens / (time.perf_counter() - begun))


def update_of(setting: Setting) -> WeightUpdate:
    """The weights of the model's files, in the object store."""
    files = [np.fromfile(file, dtype=np.uint8) for file in sorted(setting.model().glob("*.safetensors"))]
    return WeightUpdate(1, tuple(WeightBucket(ray.put((file,)), file.nbytes) for file in files), None, 0.0)


def changed(report: BroadcastReport) -> Row:
    """What the update of the only actor took."""
    (done,) = report.actors
    return Row(
        "generation",
        f"{done.nbytes / 2**20:.0f} MiB of weights changed while it generates",
        f"fetched in {done.fetch_seconds:.2f} s, loaded in {done.load_seconds:.2f} s, the engine stalled "
        f"{done.stall_seconds:.2f} s",
    )
