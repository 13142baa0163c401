"""What the gateway itself adds to a call: milliseconds per call, with an engine that takes time but no processor.

    python -m benchmarks.episodes.gateway [--episodes 64] [--calls 8] [--tokens 32] [--seconds 1.0] [--rounds 3]

As `benchmarks.episodes.speed`, whose engine competes with the gateway for two cores. Here the programs alone do, which
run in a process of their own and use the OpenAI client. One episode at a time comes first, then all at once. The event
loop is uvloop, as in Ray's actors.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from actors.config import EpisodesRequest
from actors.gateway.calls import Gateway
from actors.gateway.http import create_app
from actors.gateway.server import Server
from actors.gateway.session import Drawn, Limits
from actors.stops import stop_token_ids
from benchmarks.episodes.speed import LONGEST_S, START_S, Timed, length, write_model
from environments.outside.interpreter import Outside
from environments.outside.programs import OutsidePrograms
from services.data.tokens import load_tokenizer
from volley.gateway import GatewaySpec


class IdleEngine:
    """Answers after ``seconds``, give or take half of them, with tokens that mean nothing."""

    def __init__(self, vocab_size: int, seconds: float) -> None:
        self.vocab_size, self._seconds = vocab_size, seconds

    async def draw(self, prompt: list[int], *, max_tokens: int, **_: Any) -> Drawn:
        """As `actors.gateway.calls.Engine`."""
        await asyncio.sleep(self._seconds * random.uniform(0.5, 1.5))
        tokens = random.choices(range(100, self.vocab_size), k=max_tokens)
        return Drawn(tokens, [-1.0] * max_tokens, [0] * max_tokens, stopped=False)


class Added(NamedTuple):
    """Milliseconds, means over calls.

    Attributes:
        waited: from the arrival of a request's headers to the end of its answer, without the engine's.
        computed: processor time of the whole process, so little else must go on in it.
    """

    waited: float
    computed: float


async def added(gateway: Gateway, app: Timed, url: str, programs: OutsidePrograms, args: argparse.Namespace) -> Added:
    """What the gateway adds to the calls of ``args.episodes`` episodes at once."""
    before, computed = app.seconds, time.process_time()
    limits = Limits(args.calls, args.calls * args.tokens, length(args))
    keys = gateway.open_sessions(EpisodesRequest(0, "p", args.episodes, 1.0, 1.0, limits))
    row = {"calls": args.calls, "tokens": args.tokens, "wait": 0.0, "prompt": "count to ten"}
    ended = await asyncio.gather(*(programs.run(row, url, key) for key in keys))
    if failed := [each.outcome.failure for each in ended if each.outcome.failure]:
        sys.exit(f"{len(failed)} episodes failed: {failed[0]}")
    _, reports = await gateway.close_sessions(keys, group_id=0, prompt_id="p", actor="a")
    engine, calls = (sum(getattr(report, name) for report in reports) for name in ("calling_seconds", "calls"))
    waited = app.seconds - before - engine
    return Added(1000 * waited / calls, 1000 * (time.process_time() - computed) / calls)


async def measure(args: argparse.Namespace, model: Path) -> None:
    """Print the medians over rounds, with their range."""
    tokenizer = load_tokenizer(model)
    stops = stop_token_ids(model, tokenizer)
    gateway = Gateway(IdleEngine(len(tokenizer), args.seconds), tokenizer, stops, GatewaySpec())
    app, server = Timed(create_app(gateway, "model", None)), Server("127.0.0.1")
    server.start(app)
    programs = OutsidePrograms(Outside(sys.executable, "benchmarks.episodes.speed:play"), LONGEST_S, START_S, 0)
    try:
        await programs.start()
        one = argparse.Namespace(**{**vars(args), "episodes": 1})
        await added(gateway, app, server.url, programs, one)  # warms up
        for given in (one, args):
            found = [await added(gateway, app, server.url, programs, given) for _ in range(args.rounds)]
            waited, computed = (_summary(each) for each in zip(*found, strict=True))
            print(f"{given.episodes:4} at once: {waited} ms per call; the process computes {computed} ms per call")
    finally:
        await programs.close()
        await server.stop()


def _summary(rounds: Sequence[float]) -> str:
    return f"{statistics.median(rounds):.1f} ({min(rounds):.1f} to {max(rounds):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64, help="at once")
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--seconds", type=float, default=1.0, help="that the engine takes for an answer")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(measure(args, write_model(Path(folder), 128, 1, length(args))))


if __name__ == "__main__":
    main()
