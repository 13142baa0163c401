"""Tokens per second of an engine on CPU with blocks of 32 tokens, Volley's default, and with vLLM's own of 128.

    python -m benchmarks.generation.blocks MODEL [--prompts 20 100 300] [--samples 16] [--max-tokens 32] [--rounds 5]

The samples of a group share only the whole blocks of their prompt. Both engines take turns on groups of new prompts.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actors.config import ActorConfig, GenerateRequest
from actors.environment import engine_environment
from benchmarks.objectives.report import print_table
from volley.job import ActorsSpec
from volley.model import ModelSpec

if TYPE_CHECKING:
    from actors.engine import Engine

BLOCKS = (32, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, nargs="+", default=[20, 100, 300], help="tokens")
    parser.add_argument("--groups", type=int, default=4, help="at once")
    parser.add_argument("--samples", type=int, default=16, help="of a group")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args, Path(folder)))


async def measure(args: argparse.Namespace, folder: Path) -> None:
    """Take turns at every length, and print the medians of rates and ratios."""
    engines = [await _start(args, block, folder) for block in BLOCKS]
    rng, lines = np.random.default_rng(0), []
    try:
        for length in args.prompts:
            rates = [[await _rate(each, args, length, rng) for each in engines] for _ in range(1 + args.rounds)][1:]
            ours, theirs = (statistics.median(column) for column in zip(*rates, strict=True))
            ratios = [first / second for first, second in rates]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            lines.append([str(length), f"{ours:.0f}", f"{theirs:.0f}", spread])
    finally:
        for each in engines:
            await each.stop()
    print_table(["tokens of a prompt", *(f"tokens/s, blocks of {block}" for block in BLOCKS), "ratio"], lines)


async def _start(args: argparse.Namespace, block: int, folder: Path) -> "Engine":
    spec = ActorsSpec(max_num_seqs=args.groups * args.samples, cpus=1, kv_cache_gb=1.0, engine={"block_size": block})
    os.environ |= engine_environment(spec) | {"TMPDIR": str(folder), "VLLM_LOGGING_LEVEL": "ERROR"}
    from actors.uncompiled import uncompiled

    with uncompiled():
        from actors.engine import Engine  # imports vLLM, which reads the environment
    length = max(args.prompts) + args.max_tokens + 1
    config = ActorConfig(ModelSpec(path=args.model.resolve()), spec, length, 0, folder)
    return await Engine.start(config, 0, f"blocks of {block}", folder / "engine.log")


async def _rate(engine: "Engine", args: argparse.Namespace, length: int, rng: np.random.Generator) -> float:
    """Sampled tokens per second of groups that begin at once."""
    prompts = rng.integers(5, engine.vocab_size, (args.groups, length)).astype(np.int32)
    begun = time.perf_counter()
    made = await asyncio.gather(
        *(
            engine.generate(GenerateRequest(0, "p", prompt, args.samples, 1.0, 1.0, args.max_tokens))
            for prompt in prompts
        )
    )
    return sum(int(group.lengths_n.sum()) for group in made) / (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
