"""Size of a new version, and seconds until the actor has it: for a whole model, and for its adapters alone.

    python -m benchmarks.broadcast.lora [--sizes 3M 100M] [--rank 16] [--rounds 5]

One learner rank under ZeRO-3 and one actor with a vLLM engine; random Llama-shaped models in float32, with adapters on
every linear layer of the blocks. ``fetch`` is the time in which the actor receives the version and adds adapters to
the model's matrices while it keeps generating; generation stops for ``stall``. All figures are medians; the first
round is not counted.
"""

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from actors.config import ActorConfig
from actors.pool import ActorPool
from benchmarks.broadcast.parts import SHAPES, shape_of
from benchmarks.local_ray import local_ray
from benchmarks.objectives.report import print_table
from learner.config import LearnerConfig
from learner.pool import LearnerPool
from tests.models import tiny_llama
from volley.job import ActorsSpec
from volley.lora import LoraSpec
from volley.model import ModelSpec
from volley.update import LearnerSpec, Optimizer


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds; seconds and bytes."""

    size: str
    rank: int | None
    nbytes: float
    publish: float
    fetch: float
    stall: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["3M", "100M"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = [row for size in options.sizes for row in asyncio.run(measure(size, options.rank, options.rounds))]
    print_table(
        ["size", "sent", "MB", "publish s", "fetch s", "stall s", "all s"],
        [
            [
                row.size, f"adapters of rank {row.rank}" if row.rank else "the model", f"{row.nbytes / 1e6:.2f}",
                row.publish, row.fetch, row.stall, row.publish + row.fetch + row.stall,
            ]
            for row in rows
        ],
    )  # fmt: skip
    for whole, adapters in zip(rows[::2], rows[1::2], strict=True):
        print(f"{whole.size}: adapters are {whole.nbytes / adapters.nbytes:.0f} times fewer bytes than the model")


async def measure(size: str, rank: int, rounds: int) -> list[Row]:
    """One row for the whole model, and one for its adapters."""
    with local_ray(cpus=8, store_bytes=2 << 30), tempfile.TemporaryDirectory() as scratch:
        path = tiny_llama(Path(scratch) / "model", **shape_of(size))
        return [await row(size, path, lora, rounds) for lora in (None, LoraSpec(rank=rank, alpha=2 * rank))]


async def row(size: str, path: Path, lora: LoraSpec | None, rounds: int) -> Row:
    """Publish versions from one learner rank to one actor; return the medians."""
    model, logs = ModelSpec(path=path, lora=lora), path.parent / "logs"
    learner = await LearnerPool.start(LearnerConfig(model, LearnerSpec(), Optimizer(), 1, 0, logs))
    actors = await ActorPool.start(
        ActorConfig(model, ActorsSpec(kv_cache_gb=0.25, max_num_seqs=64, start_deadline_s=600), 256, 0, logs)
    )
    seen: list[tuple[float, float, float, float]] = []
    try:
        for version in range(1, rounds + 2):
            update = await learner.publish(version)
            (done,) = (await actors.broadcast(update)).actors
            seen.append((update.nbytes, update.gather_seconds, done.fetch_seconds, done.stall_seconds))
    finally:
        await asyncio.gather(learner.stop(), actors.stop())
    return Row(size, lora.rank if lora else None, *map(statistics.median, zip(*seen[1:], strict=True)))


if __name__ == "__main__":
    main()
