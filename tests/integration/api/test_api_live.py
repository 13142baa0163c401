"""Live views: no event is lost or repeated, all viewers share one reader, and views end within seconds."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from services.store.redis import Store
from tests.integration.api.servers import ADMIN, Api, driver, flushed, make_run, observe, serving

pytestmark = pytest.mark.integration

Seen = tuple[str, str | None, Any]  # kind, id, data


class Watcher:
    """A client of a live view."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self.lines = answer.aiter_lines()
        self.last_id: str | None = None

    async def next(self, seconds: float = 10) -> Seen:
        """The next event; pings are skipped."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(seconds):
            async for line in self.lines:
                if line:
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif "event" in fields:
                    self.last_id = fields.get("id", self.last_id)
                    return fields["event"], fields.get("id"), json.loads(fields["data"])
                else:
                    fields = {}
        raise EOFError

    async def until(self, kind: str, seconds: float = 10) -> Any:
        async with asyncio.timeout(seconds):
            while True:
                found, _, data = await self.next(seconds)
                if found == kind:
                    return data


@asynccontextmanager
async def watching(api: Api, path: str, last_id: str | None = None) -> AsyncIterator[Watcher]:
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    async with api.http.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Watcher(answer)


async def write_steps(redis_url: str, run_id: str, steps: range) -> None:
    async with driver(redis_url, run_id) as outbox:
        for step in steps:
            outbox.step({"step": step, "reward_mean": 0.5}, {})
            outbox.add("events", {"kind": "tick", "time": float(step), "step": step})
        await flushed(outbox)


async def test_a_view_shows_new_events(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    await write_steps(redis_url, run_id, range(3))  # before anyone is watching
    async with watching(api, f"/v1/runs/{run_id}/live") as watcher:
        kind, event_id, state = await watcher.next()
        assert (kind, state["state"]) == ("observed", "queued")
        assert event_id is not None, "a client can reconnect after any event"
        assert set(state) == {"desired", "observed", "state"}
        await write_steps(redis_url, run_id, range(3, 5))
        assert (await watcher.until("metrics"))["rows"][0]["step"] == 3
        assert (await watcher.until("events"))["items"][0]["step"] == 3
        await observe(redis_url, run_id, state="running", step=5, updated=time.time())
        assert (await watcher.until("observed"))["observed"]["step"] == 5
        await api.http.patch(f"/v1/runs/{run_id}", json={"actors": 2})
        assert (await watcher.until("observed"))["desired"]["actors"] == 2


async def test_a_reconnecting_client_misses_nothing_and_sees_nothing_twice(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    steps, last_id = 300, None
    seen: dict[str, list[int]] = {"metrics": [], "events": []}

    async def run() -> None:
        async with driver(redis_url, run_id) as outbox:
            for step in range(steps):
                outbox.step({"step": step}, {})
                outbox.add("events", {"kind": "tick", "time": 0.0, "step": step})
                await asyncio.sleep(0.01)

    async with watching(api, f"/v1/runs/{run_id}/live") as watcher:
        await watcher.next()
        last_id = watcher.last_id
    writing = asyncio.create_task(run())
    async with asyncio.timeout(60), serving(redis_url) as other:
        turn = 0
        while min(map(len, seen.values())) < steps:
            turn += 1
            async with watching((api, other)[turn % 2], f"/v1/runs/{run_id}/live", last_id) as watcher:
                for _ in range(turn % 4 + 1):  # it disconnects after a few events, at any point
                    if min(map(len, seen.values())) >= steps:
                        break
                    kind, _, data = await watcher.next()
                    if kind in seen:
                        seen[kind] += [item["step"] for item in data["rows" if kind == "metrics" else "items"]]
                last_id = watcher.last_id
    await writing
    assert turn > 5
    assert seen == {"metrics": list(range(steps)), "events": list(range(steps))}


async def test_all_viewers_share_one_reader(redis_url: str) -> None:
    async with serving(redis_url) as api, Store(redis_url) as store:
        run_id = await make_run(api)

        async def watch() -> list[int]:
            async with watching(api, f"/v1/runs/{run_id}/live") as watcher:
                await watcher.next()
                ready.release()
                steps: list[int] = []
                while len(steps) < 40:
                    steps += [row["step"] for row in (await watcher.until("metrics", 20))["rows"]]
                return steps

        ready = asyncio.Semaphore(0)
        viewers = [asyncio.create_task(watch()) for _ in range(50)]
        for _ in viewers:
            await asyncio.wait_for(ready.acquire(), 20)
        before = (await store._redis.info("commandstats"))["cmdstat_xread"]["calls"]
        begun = time.monotonic()
        await write_steps(redis_url, run_id, range(40))
        assert await asyncio.gather(*viewers) == [list(range(40))] * 50
        reads = (await store._redis.info("commandstats"))["cmdstat_xread"]["calls"] - before
        assert reads <= 6 * (time.monotonic() - begun) + 6, "the number of reads does not grow with the viewers"


async def test_the_reader_ends_with_the_last_viewer(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    live = api.server.config.app.state.context.live  # type: ignore[union-attr]
    async with watching(api, f"/v1/runs/{run_id}/live") as watcher:
        await watcher.next()
        assert run_id in live._feeds
    async with asyncio.timeout(5):
        while live.clients:  # noqa: ASYNC110 - the server notices by itself
            await asyncio.sleep(0.02)
    assert not live._feeds


async def test_the_list_of_runs_is_live(redis_url: str, api: Api) -> None:
    async with watching(api, "/v1/live") as watcher:
        assert isinstance((await watcher.until("runs"))["items"], list)
        run_id = await make_run(api, "shown")
        items = (await watcher.until("runs"))["items"]
        assert items[0]["id"] == run_id
        await observe(redis_url, run_id, state="running", step=1, updated=time.time())
        items = (await watcher.until("runs"))["items"]
        assert (items[0]["state"], items[0]["step"]) == ("running", 1)


async def test_a_deleted_run_ends_its_views(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    await observe(redis_url, run_id, state="done")
    async with watching(api, f"/v1/runs/{run_id}/live") as watcher:
        await watcher.next()
        await api.http.delete(f"/v1/runs/{run_id}")
        await watcher.until("deleted")
        with pytest.raises(EOFError):
            await watcher.next()


@pytest.mark.parametrize("last_id", ["x", "1-0", "1-0.1-0", "1-0.1-0.1-0.1-0", "١-0.1-0.1-0", "-1-0.1-0.1-0"])
async def test_an_invalid_event_id_is_rejected(api: Api, last_id: str) -> None:
    run_id = await make_run(api)
    headers = {b"Last-Event-ID": last_id.encode()}
    answer = await api.http.get(f"/v1/runs/{run_id}/live", headers=headers)
    assert answer.status_code == 422


async def test_the_number_of_viewers_is_limited(redis_url: str) -> None:
    async with serving(redis_url, live_clients=2) as api:
        async with watching(api, "/v1/live") as one, watching(api, "/v1/live") as two:
            await one.next()
            await two.next()
            refused = await api.http.get("/v1/live")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        async with asyncio.timeout(5):
            while api.server.config.app.state.context.live.clients:  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        async with watching(api, "/v1/live") as three:
            await three.next()


async def test_views_end_within_two_seconds_after_the_server_stops(redis_url: str) -> None:
    async with serving(redis_url) as api:
        run_id = await make_run(api)
        async with watching(api, f"/v1/runs/{run_id}/live") as watcher:
            await watcher.next()
            begun = time.monotonic()
            api.server.should_exit = True
            with pytest.raises(EOFError):
                await watcher.until("never")
            assert time.monotonic() - begun < 2


async def test_a_view_ends_when_its_token_is_revoked_and_others_go_on(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.api.auth.RECHECK_SECONDS", 0.2)
    async with serving(redis_url, admin_token=ADMIN) as api:
        made = (await api.http.post("/v1/tokens", json={"name": "viewer", "scope": "read"})).json()
        own = {"Authorization": f"Bearer {made['token']}"}
        async with watching(api, "/v1/live") as kept, api.http.stream("GET", "/v1/live", headers=own) as answer:
            watcher = Watcher(answer)
            await watcher.next()
            await kept.next()
            assert (await api.http.delete("/v1/tokens/viewer")).status_code == 204
            with pytest.raises(EOFError):
                await watcher.until("never", 20)
            await make_run(api)
            await kept.until("runs")
