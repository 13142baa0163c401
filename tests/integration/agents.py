"""Programs for whole runs: they make two calls, and once each they raise, hang, kill their worker or go on too long."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import openai


def once(row: dict[str, Any], what: str) -> bool:
    """True for one caller with this row, in whatever process: the first one after a worker was killed."""
    flags = Path(row["flags"])
    if row.get("does") != what or not (what == "kill" or (flags / "kill").exists()):
        return False
    try:
        (flags / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


async def two_calls(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    """The reward is the share of vowels in both answers."""
    if once(row, "early"):
        raise RuntimeError("no luck at all")
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        result = await two_calls_with(client, row)
    if once(row, "linger"):
        threading.Thread(target=linger, args=(row, base_url, api_key), daemon=True).start()
    elif row.get("does") == "linger":
        await asyncio.sleep(1.5)  # the group outlives the episode that lingers
    return result


def linger(row: dict[str, Any], base_url: str, api_key: str) -> None:
    """Call once more when the program has returned, with another history, and note the status of the answer."""
    time.sleep(0.5)
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = client.chat.completions.with_raw_response
        try:
            status = answer.create(
                model="any", messages=[{"role": "user", "content": "more"}]
            ).http_response.status_code
        except openai.APIStatusError as refused:
            status = refused.status_code
    (Path(row["flags"]) / "lingered").write_text(str(status))


async def two_calls_with(client: openai.AsyncOpenAI, row: dict[str, Any]) -> Any:
    if row.get("does") == "fail":
        raise RuntimeError("never any luck")
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    first = await client.chat.completions.create(model="any", messages=messages, max_tokens=8)
    if once(row, "raise"):
        raise RuntimeError("bad luck")
    if once(row, "hang"):
        await asyncio.sleep(3600)
    if once(row, "kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": f"{row['prompt']} again"}]
    if once(row, "rewrite"):
        messages[1] = {"role": "assistant", "content": "something else"}
    second = await client.chat.completions.create(model="any", messages=messages, max_tokens=8)
    if row.get("does") == "defer":
        return None
    said = (first.choices[0].message.content or "") + (second.choices[0].message.content or "")
    return {"reward": sum(letter in "aeiou" for letter in said) / 16, "detail": "vowels"}


def one_call(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """A plain function, which calls with the client that waits."""
    if row.get("does") == "fail":
        raise RuntimeError("never any luck")
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        answer = client.completions.create(model="any", prompt=row["prompt"], max_tokens=4)
    return float("e" in answer.choices[0].text)


class Caller:
    """The same program, with one client for all episodes of a worker."""

    def __init__(self) -> None:
        self.client: openai.AsyncOpenAI | None = None

    async def setup(self) -> None:
        self.client = openai.AsyncOpenAI(base_url="http://none", api_key="none")

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> Any:
        assert self.client is not None
        return await two_calls_with(self.client.with_options(base_url=base_url, api_key=api_key), row)

    async def close(self) -> None:
        assert self.client is not None
        await self.client.close()
