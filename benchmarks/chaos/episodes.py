"""Episodes of the chaos run: a program that mostly plays fair, or else crashes, hangs, floods, lies or never ends.

It runs under an interpreter of its own, with four episodes in a process. What it earns by playing fair can be computed
from the logged sample, so every reward that it got in another way shows.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from openai import AsyncOpenAI

END = "<|im_end|>"
FAIR = 0.9  # share of the episodes that play fair
MEBIBYTE = b"x" * (1 << 20)
FAR = 1e6  # seconds


async def fair(client: AsyncOpenAI) -> float:
    """Two calls; the reward is what `earned` says of the last answer."""
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for _ in range(2):
        answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=20)
        reply = answer.choices[0].message
        messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": "on"}]
    return earned(reply.content or "")


def earned(answer: str) -> float:
    """What an answer is worth."""
    return float(answer.count("e") % 2)


async def leave(client: AsyncOpenAI) -> NoReturn:
    os._exit(3)


async def crash(client: AsyncOpenAI) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1e6


async def kill_worker(client: AsyncOpenAI) -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    return 1e6


async def sleep(client: AsyncOpenAI) -> float:
    await asyncio.sleep(FAR)
    return 1e6


async def block(client: AsyncOpenAI) -> float:
    time.sleep(FAR)  # noqa: ASYNC251 - which is the point
    return 1e6


async def flood(client: AsyncOpenAI) -> NoReturn:
    while True:
        os.write(2, MEBIBYTE)


async def lie(client: AsyncOpenAI) -> float:
    """Write an answer for another episode wherever it is read."""
    forged = b'{"ended": 1000000, "returned": {"reward": 1e6}}\nreward: 1e6\n'
    for descriptor in range(3, 12):
        try:
            os.write(descriptor, forged)
        except OSError:
            continue
    return 1e6


async def boast(client: AsyncOpenAI) -> Any:
    """Return what is no reward."""
    await fair(client)
    return random.choice([float("nan"), float("inf"), "1e6", [1e6], {"rewards": 1e6}])


async def call_nothing(client: AsyncOpenAI) -> float:
    return 1e6


async def rewrite(client: AsyncOpenAI) -> float:
    """Make calls whose history is not that of the episode."""
    await fair(client)
    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "again"}])
    return 1e6


async def never_end(client: AsyncOpenAI) -> float:
    """Call the model until it is refused."""
    messages: list[Any] = [{"role": "user", "content": "go"}]
    while True:
        reply = (await client.chat.completions.create(model="any", messages=messages)).choices[0].message
        messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": "on"}]


async def leave_a_process(client: AsyncOpenAI) -> float:
    """Play fair, but leave a process behind."""
    subprocess.Popen(["sleep", str(int(FAR))])  # noqa: ASYNC220
    return await fair(client)


HONEST: tuple[Callable[[AsyncOpenAI], Awaitable[Any]], ...] = (fair, leave_a_process)
HOSTILE: tuple[Callable[[AsyncOpenAI], Awaitable[Any]], ...] = (
    *(leave, crash, kill_worker, sleep, block, flood, lie, boast, call_nothing, rewrite, never_end),
)


async def play(row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
    """One episode."""
    act = random.choice(HOSTILE if random.random() > FAIR else HONEST)
    print(f"an episode will {act.__name__}", flush=True)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        returned = await act(client)
    return {"reward": returned, "detail": act.__name__} if act in HONEST else returned


def job_of(common: Mapping[str, Any]) -> dict[str, Any]:
    """The chaos job with these episodes as samples."""
    return {
        **common,
        "rollout": {
            "kind": "program",
            "target": f"{__name__}:play",
            "python": sys.executable,
            "timeout_s": 20,
            "max_calls": 6,
        },
        "sampling": {"n": 4, "max_tokens": 120},
        "environment_workers": {"count": 3, "episodes": 4, "max_replacements": 10_000},
    }


def write_inputs(folder: Path) -> None:
    """Write an untrained chat model and its prompts to ``folder``, unless they exist."""
    from tests.chat_models import chat_tokenizer
    from tests.models import tiny_llama

    if (folder / "prompts.jsonl").exists():
        return
    tiny_llama(folder / "model", tokenizer=chat_tokenizer())
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"game {n}"}) + "\n" for n in range(64)))


def verdicts(samples: Path) -> Counter[tuple[str, str]]:
    """Logged samples by how they were played, as far as the program said, and by their verdict."""
    return Counter((row["detail"] if _judged(row) else "no reward", row["status"]) for row in _rows(samples))


def unearned(samples: Path) -> list[str]:
    """The samples whose reward is not what their last answer is worth."""
    return [row["sample"] for row in _rows(samples) if _judged(row) and row["reward"] != _worth(row)]


def _judged(row: Mapping[str, Any]) -> bool:
    return row["status"] in ("passed", "wrong_answer")


def _worth(row: Mapping[str, Any]) -> float | None:
    honest = row["detail"] in {act.__name__ for act in HONEST}
    return earned(row["calls"][-1]["answer"].removesuffix(END)) if honest and len(row["calls"]) == 2 else None


def _rows(samples: Path) -> Iterator[dict[str, Any]]:
    for line in samples.read_text().splitlines():
        yield json.loads(line)
