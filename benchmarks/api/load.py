"""Load test of the API: live clients and mixed reads, with the server's process pinned to one core.

    python -m benchmarks.api.load [--seconds 20] [--clients 200] [--readers 16]

Meanwhile ten steps per second are written to a run. The load generator shares the machine's cores with the server, so
requests per second alone say little; the server's CPU time, read from /proc, tells how many requests one dedicated
core would answer.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httptools
import numpy as np

from services.stack.redis import embedded_redis
from services.store.outbox import Outbox
from services.store.redis import Store
from volley.state import Observed, RunRecord

RUN, STEPS, RUNS = "load-0", 5000, 20
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


SERVER = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
import uvloop
from services.api.app import create_app
from services.api.serve import GracefulServer, listening
from services.api.settings import ApiSettings
settings = ApiSettings.model_validate_json(sys.stdin.read())
with listening(settings) as listener:
    print(listener.getsockname()[1], flush=True)
    uvloop.run(GracefulServer(create_app(settings), settings).serve(sockets=[listener]))
"""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument("--core", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        async with embedded_redis(Path(folder) / "redis", Path(folder) / "redis.log") as redis_url:
            await fill(redis_url)
            async with served(redis_url, options.core) as (process, port):
                await measure(options, redis_url, process, port)


async def fill(redis_url: str) -> None:
    """Create twenty runs, one of them with 5,000 steps of 60 metrics."""
    async with Store(redis_url) as store:
        for i in range(RUNS):
            job = {"steps": STEPS, "objective": {"kind": "max_at_k", "k": 8}, "learner": {}, "actors": {}}
            record = RunRecord(id=f"load-{i}", name=f"load-{i}", kind="rl", job=job, created=float(i), folder="/none")
            await store.create(record)
            await store.put_observed(record.id, Observed(state="running", step=i, steps=STEPS, updated=time.time()))
    async with Outbox(redis_url, RUN) as outbox:
        for step in range(STEPS):
            outbox.step(row(step), {"admitted": step})


def row(step: int) -> dict[str, Any]:
    return {"step": step, "reward_mean": random.random(), **{f"metric_{i}": random.random() for i in range(60)}}


@contextlib.asynccontextmanager
async def served(redis_url: str, core: int) -> Any:
    """Start the server in a process pinned to ``core``; yields the process and its port."""
    settings = {"redis_url": redis_url, "port": 0, "rate": 1e6, "burst": 1_000_000}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, str(core)), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the server has no pipes")
    process.stdin.write(json.dumps(settings).encode())
    process.stdin.close()
    port = int(await asyncio.wait_for(process.stdout.readline(), 60))
    await until_it_answers(port)
    try:
        yield process, port
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 20)


async def until_it_answers(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return


def processor_seconds(pid: int) -> float:
    """User and system CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


async def measure(options: argparse.Namespace, redis_url: str, process: Any, port: int) -> None:
    stopping, events = asyncio.Event(), Counter[str]()
    times: dict[str, list[float]] = {}
    viewers = [asyncio.create_task(view(port, events)) for _ in range(options.clients)]
    writer = asyncio.create_task(write(redis_url, stopping))
    await asyncio.sleep(3)  # caches warm up
    events.clear()
    begun, spent = time.perf_counter(), processor_seconds(process.pid)
    readers = [asyncio.create_task(read(port, stopping, times, i)) for i in range(options.readers)]
    await asyncio.sleep(options.seconds)
    stopping.set()
    await asyncio.gather(*readers)
    wall, core = time.perf_counter() - begun, processor_seconds(process.pid) - spent
    lost = sum(task.done() for task in viewers)
    for task in viewers:
        task.cancel()
    await asyncio.gather(writer, *viewers, return_exceptions=True)
    report(times, wall, core, events.total(), lost, options.clients)


def report(times: dict[str, list[float]], wall: float, core: float, events: int, lost: int, clients: int) -> None:
    everything = np.concatenate([np.array(each) for each in times.values()])
    print(f"{clients} live clients ({lost} lost), {events / wall:.0f} events/s to all of them together")
    print(f"{len(everything) / wall:.0f} requests/s at {core / wall:.0%} of one core")
    print(f"  that is {len(everything) / core:.0f} requests per CPU second of the server, live views included")
    print(f"{'':28}{'count':>8}{'p50 ms':>9}{'p99 ms':>9}")
    for name, each in [*sorted(times.items()), ("all", everything.tolist())]:
        p50, p99 = np.percentile(np.array(each) * 1000, [50, 99])
        print(f"{name:28}{len(each):8}{p50:9.1f}{p99:9.1f}")


async def view(port: int, events: Counter[str]) -> None:
    """One live client: counts the events it receives."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write(f"GET /v1/runs/{RUN}/live HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        while line := await reader.readline():
            if line.startswith(b"event: "):
                events[line[7:].decode().strip()] += 1
    finally:
        writer.close()


async def write(redis_url: str, stopping: asyncio.Event) -> None:
    """Write ten steps per second to the run."""
    async with Outbox(redis_url, RUN) as outbox:
        step = STEPS
        while not stopping.is_set():
            outbox.step(row(step), {"admitted": step})
            outbox.add("events", {"kind": "tick", "time": time.time()})
            step += 1
            await asyncio.sleep(0.1)


MIX = {
    "run": f"/v1/runs/{RUN}",
    "metrics, 2 names": f"/v1/runs/{RUN}/metrics?names=reward_mean,metric_1&points=200",
    "ledger": f"/v1/runs/{RUN}/ledger",
    "events": f"/v1/runs/{RUN}/events?limit=20&newest=true",
    "list of 20 runs": "/v1/runs?limit=20",
    "healthz": "/healthz",
}
WEIGHTS = (30, 30, 10, 10, 10, 10)


async def read(port: int, stopping: asyncio.Event, times: dict[str, list[float]], seed: int) -> None:
    """Send requests over one connection, each as soon as the previous one is answered."""
    chosen = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while not stopping.is_set():
            (name,) = chosen.choices(list(MIX), WEIGHTS)
            begun = time.perf_counter()
            writer.write(f"GET {MIX[name]} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await read_response(reader)
            times.setdefault(name, []).append(time.perf_counter() - begun)
    finally:
        writer.close()


class _Response:
    """Callbacks for `httptools`: notes when one response is complete."""

    complete = False

    def on_message_complete(self) -> None:
        self.complete = True


async def read_response(reader: asyncio.StreamReader) -> None:
    """Read one response; raises RuntimeError unless its status is 200."""
    response = _Response()
    parser = httptools.HttpResponseParser(response)
    while not response.complete:
        parser.feed_data(await asyncio.wait_for(reader.read(1 << 16), 30))
    if parser.get_status_code() != 200:
        raise RuntimeError(f"the server answered with status {parser.get_status_code()}")


if __name__ == "__main__":
    asyncio.run(main())
