"""Tokens per second through the pool and a Ray actor, compared with the same vLLM engine called directly.

    python benchmarks/generation/throughput.py MODEL_FOLDER [--samples 16] [--max-tokens 9] [--rounds 7]

Both engines have the same options and take turns, so that other load on the machine affects both. Each turn keeps a
fixed number of groups in flight, as a run does, and divides all tokens by the seconds until its last group ends.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import ray

from actors import environment
from actors.config import ActorConfig, GenerateRequest
from actors.pool import ActorPool
from volley.job import ActorsSpec
from volley.model import ModelSpec

Generate = Callable[[GenerateRequest], Awaitable[int]]


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as logs:
        report(*asyncio.run(compare_on(args, Path(logs))))


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or ``given`` instead of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--groups", type=int, default=32, help="groups in flight")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=9)
    parser.add_argument("--prompt-tokens", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one turn")
    return parser.parse_args(given)


async def compare_on(args: argparse.Namespace, logs: Path) -> tuple[list[float], list[float]]:
    """Run `compare` with the engine options of a job."""
    config = ActorConfig(
        model=ModelSpec(path=args.model.resolve()),
        actors=ActorsSpec(max_num_seqs=args.groups * args.samples, cpus=1, kv_cache_gb=0.5),
        max_model_len=args.prompt_tokens + args.max_tokens + 1,
        seed=0,
        log_dir=logs,
    )
    return await compare(config, args)


def report(direct: list[float], pooled: list[float]) -> None:
    """Print the median tokens per second of both, and the median ratio of adjacent turns."""
    ratios = [ours / theirs for ours, theirs in zip(pooled, direct, strict=True)]
    print(f"vLLM directly          {statistics.median(direct):9.0f} tokens/s")
    print(f"pool and Ray actor     {statistics.median(pooled):9.0f} tokens/s")
    print(f"ratio                  {statistics.median(ratios):9.3f}   ({min(ratios):.3f} to {max(ratios):.3f})")


async def compare(config: ActorConfig, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Tokens per second of each turn: directly, and through the pool."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve_directly, args=(config, args, there))
    process.start()
    there.close()  # so that the pipe ends here when the other process ends
    with here:  # closing the pipe ends the other process
        # Ray's default niceness is 15; both sides should be scheduled alike.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        here.recv()
        pool = await ActorPool.start(config)
        print(f"actor ready after      {pool.infos[0].start_seconds:9.1f} s")

        async def pooled(request: GenerateRequest) -> int:
            _, meta = await pool.generate(request)
            return meta.sample_tokens

        theirs, ours = [], []
        for _ in range(args.rounds):
            here.send("turn")
            theirs.append(await asyncio.to_thread(here.recv))
            ours.append(await turn(pooled, args))
        here.send("end")
        await pool.stop()
        ray.shutdown()
    process.join()
    return theirs, ours


def serve_directly(config: ActorConfig, args: argparse.Namespace, pipe: Connection) -> None:
    """Serve turns with the same engine, called as in vLLM's documentation; runs in its own process."""
    environment.enter(config.actors, config.log_dir / "direct.log", config.log_dir)

    async def serve() -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        from actors.options import engine_args

        llm = AsyncLLM.from_engine_args(engine_args(config, 0))

        async def direct(request: GenerateRequest) -> int:
            params = SamplingParams(
                n=request.n,
                max_tokens=request.max_tokens,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            async for output in llm.generate(tokens_input(request.prompt_p.tolist()), params, str(request.group_id)):
                final = output
            return sum(len(completion.token_ids) for completion in final.outputs)

        await direct(next_request(args))
        pipe.send("ready")
        while await asyncio.to_thread(pipe.recv) == "turn":
            pipe.send(await turn(direct, args))
        llm.shutdown()

    asyncio.run(serve())


async def turn(generate: Generate, args: argparse.Namespace) -> float:
    """Tokens per second of one turn with ``args.groups`` groups in flight."""
    ends, tokens = time.perf_counter() + args.seconds, 0

    async def generate_in_turn() -> None:
        nonlocal tokens
        while time.perf_counter() < ends:
            done = await generate(next_request(args))
            tokens += done

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(args.groups):
            tasks.create_task(generate_in_turn())
    return tokens / (time.perf_counter() - started)


_RNG = np.random.default_rng(0)
_COUNT = iter(range(1 << 60))


def next_request(args: argparse.Namespace) -> GenerateRequest:
    """A request with a prompt of random tokens."""
    prompt_p = _RNG.integers(3, 19, args.prompt_tokens).astype(np.int32)
    number = next(_COUNT)
    return GenerateRequest(number, str(number), prompt_p, args.samples, 1.0, 1.0, args.max_tokens)


if __name__ == "__main__":
    main()
