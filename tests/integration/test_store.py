"""The run store and the embedded Redis: a real server, really killed."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from services.local_redis import check_redis, embedded_redis
from services.store import RunStore
from volley.errors import HostError

pytestmark = pytest.mark.integration


async def test_what_was_written_is_read_and_outlives_the_server(tmp_path: Path) -> None:
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url, RunStore(url, "r1") as store:
        await store.put_record({"id": "r1", "state": "running"})
        await store.add_step({"step": 0, "reward_mean": 0.5}, {"admitted": 4, "trained": 2})
        await store.add_event("evaluation", version=0)
        await asyncio.sleep(1.2)  # the append-only file is synced every second
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url, RunStore(url, "r1") as store:
        assert await store.record() == {"id": "r1", "state": "running"}
        assert await store.metrics() == [{"step": 0, "reward_mean": 0.5}]
        assert await store.ledger() == {"admitted": 4, "trained": 2}
        (event,) = await store.events()
        assert (event["kind"], event["version"]) == ("evaluation", 0)
        async with RunStore(url, "other") as other:
            assert await other.record() is None


async def test_nothing_is_left_behind(tmp_path: Path) -> None:
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url:
        socket = Path(url.removeprefix("unix://"))
        assert socket.parent.stat().st_mode & 0o077 == 0, "others could connect"
        pids = _servers(socket)
        assert len(pids) == 1
    assert not socket.parent.exists()
    assert not _servers(socket)


async def test_a_dead_server_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.store.RETRIES", 1)
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url, RunStore(url, "r1") as store:
        (pid,) = _servers(Path(url.removeprefix("unix://")))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(HostError, match="Redis stayed away through 1 tries"):
            await store.add_event("late")


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "unix:///nowhere/redis.sock", "http://x"])
async def test_a_redis_that_refuses_is_one_clear_error(url: str) -> None:
    with pytest.raises(HostError, match=r"refuses: .*leave out --redis"):
        await check_redis(url)


async def test_a_password_is_not_shown() -> None:
    with pytest.raises(HostError) as caught:
        await check_redis("redis://user:secret@127.0.0.1:1/0")
    assert "secret" not in str(caught.value)


async def test_an_unusable_data_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "data" / "appendonlydir").mkdir(parents=True)
    (tmp_path / "data" / "appendonly.aof").write_text("not an append-only file\n")
    with pytest.raises(HostError, match="the embedded Redis did not start"):
        async with embedded_redis(tmp_path / "data", tmp_path / "redis.log"):
            pytest.fail("started on a broken file")


def _servers(socket: Path) -> list[int]:
    listing = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listing.splitlines() if str(socket) in line]
