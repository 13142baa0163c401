"""An environment pool whose workers have no processes: real rooms, with programs that only sleep."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from environments.loads import EnvironmentHandle
from environments.pool import EnvironmentPool
from environments.programs import Ended
from environments.records import EnvironmentConfig, EpisodesDone, Outcome, Stuck
from environments.room import Room
from volley.errors import WorkerDied
from volley.records import Prompt
from volley.rollout import EnvironmentWorkersSpec, ProgramRollout


class Sleeps:
    """Programs that sleep for ``row["seconds"][key]``, and notes on them.

    Attributes:
        started: group and key of each episode, in order.
        running: episodes that run; ``most`` is its maximum.
        ended: when the last episode ended.
        told: address and key of each session that was ended, in order.
    """

    def __init__(self) -> None:
        self.started: list[tuple[str, str]] = []
        self.told: list[tuple[str, str]] = []
        self.running = self.most = 0
        self.ended = 0.0

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Ended:
        self.started.append((row["id"], api_key))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(row["seconds"][int(api_key)])
        finally:
            self.running -= 1
        self.ended = time.monotonic()
        if row.get("fails") == api_key:
            raise WorkerDied("a program", "it cannot be started")
        stuck: Stuck = row["stuck"] if "stuck" in row and api_key == "0" else ""
        return Ended(Outcome(1.0), stuck)

    async def tell(self, base_url: str, api_key: str) -> None:
        self.told.append((base_url, api_key))


class Ref:
    """The answer to a remote call. Whoever stops waiting for it does not end the call."""

    def __init__(self, call: Coroutine[Any, Any, Any]) -> None:
        self._call = asyncio.ensure_future(call)
        self._answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._call.add_done_callback(self._settle)

    def __await__(self) -> Generator[Any, Any, Any]:
        return asyncio.shield(self._answer).__await__()

    def cancel(self) -> None:
        """What `ray.cancel` does."""
        self._call.cancel()

    def lose(self, end: Exception) -> None:
        """The worker died."""
        self._call.cancel()
        if not self._answer.done():
            self._answer.set_exception(end)
            self._answer.exception()  # nobody may be waiting

    def _settle(self, call: "asyncio.Future[Any]") -> None:
        if self._answer.done():
            return
        if call.cancelled():
            self._answer.cancel()
        elif (problem := call.exception()) is not None:
            self._answer.set_exception(problem)
        else:
            self._answer.set_result(call.result())


class Remote:
    """A remote method; ``refs`` collects its answers."""

    def __init__(self, method: Callable[..., Coroutine[Any, Any, Any]], refs: list[Ref]) -> None:
        self._method, self._refs = method, refs
        self.calls = 0

    def remote(self, *args: Any) -> Ref:
        self.calls += 1
        self._refs.append(Ref(self._method(*args)))
        return self._refs[-1]


class Worker:
    """In place of the Ray actor `environments.worker.EnvironmentWorker`. ``hangs`` makes it answer nothing more."""

    def __init__(self, places: int) -> None:
        self.programs, self.refs, self.hangs = Sleeps(), list[Ref](), False
        self._room = Room(self.programs, places, 1e6, self.programs.tell)
        self.ready, self.close = Remote(self._ready, self.refs), Remote(self._ready, self.refs)
        self.run, self.left = Remote(self._run, self.refs), Remote(self._left, self.refs)

    async def _ready(self) -> int:
        return 1

    async def _left(self) -> dict[int, int]:
        await self._hang()
        return self._room.left()

    async def _run(self, number: int, row: Mapping[str, Any], base_url: str, keys: Sequence[str]) -> EpisodesDone:
        await self._hang()
        ended = await self._room.run(number, row, base_url, keys)
        stuck = max((each.stuck for each in ended), key=("", "thread", "loop").index)
        return EpisodesDone(tuple(each.outcome for each in ended), 0.0, stuck, left=self._room.left())

    async def _hang(self) -> None:
        if self.hangs:
            await asyncio.sleep(1e6)


class SleepingPool(EnvironmentPool):
    """The real pool over such workers, and all it had of them: ``made``."""

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config)
        self.made: list[Worker] = []

    def _create(self, index: int) -> EnvironmentHandle:
        places = self._config.workers.episodes
        self.made.append(Worker(places))
        worker = EnvironmentHandle(index, f"environment-{index}", cast(Any, self.made[-1]), places)
        self._living.add(worker)
        return worker

    def _kill(self, worker: EnvironmentHandle) -> None:
        self._living.discard(worker)
        for ref in worker.actor.refs:
            ref.lose(WorkerDied(worker.name, "killed"))


async def sleeping_pool(*, timeout_s: float = 1e5, **workers: Any) -> SleepingPool:
    """A pool that has started."""
    rollout = ProgramRollout(target="a:b", timeout_s=timeout_s)
    spec = EnvironmentWorkersSpec.model_validate(workers)
    pool = await SleepingPool.start(EnvironmentConfig(rollout, spec, Path("unused")))
    assert isinstance(pool, SleepingPool)
    return pool


def ask(pool: EnvironmentPool, name: str, seconds: Sequence[float], **row: Any) -> asyncio.Task[EpisodesDone]:
    """Ask for a group with one episode for each of ``seconds``."""
    prompt = Prompt(name, "", {"seconds": list(seconds), **row})
    return asyncio.create_task(pool.run(prompt, "", tuple(map(str, range(len(seconds))))))
