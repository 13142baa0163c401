"""Tokens per second of episodes, compared with plain samples of the same engine, and what the gateway adds to a call.

    python -m benchmarks.episodes.speed [--episodes 64] [--more 256] [--calls 4] [--tokens 32] [--wait 1.0]
                                        [--rounds 3] [--width 256] [--layers 4 | --model FOLDER] [--kv-cache-gb 0.5]

One engine on CPU takes turns: plain samples, as many at once as episodes; episodes whose program calls the model
without a pause; episodes whose environment takes ``--wait`` seconds after each call; and ``--more`` of these at once.
The model is small and untrained unless ``--model`` names one. Programs run in a process of their own and use the OpenAI
client, as in a run. Of the time that a call takes beyond the engine's, the gateway's part lies between the arrival of
the request and the end of the answer. The event loop is uvloop, as in Ray's actors.
"""

import argparse
import asyncio
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.config import ActorConfig, EpisodesRequest
from actors.environment import engine_environment
from actors.gateway.rendering import Setting
from actors.gateway.session import Limits
from environments.outside.interpreter import Outside
from environments.outside.programs import OutsidePrograms
from volley.gateway import GatewaySpec
from volley.job import ActorsSpec
from volley.model import ModelSpec

FIRST, BETWEEN = 96, 32  # tokens at most of the first prompt, and of what a program adds before each further call
START_S, LONGEST_S = 300.0, 3600.0


async def play(row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """The program: calls, each followed by the environment's time. Its detail is the seconds of the calls."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=connections())
    seconds = []
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(row["calls"]):
        begun = time.perf_counter()
        answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=row["tokens"])
        seconds.append(time.perf_counter() - begun)
        reply = answer.choices[0].message
        messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
        await asyncio.sleep(row["wait"])
    return {"reward": 1.0, "detail": json.dumps([round(each, 6) for each in seconds])}


@functools.cache
def connections() -> Any:
    """The connections of all episodes of the process, since every HTTP client loads certificates."""
    from openai import DefaultAsyncHttpxClient

    return DefaultAsyncHttpxClient()


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn.

    Attributes:
        rate: sampled tokens per second.
        added: seconds that a call took for the program beyond those of the engine, one per episode.
        gateway: the part of it in the gateway, the mean over calls.
        cached: share of the later calls' prompt tokens that the engine had in its prefix cache.
    """

    rate: float
    added: tuple[float, ...] = ()
    gateway: float = 0.0
    cached: float = 0.0


class Timed:
    """An application, with the seconds it takes to answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.seconds = app, 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = time.perf_counter()
        await self._app(scope, receive, send)
        self.seconds += time.perf_counter() - begun


class Sides:
    """Plain samples and episodes on one engine."""

    def __init__(
        self, engine: Any, gateway: Any, app: Timed, url: str, programs: OutsidePrograms, args: argparse.Namespace
    ) -> None:
        self._engine, self._gateway, self._app, self._url = engine, gateway, app, url
        self._programs, self._args = programs, args
        self._prompts = 0
        self._seen = self._cached = 0
        self._outputs = engine._outputs
        engine._outputs = self._counted

    async def _counted(self, prompt: list[int], params: Any, request: str | None = None) -> AsyncIterator[Any]:
        """The engine's outputs, with the prompt tokens from its prefix cache counted."""
        async for output in self._outputs(prompt, params, request):
            yield output
        self._seen, self._cached = self._seen + len(prompt), self._cached + (output.num_cached_tokens or 0)

    def _prompt(self) -> str:
        self._prompts += 1
        return f"count to {self._prompts} in {self._prompts * 7919 % 1000} steps"

    def _asked(self, prompt: str) -> list[int]:
        """The tokens of an episode's first call."""
        tokens: list[int] = self._gateway.renderer.prompt([{"role": "user", "content": prompt}], Setting())
        return tokens

    async def plain(self, at_once: int) -> Turn:
        """As many samples as the episodes have calls."""

        async def samples() -> int:
            total = 0
            for _ in range(self._args.calls):
                prompt = self._asked(self._prompt())
                drawn = await self._engine.draw(
                    prompt, max_tokens=self._args.tokens, temperature=1.0, top_p=1.0, seed=None, on_tokens=None
                )
                total += len(drawn.tokens)
            return total

        begun = time.perf_counter()
        tokens = sum(await asyncio.gather(*(samples() for _ in range(at_once))))
        return Turn(tokens / (time.perf_counter() - begun))

    async def episodes(self, at_once: int, wait: float) -> Turn:
        """Episodes that all begin at once."""
        self._seen = self._cached = 0
        answering = self._app.seconds
        limits = Limits(self._args.calls, self._args.calls * self._args.tokens, length(self._args))
        keys = self._gateway.open_sessions(EpisodesRequest(0, "p", at_once, 1.0, 1.0, limits))
        row = {"calls": self._args.calls, "tokens": self._args.tokens, "wait": wait}
        prompts = [self._prompt() for _ in keys]
        begun = time.perf_counter()
        ended = await asyncio.gather(
            *(
                self._programs.run({**row, "prompt": prompt}, self._url, key)
                for prompt, key in zip(prompts, keys, strict=True)
            )
        )
        seconds = time.perf_counter() - begun
        if failed := [each.outcome.failure for each in ended if each.outcome.failure]:
            sys.exit(f"{len(failed)} episodes failed: {failed[0]}")
        group, reports = await self._gateway.close_sessions(keys, group_id=0, prompt_id="p", actor="a")
        added = tuple(
            (sum(json.loads(each.outcome.detail)) - report.calling_seconds) / report.calls
            for each, report in zip(ended, reports, strict=True)
        )
        calls, calling = sum(each.calls for each in reports), sum(each.calling_seconds for each in reports)
        gateway = (self._app.seconds - answering - calling) / calls
        first = sum(len(self._asked(prompt)) for prompt in prompts)  # of which nothing is cached
        return Turn(int(group.lengths_n.sum()) / seconds, added, gateway, self._cached / (self._seen - first))


async def measure(args: argparse.Namespace, folder: Path) -> None:
    """Take turns and print the medians."""
    at_once = max(args.episodes, args.more)
    actors = ActorsSpec(max_num_seqs=at_once, cpus=1, kv_cache_gb=args.kv_cache_gb)
    os.environ |= engine_environment(actors) | {"TMPDIR": str(folder), "VLLM_LOGGING_LEVEL": "ERROR"}
    from actors.uncompiled import uncompiled

    with uncompiled():
        from actors.engine import Engine  # imports vLLM, which reads the environment
    from actors.gateway.calls import Gateway
    from actors.gateway.http import create_app
    from actors.gateway.server import Server

    model = ModelSpec(path=args.model or write_model(folder, args.width, args.layers, length(args)))
    config = ActorConfig(model, actors, length(args), 0, folder, gateway=GatewaySpec())
    engine = await Engine.start(config, 0, "actor", folder / "engine.log")
    gateway, server = Gateway(engine, engine.tokenizer, engine.stop_ids, GatewaySpec()), Server("127.0.0.1")
    app = Timed(create_app(gateway, "model", None))
    server.start(app)
    programs = OutsidePrograms(Outside(sys.executable, "benchmarks.episodes.speed:play"), LONGEST_S, START_S, 0)
    try:
        await programs.start()
        sides = Sides(engine, gateway, app, server.url, programs, args)
        await sides.plain(args.episodes), await sides.episodes(args.episodes, 0.0)  # warm up
        turns = []
        for number in range(args.rounds):
            turn = [
                await sides.plain(args.episodes),
                await sides.episodes(args.episodes, 0.0),
                await sides.episodes(args.episodes, args.wait),
            ]
            if args.more:
                turn.append(await sides.episodes(args.more, args.wait))
            turns.append(tuple(turn))
            print(f"round {number + 1} of {args.rounds} done", file=sys.stderr)
    finally:
        await programs.close()
        await server.stop()
        await engine.stop()
    report(turns, args)


def report(turns: Sequence[tuple[Turn, ...]], args: argparse.Namespace) -> None:
    """Print the medians over rounds; ratios are of turns of the same round."""
    n, wait = args.episodes, args.wait
    names = (f"{n} plain samples", f"{n} episodes", f"{n} episodes, {wait:g} s", f"{args.more} episodes, {wait:g} s")
    print(f"{'at once':28} {'tokens/s':>9} {'ratio':>6}   added to a call: median, longest   gateway   prefix cache")
    for at, name in enumerate(names[: len(turns[0])]):
        rate = statistics.median(each[at].rate for each in turns)
        line = f"{name:28} {rate:9.0f} {statistics.median(each[at].rate / each[0].rate for each in turns):6.2f}"
        if at:
            added = [1000 * seconds for each in turns for seconds in each[at].added]
            cached = statistics.median(each[at].cached for each in turns)
            gateway = 1000 * statistics.median(each[at].gateway for each in turns)
            line += f"   {statistics.median(added):13.1f} ms {max(added):10.1f} ms {gateway:7.1f} ms {cached:11.0%}"
        print(line)


def length(args: argparse.Namespace) -> int:
    """The longest context, in tokens."""
    return int(FIRST + args.calls * (args.tokens + BETWEEN))


def write_model(folder: Path, width: int, layers: int, context: int) -> Path:
    """Write an untrained chat model; return its folder."""
    from tests.chat_models import chat_tokenizer
    from tests.models import tiny_llama

    tiny_llama(
        folder / "model",
        tokenizer=chat_tokenizer(),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        head_dim=width // 4,
        max_position_embeddings=context,
        initializer_range=0.02,
    )
    return folder / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64, help="at once")
    parser.add_argument("--more", type=int, default=256, help="episodes at once that fill the engine; 0: none")
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--wait", type=float, default=1.0, help="seconds of the environment after each call")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=256, help="of the model, a multiple of 128")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--model", type=Path, help="folder of a chat model, in place of a small one")
    parser.add_argument("--kv-cache-gb", type=float, default=0.5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(measure(args, Path(folder)))


if __name__ == "__main__":
    main()
