"""Checkpoints that resume to the bit, and what keeping states on the host costs."""

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.setting import GIB, WHOLE, Row, Setting, batch_of, engine_of, groups_of
from learner.batch import Packer
from learner.checkpoint import Snapshot, engine_files, load_engine
from learner.engine import Engine
from learner.reinforce import Reinforcer
from learner.weights import gathered
from volley.objectives import MaxAtK

BUCKET_BYTES = 64 << 20
OFFLOADS: dict[str, dict[str, Any]] = {
    "all states on the device": {},
    "AdamW's states on the host": {"offload_optimizer": {"device": "cpu"}},
    "AdamW's states and the weights on the host": {
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this section."""
    setting.join()
    for name, offload in OFFLOADS.items():
        config = setting.config(dtype="bfloat16", deepspeed={"zero_optimization": offload})
        engine = engine_of(config)
        yield _step(setting, engine, name)
        if not offload:
            yield _resumed(setting, engine)
        del engine
        gc.collect()


def _worker(setting: Setting, engine: Engine) -> Reinforcer:
    width = engine.module.lm.config.hidden_size
    return Reinforcer(WHOLE, engine, Packer(8192, width, allow_shared=False, device=engine.device))


def _take_step(setting: Setting, worker: Reinforcer, step: int) -> None:
    prompt, lengths = (16, (4, 9)) if setting.small else (256, (400, 601))
    worker.step(batch_of(*groups_of(setting, 2, n=4, prompt=prompt, lengths=lengths)), MaxAtK(k=2), step)


def _step(setting: Setting, engine: Engine, name: str) -> Row:
    worker = _worker(setting, engine)
    peak = setting.peak(lambda: _take_step(setting, worker, 0))
    seconds = setting.seconds(lambda: _take_step(setting, worker, 0), repeats=1)
    return Row("checkpoints", f"step of about 4,000 sample tokens, {name}", f"{seconds:.2f} s, peak {peak:.1f} GiB")


def _weights(engine: Engine) -> dict[str, torch.Tensor]:
    return gathered(list(engine.module.lm.named_parameters()), keep=True)


def _resumed(setting: Setting, engine: Engine) -> Row:
    """Save, take a step, load, take the step again: the weights must be the same to the bit."""
    worker, folder = _worker(setting, engine), setting.folder / "checkpoint"
    folder.mkdir()
    begun = time.perf_counter()
    snapshot = Snapshot()
    for file, parts in engine_files(engine, "policy", BUCKET_BYTES, rank=0, ranks=1):
        snapshot.add(file, parts)
    copied = time.perf_counter() - begun
    if problem := snapshot.write(folder):
        raise OSError(problem)
    written = time.perf_counter() - begun - copied
    _take_step(setting, worker, 1)
    first = _weights(engine)
    begun = time.perf_counter()
    load_engine(engine, "policy", folder, rank=0, ranks=1)
    loaded = time.perf_counter() - begun
    _take_step(setting, worker, 1)
    again = _weights(engine)
    same = sum(torch.equal(first[name], again[name]) for name in first)
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    return Row(
        "checkpoints",
        "the step after a checkpoint, repeated after loading it",
        f"{same} of {len(first)} tensors equal to the bit; {nbytes / GIB:.1f} GiB copied in {copied:.1f} s, "
        f"written in {written:.1f} s, loaded in {loaded:.1f} s",
    )
