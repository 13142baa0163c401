"""The run store and the embedded Redis, with a real server that is really killed."""

import asyncio
import gc
import os
import signal
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from services.stack import processes as keeper
from services.stack.redis import check_redis, embedded_redis
from services.store.outbox import Outbox
from services.store.redis import Store
from volley.errors import HostError, JobError
from volley.state import Observed, RunRecord

pytestmark = pytest.mark.integration


RECORD = RunRecord(id="r1", name="r", kind="rl", job={}, created=1.0, folder="runs/r1")


async def test_written_data_is_read_back_and_survives_the_server(tmp_path: Path) -> None:
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url:
        async with Store(url) as store, Outbox(url, "r1") as outbox:
            await store.create(RECORD)
            outbox.step({"step": 0, "reward_mean": 0.5}, {"admitted": 4, "trained": 2})
            outbox.add("events", {"kind": "evaluation", "version": 0})
            outbox.observed(Observed(state="running", step=1))
            await store.change_desired("r1", lambda desired: desired.model_copy(update={"actors": 2}))
        await asyncio.sleep(1.2)  # Redis syncs its append-only file every second
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url, Store(url) as store:
        ((record, desired, observed),) = await store.read_runs(await store.run_ids())
        assert (record, desired.actors, desired.revision, observed.step) == (RECORD, 2, 1, 1)
        assert [row for _, row in await store.entries("r1", "metrics")] == [{"step": 0, "reward_mean": 0.5}]
        assert await store.ledger("r1") == {"admitted": 4, "trained": 2}
        ((name, event),) = await store.newest("r1", "events", 10)
        assert (event["kind"], event["version"]) == ("evaluation", 0)
        assert await store.follow("r1", {"events": name}, seconds=0.01) == {}
        assert await store.record("other") is None
        await store.delete("r1")
        assert await store.run_ids() == []


async def test_an_idempotency_key_creates_one_run(tmp_path: Path) -> None:
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url, Store(url) as store:
        records = [RECORD.model_copy(update={"id": f"r{i}"}) for i in range(8)]
        made = await asyncio.gather(*(store.create(record, key="k", body="same") for record in records))
        assert len(set(made)) == 1
        assert await store.run_ids() == made[:1]
        with pytest.raises(JobError, match="was used for another request"):
            await store.create(RECORD, key="k", body="other")


async def test_a_deleted_run_gives_its_key_back(tmp_path: Path) -> None:
    """A new run has an id and a folder of its own."""
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url, Store(url) as store:
        first, second = (RECORD.model_copy(update={"id": name, "folder": f"runs/{name}"}) for name in ("r1", "r2"))
        assert await store.create(first, key="k", body="same") == "r1"
        assert await store.create(second, key="k", body="same") == "r1"
        await store.delete("r1")
        assert await store.create(second, key="k", body="same") == "r2"
        assert await store.record("r2") == second
        assert await store.create(first, key="k", body="same") == "r2"


async def test_concurrent_changes_are_all_applied(tmp_path: Path) -> None:
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url, Store(url) as store:
        await store.create(RECORD)

        async def set_actors(count: int) -> None:
            await store.change_desired("r1", lambda desired: desired.model_copy(update={"actors": count}))

        await asyncio.gather(*(set_actors(count) for count in range(20)))
        assert (await store.desired("r1")).revision == 20


async def test_a_lease_has_one_owner_until_it_is_released_or_expires(tmp_path: Path) -> None:
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url, Store(url) as store:
        assert await store.lease("x", "a", 30)
        assert await store.lease("x", "a", 0.2)
        assert not await store.lease("x", "b", 30)
        await store.release("x", "b")
        assert not await store.lease("x", "b", 30)
        await asyncio.sleep(0.3)
        assert await store.lease("x", "b", 30)


async def test_writes_wait_for_an_unavailable_redis_and_arrive_exactly_once(tmp_path: Path) -> None:
    """The server is killed repeatedly, between and within writes; the run never waits for it."""
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url, Store(url) as store:
        socket = Path(url.removeprefix("unix://"))
        slowest = 0.0
        async with Outbox(url, "r1") as outbox:
            for step in range(1500):
                begun = time.perf_counter()
                outbox.step({"step": step}, {"trained": step})
                slowest = max(slowest, time.perf_counter() - begun)
                await asyncio.sleep(0.003)
                if step % 400 == 200:
                    for pid in _servers(socket):
                        os.kill(pid, signal.SIGKILL)
        steps = [row["step"] for _, row in await store.entries("r1", "metrics")]
        assert steps == list(range(1500)), "rows are in order, none lost or repeated"
        assert slowest < 0.1


async def test_no_server_process_is_left(tmp_path: Path) -> None:
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url:
        socket = Path(url.removeprefix("unix://"))
        assert socket.parent.stat().st_mode & 0o077 == 0, "others could connect"
        pids = _servers(socket)
        assert len(pids) == 1
    assert not socket.parent.exists()
    assert not _servers(socket)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # from redis-py, if it is cancelled while it connects
async def test_the_keeper_of_redis_ends_whenever_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes cancellation during a probe, which redis-py swallows if it has just sent a command."""
    monkeypatch.setattr(keeper, "PROBE_SECONDS", 0.0005)

    async def up_for(seconds: float) -> None:
        async with embedded_redis(tmp_path / "data", tmp_path / "redis.log"):
            await asyncio.sleep(seconds)

    for number in range(40):
        once = asyncio.create_task(up_for(number * 0.0007))
        done, _ = await asyncio.wait({once}, timeout=20)
        assert done
        await once
    gc.collect()


async def test_a_dead_server_is_one_clear_error(tmp_path: Path) -> None:
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url:
        pass
    async with Store(url, retries=1) as store:
        with pytest.raises(HostError, match="Redis does not answer after 1 retries"):
            await store.run_ids()
    with pytest.raises(HostError, match="Redis does not answer"):
        async with Outbox(url, "r1"):
            pass


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "unix:///nowhere/redis.sock", "http://x"])
async def test_a_redis_that_refuses_is_one_clear_error(url: str) -> None:
    with pytest.raises(HostError, match=r"does not answer: .*omit --redis"):
        await check_redis(url)


async def test_a_password_is_not_shown() -> None:
    with pytest.raises(HostError) as caught:
        await check_redis("redis://user:secret@127.0.0.1:1/0")
    assert "secret" not in str(caught.value)


async def test_an_unusable_data_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "data" / "appendonlydir").mkdir(parents=True)
    (tmp_path / "data" / "appendonly.aof").write_text("not an append-only file\n")
    with pytest.raises(HostError, match=r"Redis ended with code 1; .*Bad file format"):
        async with embedded_redis(tmp_path / "data", tmp_path / "redis.log"):
            pytest.fail("Redis started with a broken file")


def _servers(socket: Path) -> list[int]:
    listing = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listing.splitlines() if str(socket) in line]


async def test_who_is_cancelled_at_any_point_closes_the_connection(tmp_path: Path) -> None:
    async def use(url: str) -> None:
        async with Store(url) as store:
            await store.ping()

    async with embedded_redis(tmp_path / "redis", tmp_path / "redis.log") as url:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for turns in range(150):
                tasks = [asyncio.create_task(call(url)) for call in (check_redis, use)]
                for _ in range(turns):
                    await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            gc.collect()
    assert not [each.message for each in told if issubclass(each.category, ResourceWarning)]
