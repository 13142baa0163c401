"""The data of a run, read over the API and compared with what its driver wrote."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from services.store.redis import STREAMS, Store, run_key
from tests.integration.api.servers import Api, driver, flushed, make_run, observe

pytestmark = pytest.mark.integration


async def write(redis_url: str, run_id: str, stream: str, rows: list[dict[str, Any]]) -> None:
    """Append as a driver would."""
    async with driver(redis_url, run_id) as outbox:
        outbox.add(stream, *rows)
        await flushed(outbox)


async def get(api: Api, run_id: str, what: str, **params: Any) -> dict[str, Any]:
    answer = await api.http.get(f"/v1/runs/{run_id}/{what}", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_metrics_are_columns_with_nulls(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    assert await get(api, run_id, "metrics") == {"steps": [], "series": {}, "total": 0, "names": []}
    rows: list[dict[str, Any]] = [
        {"step": 0, "reward_mean": 0.5, "lag_histogram": {"0": 7}, "note": "text", "flag": True},
        {"step": 1, "reward_mean": math.nan, "lag_histogram": {"0": 5, "1": 2}},
        {"step": 2, "reward_mean": math.inf, "kl_k1": 1},
    ]
    await write(redis_url, run_id, "metrics", rows)
    await asyncio.sleep(0.25)
    assert await get(api, run_id, "metrics") == {
        "steps": [0, 1, 2],
        "series": {
            "kl_k1": [None, None, 1.0],
            "lag_histogram.0": [7.0, 5.0, None],
            "lag_histogram.1": [None, 2.0, None],
            "reward_mean": [0.5, None, None],
        },
        "total": 3,
        "names": ["kl_k1", "lag_histogram.0", "lag_histogram.1", "reward_mean"],
    }
    some = await get(api, run_id, "metrics", names="kl_k1,nonsense", **{"from": 1, "to": 1})
    assert (some["steps"], some["series"], some["total"]) == ([1], {"kl_k1": [None]}, 1)


async def test_a_resumed_run_replaces_its_rows(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    await write(redis_url, run_id, "metrics", [{"step": s, "a": s, "old": 1} for s in range(10)])
    assert (await get(api, run_id, "metrics"))["total"] == 10
    await asyncio.sleep(0.25)
    await write(redis_url, run_id, "metrics", [{"step": s, "a": -s} for s in (4, 5)])
    found = await get(api, run_id, "metrics")
    assert found["steps"] == [0, 1, 2, 3, 4, 5]
    assert found["series"]["a"] == [0, 1, 2, 3, -4, -5]
    assert found["series"]["old"] == [1, 1, 1, 1, None, None]


async def test_a_hundred_thousand_rows_are_read_without_blocking_others(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    async with Store(redis_url) as store:
        for start in range(0, 100_000, 5000):
            pipe = store._redis.pipeline(transaction=False)
            for step in range(start, start + 5000):
                pipe.xadd(run_key(run_id, "metrics"), {"json": json.dumps({"step": step, "a": step % 100})})
            await pipe.execute()
    asked = asyncio.create_task(get(api, run_id, "metrics", points=1000))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(2):
        await api.http.get("/healthz")  # other requests are answered while the table is read
    found = await asked
    assert found["total"] == 100_000
    assert found["steps"] == list(range(99, 100_000, 100))
    assert set(found["series"]["a"]) == {49.5}


async def test_events_page_by_page(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    rows = [{"kind": "even" if i % 2 == 0 else "odd", "time": float(i), "i": i} for i in range(25)]
    await write(redis_url, run_id, "events", rows)
    seen: list[int] = []
    after: dict[str, str] = {}
    while True:
        page = await get(api, run_id, "events", limit=10, **after)
        seen += [item["i"] for item in page["items"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert seen == list(range(25))
    odd = await get(api, run_id, "events", kind="odd", limit=5)
    assert [item["i"] for item in odd["items"]] == [1, 3, 5, 7, 9]
    rest = await get(api, run_id, "events", kind="odd", limit=50, after=odd["next"])
    assert [item["i"] for item in rest["items"]] == list(range(11, 25, 2))
    last = await get(api, run_id, "events", newest=True, limit=3)
    assert ([item["i"] for item in last["items"]], last["next"]) == ([22, 23, 24], None)
    assert (await api.http.get(f"/v1/runs/{run_id}/events", params={"after": "x"})).status_code == 422


def sample(step: int, group: int, i: int, **fields: Any) -> dict[str, Any]:
    return {
        "step": step,
        "group": group,
        "status": "passed" if i == 0 else "failed",
        "reward": 1.0 - i,
        "prompt_id": f"p{group}",
        "i": i,
        **fields,
    }


async def test_samples_newest_step_first_best_reward_first(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    rows = [sample(step, step * 10 + g, i) for step in (0, 10, 20) for g in range(2) for i in range(3)]
    await write(redis_url, run_id, "samples", rows)
    expected = [(step, step * 10 + g, i) for step in (20, 10, 0) for g in range(2) for i in range(3)]
    for limit in (1, 4, 50):
        seen: list[tuple[int, int, int]] = []
        cursor: dict[str, str] = {}
        while True:
            page = await get(api, run_id, "samples", limit=limit, **cursor)
            seen += [(item["step"], item["group"], item["i"]) for item in page["items"]]
            if page["next"] is None:
                break
            cursor = {"cursor": page["next"]}
        assert seen == expected
    assert (await api.http.get(f"/v1/runs/{run_id}/samples", params={"cursor": "x"})).status_code == 422


async def test_samples_can_be_filtered(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    rows = [sample(step, step * 10 + g, i) for step in (0, 10) for g in range(2) for i in range(3)]
    rows[0]["reward"] = None
    rows[0]["status"] = "infra_error"
    await write(redis_url, run_id, "samples", rows)
    for params, count in (
        ({"step": 10}, 6),
        ({"group": 1}, 3),
        ({"status": "passed"}, 3),
        ({"status": "infra_error"}, 1),
        ({"prompt_id": "p100"}, 3),
        ({"min_reward": 0.5}, 3),
        ({"min_reward": -5, "step": 0}, 5),
        ({"status": "passed", "step": 0, "group": 1}, 1),
    ):
        assert len((await get(api, run_id, "samples", **params))["items"]) == count, params


async def test_samples_rewritten_by_a_resumed_run_are_replaced(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    await write(redis_url, run_id, "samples", [sample(s, s, i, life=1) for s in (0, 10, 20) for i in range(2)])
    assert len((await get(api, run_id, "samples"))["items"]) == 6
    await asyncio.sleep(0.25)
    await write(redis_url, run_id, "samples", [sample(10, 10, i, life=2) for i in range(2)])
    items = (await get(api, run_id, "samples"))["items"]
    assert [(item["step"], item["life"]) for item in items] == [(10, 2), (10, 2), (0, 1), (0, 1)]


async def test_samples_are_available_after_the_stream_was_trimmed(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    await write(redis_url, run_id, "samples", [sample(step, step, 0) for step in range(10)])
    assert len((await get(api, run_id, "samples"))["items"]) == 10
    async with Store(redis_url) as store:
        await store._redis.xtrim(run_key(run_id, "samples"), maxlen=4, approximate=False)
    assert [item["step"] for item in (await get(api, run_id, "samples"))["items"]] == [9, 8, 7, 6]


async def test_evaluations_timeline_and_ledger(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    await write(redis_url, run_id, "evaluations", [{"version": v, "life": 1} for v in (0, 10, 20)])
    await write(redis_url, run_id, "evaluations", [{"version": 10, "life": 2}])
    assert (await get(api, run_id, "evaluations"))["items"] == [{"version": 0, "life": 1}, {"version": 10, "life": 2}]
    spans = [["actor-0", "generate", 1.0, 2.0]]
    await write(redis_url, run_id, "timeline", [{"step": s, "time": 0.0, "spans": spans} for s in range(30)])
    assert [item["step"] for item in (await get(api, run_id, "timeline"))["items"]] == list(range(10, 30))
    assert [item["step"] for item in (await get(api, run_id, "timeline", steps=1))["items"]] == [29]
    async with driver(redis_url, run_id) as outbox:
        outbox.step({"step": 0}, {"admitted": 8, "trained": 8})
        await flushed(outbox)
    assert await get(api, run_id, "ledger") == {"counts": {"admitted": 8, "trained": 8}}


async def test_nan_and_infinity_are_null(redis_url: str, api: Api) -> None:
    run_id = await make_run(api)
    for stream in ("events", "evaluations", "timeline", "samples"):
        row = {**sample(0, 0, 0), "kind": "k", "time": 1.0, "version": 0, "value": math.nan, "deep": [math.inf]}
        await write(redis_url, run_id, stream, [row])
        (item,) = (await get(api, run_id, stream))["items"]
        assert (item["value"], item["deep"]) == (None, [None])


async def test_logs_are_read_in_pieces(redis_url: str, api: Api, runs: Path) -> None:
    run_id = await make_run(api)
    logs = runs / run_id / "logs"
    assert (await get(api, run_id, "logs"))["items"] == [{"process": "driver", "bytes": None}]
    logs.mkdir(parents=True)
    (logs / "actor-0.log").write_text("first line\nsecond line\n")
    (logs / "secret.log").symlink_to("/etc/passwd")
    (logs / "redis").mkdir()
    (runs / run_id / "outside.log").write_text("not in logs")
    items = (await get(api, run_id, "logs"))["items"]
    assert items == [{"process": "driver", "bytes": None}, {"process": "actor-0", "bytes": 23}]

    async def log(process: str, **params: Any) -> tuple[int, str]:
        answer = await api.http.get(f"/v1/runs/{run_id}/logs/{process}", params=params)
        return answer.status_code, answer.text

    assert await log("actor-0") == (200, "first line\nsecond line\n")
    assert await log("actor-0", tail=15) == (200, "second line\n")
    assert await log("driver") == (200, f"driver of {run_id}")
    for process in ("secret", "redis", "nobody", "..%2Foutside", "%2Fetc%2Fpasswd", "actor-0.log%00"):
        status, text = await log(process)
        assert status in (404, 422), process
        assert "root:" not in text


async def test_data_is_still_there_after_a_restart(redis_url: str, api: Api, runs: Path) -> None:
    from tests.integration.api.servers import serving

    run_id = await make_run(api, "kept")
    await write(redis_url, run_id, "metrics", [{"step": 0, "a": 1.0}])
    await observe(redis_url, run_id, state="done", step=1)
    async with serving(redis_url, runs=runs) as other:
        assert (await other.http.get(f"/v1/runs/{run_id}")).json() == (await api.http.get(f"/v1/runs/{run_id}")).json()
        assert (await get(other, run_id, "metrics"))["series"] == {"a": [1.0]}


async def test_every_stream_has_a_route() -> None:
    from services.api.routes import data

    paths = {route.path.rpartition("/")[2] for route in data.read.routes if hasattr(route, "path")}
    assert set(STREAMS) <= paths
