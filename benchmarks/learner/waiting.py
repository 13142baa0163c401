"""What the learner waits for between its steps: publishing a version, and a checkpoint, at once or in the background.

    python -m benchmarks.learner.waiting [--model 135M] [--ranks 1] [--rounds 3] [--dtype float32] [--lora RANK]
                                         [--kinds publish at-once background] [--without-steps] [--folder FOLDER]

A random Llama with AdamW's moments, on CPU. Each row begins one of the three between two supervised steps, as a run
does, and says how long the learner waited, when it was stored, and how much longer the next step took.
"""

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.local_ray import local_ray
from benchmarks.objectives.report import print_table
from learner.config import LearnerConfig
from learner.pool import LearnerPool
from learner.records import SFTRow
from volley.lora import LoraSpec
from volley.model import ModelSpec
from volley.update import LearnerSpec, Optimizer

VOCABULARY = 49_152
# width, feed-forward width, layers, heads, key-value heads; the second is that of SmolLM2-135M
SHAPES = {"3M": (48, 128, 6, 6, 2), "135M": (576, 1536, 30, 9, 3), "1B": (2048, 5632, 20, 32, 8)}
ROWS, HALF = 8, 64  # of a step, and half the tokens of a row
KINDS = {"publish": "publish", "at-once": "checkpoint, at once", "background": "checkpoint, in the background"}
Step = Callable[[LearnerPool], Awaitable[None]]


@dataclass(slots=True)
class Kind:
    """One thing to wait for.

    Attributes:
        begin: returns when the next step may begin.
        end: returns when it is stored.
        waited, stored, alone, beside: seconds, one per round.
        nbytes: size of the checkpoint that it wrote.
    """

    begin: Callable[[], Awaitable[object]]
    end: Callable[[], Awaitable[object]]
    waited: list[float] = field(default_factory=list)
    stored: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    nbytes: int = 0

    async def measure(self, step: Callable[[], Awaitable[object]] | None) -> None:
        """Take a step, begin, and take another step while it is stored; without ``step``, begin and wait."""
        if step is not None:
            self.alone.append(await seconds(step()))
        begun = time.perf_counter()
        await self.begin()
        self.waited.append(time.perf_counter() - begun)
        beside = asyncio.ensure_future(seconds(step())) if step is not None else None
        await self.end()
        self.stored.append(time.perf_counter() - begun)
        if beside is not None:
            self.beside.append(await beside)

    def row(self) -> list[str]:
        if not self.alone:
            return ["", shown(self.waited), "", shown(self.stored), ""]
        share = statistics.median(self.waited) / statistics.median(self.alone)
        longer = statistics.median(after / before for after, before in zip(self.beside, self.alone, strict=True))
        return [shown(self.alone), shown(self.waited), f"{share:.1%}", shown(self.stored), f"{longer:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="135M")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank only")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="those whose memory suffices")
    parser.add_argument("--without-steps", action="store_true", help="take none, where their memory does not suffice")
    parser.add_argument("--folder", type=Path, help="on the disk for checkpoints; without it, that of temporary files")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: write 1 at least")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, local_ray(cpus=args.ranks, store_bytes=6 << 30):
        write_model(Path(folder) / "model", args.model)
        config = configuration(Path(folder), args.dtype, args.ranks, args.lora)
        step = None if args.without_steps else supervised_step
        kinds = asyncio.run(measure(config, args.rounds, step, args.kinds))
    print_kinds(f"{args.model}, {args.ranks} rank(s)", kinds)


def write_model(folder: Path, name: str) -> None:
    """Write a random model, in a separate process, which gives its memory back."""
    width, inner, layers, heads, kv_heads = SHAPES[name]
    code = (
        "import sys; from pathlib import Path; from tests.models import tiny_llama; tiny_llama(Path(sys.argv[1]), "
        f"vocab_size={VOCABULARY}, hidden_size={width}, intermediate_size={inner}, num_hidden_layers={layers}, "
        f"num_attention_heads={heads}, num_key_value_heads={kv_heads}, tie_word_embeddings=True, "
        "initializer_range=0.02)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True)


def configuration(
    folder: Path, dtype: Literal["float32", "bfloat16"], ranks: int, lora: int | None = None
) -> LearnerConfig:
    """The configuration of a learner that keeps everything in ``folder``, where its model is."""
    spec = LearnerSpec(ranks=ranks, tokens_per_micro_batch=512)
    adapters = None if lora is None else LoraSpec(rank=lora)
    model = ModelSpec(path=folder / "model", dtype=dtype, lora=adapters)
    return LearnerConfig(model, spec, Optimizer(lr=1e-6), 1, 0, folder)


async def measure(config: LearnerConfig, rounds: int, step: Step | None, names: Collection[str]) -> dict[str, Kind]:
    """Measure each of the kinds ``names`` of waiting in turn, ``rounds`` times."""
    learner = await LearnerPool.start(config)
    checkpoint = config.log_dir / "checkpoint"
    every = {
        "publish": Kind(lambda: learner.begin_publish(1), lambda: learner.published(1)),
        "at-once": Kind(lambda: learner.begin_save(checkpoint, {}, background=False), learner.saved),
        "background": Kind(lambda: learner.begin_save(checkpoint, {}), learner.saved),
    }
    kinds = {KINDS[name]: kind for name, kind in every.items() if name in names}
    try:
        take = None if step is None else partial(step, learner)
        if take is not None:
            await take()
        for _ in range(rounds):
            for kind in kinds.values():
                await kind.measure(take)
                if checkpoint.exists():
                    kind.nbytes = sum(file.stat().st_size for file in checkpoint.iterdir())
                    shutil.rmtree(checkpoint)
    finally:
        await learner.stop()
    return kinds


def print_kinds(what: str, kinds: Mapping[str, Kind]) -> None:
    """Print a row per kind, and the size of a checkpoint."""
    header = (
        "a step alone, s",
        "the learner waits, s",
        f"of a step of {ROWS * 2 * HALF} tokens",
        "stored after, s",
        "next step, times",
    )
    print_table([what, *header], [[name, *kind.row()] for name, kind in kinds.items()])
    if size := max(kind.nbytes for kind in kinds.values()):
        print(f"The checkpoint has {size / 2**20:,.1f} MiB.")


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


async def seconds(work: Awaitable[object]) -> float:
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun


async def supervised_step(learner: LearnerPool) -> None:
    rng = np.random.default_rng(0)
    rows = [SFTRow(*rng.integers(3, VOCABULARY, (2, HALF)).astype(np.int32)) for _ in range(ROWS)]
    await learner.sft_step(rows)


if __name__ == "__main__":
    main()
