"""A server that several people use: priorities, quotas, the queue and the audit, with a real Redis."""

import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from services.store.redis import Store
from tests.integration.api.servers import ADMIN, Api, a_job, observe, serving
from volley.client import AsyncClient
from volley.errors import ApiError, InvalidRequest, NotAllowed
from volley.state import Limits, Place

pytestmark = pytest.mark.integration


@pytest.fixture
async def guarded(redis_url: str) -> AsyncIterator[Api]:
    async with Store(redis_url) as store:
        await store._redis.flushdb()
    async with serving(redis_url, admin_token=ADMIN) as up:
        yield up


@contextlib.asynccontextmanager
async def user(api: Api, name: str, **limits: Any) -> AsyncIterator[AsyncClient]:
    """A client with a token of its own."""
    made = await api.client.create_token(name, "operate", Limits(**limits))
    async with AsyncClient(api.url, made.token) as client:
        yield client


async def put(redis_url: str, run: str, owner: str, resources: Mapping[str, float], **fields: Any) -> None:
    """Write a place as the supervisor would."""
    place = {"run": run, "owner": owner, "priority": 0, "submitted": 1.0, "since": 1.0, **fields}
    async with Store(redis_url) as store:
        await store.move([Place.model_validate({**place, "resources": resources, "most": resources})], (), {})


async def test_a_token_bounds_the_priority_of_its_runs(guarded: Api) -> None:
    async with user(guarded, "alice", priority=2) as alice:
        run = await alice.submit(a_job("a"), priority=2)
        view = await run.view()
        assert (view.record.owner, view.desired.priority) == ("alice", 2)
        with pytest.raises(NotAllowed, match="volley token limit alice --priority 3"):
            await alice.submit(a_job("a"), priority=3)
        assert (await run.set(priority=-1)).desired.priority == -1
        with pytest.raises(NotAllowed, match="at most 2"):
            await run.set(priority=3)
        raised = await (await guarded.client.run(run.id)).set(priority=10)
        assert raised.desired.priority == 10, "an administrator may"
        assert (await run.set(max_lag=1)).desired.priority == 10, "other changes are not affected"
        with pytest.raises(InvalidRequest):
            await alice.submit(a_job("a"), priority=11)


async def test_a_run_that_exceeds_a_quota_alone_is_rejected(guarded: Api, redis_url: str) -> None:
    async with user(guarded, "alice", runs=2, cpus=4) as alice:
        with pytest.raises(InvalidRequest, match=r"needs 5\.2 CPUs, and the quota of alice is 4"):
            await alice.submit(a_job("a", actors={"count": 4}, reward_workers={"count": 2}))
        with pytest.raises(InvalidRequest, match="the quota of alice is 4"):
            await alice.submit(a_job("a", actors={"max_count": 8}))
        run = await alice.submit(a_job("a"))
        await observe(redis_url, run.id, state="running", updated=time.time())
        await put(redis_url, run.id, "alice", {"CPU": 2.1}, state="admitted")
        await put(redis_url, "other", "alice", {"CPU": 1.0}, state="admitted")
        for actors, words in ((9, "needs 10.1 CPUs"), (2, "would hold 3.1 CPUs and other runs of alice hold 1")):
            with pytest.raises(ApiError, match=words):
                await run.scale(actors=actors)
        await guarded.client.limit_token("alice", Limits(cpus=4.1))
        assert (await run.scale(actors=2)).desired.actors == 2


async def test_the_queue_shows_who_holds_what_and_who_waits(guarded: Api, redis_url: str) -> None:
    await put(redis_url, "second", "bob", {"CPU": 1.0}, position=2, reason="quota")
    await put(redis_url, "first", "alice", {"CPU": 2.0, "GPU": 1.0}, position=1, reason="waits for 1 GPU")
    await put(redis_url, "holds", "alice", {"CPU": 3.0}, state="admitted")
    await put(redis_url, "stops", "bob", {"CPU": 1.0}, state="stopping", preempted_by="first")
    async with user(guarded, "alice", runs=2) as alice:
        queue = await alice.queue()
    assert [place.run for place in queue.items] == ["holds", "stops", "first", "second"]
    assert [(each.name, each.runs, each.cpus, each.gpus) for each in queue.owners] == [
        ("alice", 1, 3.0, 0.0),
        ("bob", 1, 1.0, 0.0),
    ]
    assert [each.limits.runs for each in queue.owners] == [2, None]


async def test_every_change_is_recorded_with_who_made_it_and_without_secrets(guarded: Api, redis_url: str) -> None:
    async with user(guarded, "alice", priority=1) as alice:
        run = await alice.submit(a_job("a"), priority=1, key="once")
        assert (await alice.submit(a_job("a"), priority=1, key="once")).id == run.id
        await run.set(k=2)
        with pytest.raises(InvalidRequest):
            await run.set(k=99)
        await run.stop()
        await run.stop()
        await run.resume()
        with pytest.raises(NotAllowed):
            await alice.audit()
    await observe(redis_url, run.id, state="done", updated=time.time())
    await (await guarded.client.run(run.id)).delete()
    await guarded.client.limit_token("alice", Limits(runs=3))
    await guarded.client.delete_token("alice")
    found = await guarded.client.audit()
    told = [(each.who, each.action, each.run, each.details) for each in reversed(found)]
    none = {"runs": None, "cpus": None, "gpus": None, "priority": 0}
    assert told == [
        ("bootstrap", "create token", "", {**none, "priority": 1, "token": "alice", "scope": "operate"}),
        ("alice", "submit", run.id, {"name": "a", "kind": "rl", "priority": 1}),
        ("alice", "set", run.id, {"objective": {"k": 2}}),
        ("alice", "stop", run.id, {}),
        ("alice", "resume", run.id, {}),
        ("bootstrap", "delete", run.id, {}),
        ("bootstrap", "limit token", "", {**none, "runs": 3, "token": "alice"}),
        ("bootstrap", "delete token", "", {"token": "alice"}),
    ]
    assert ADMIN not in json.dumps([each.model_dump() for each in found])
    assert "sha256" not in str(told)
    assert [each.action for each in await guarded.client.audit(2, who="alice")] == ["resume", "stop"]
    assert [each.action for each in await guarded.client.audit(run=run.id)] == [
        "delete",
        "resume",
        "stop",
        "set",
        "submit",
    ]


async def test_a_token_that_submits_no_runs_gets_no_limits(guarded: Api) -> None:
    with pytest.raises(InvalidRequest, match="submits no runs to limit: give it scope operate, or no runs and no cpus"):
        await guarded.client.create_token("ci", "read", Limits(runs=2, cpus=1))
    await guarded.client.create_token("ci", "read")
    with pytest.raises(InvalidRequest, match=r"ci: a token of scope read submits no runs .* or no priority"):
        await guarded.client.limit_token("ci", Limits(priority=3))
    assert (await guarded.client.limit_token("ci", Limits())).limits == Limits(), "limits of old tokens can be removed"


async def test_the_audit_has_pages(guarded: Api) -> None:
    for number in range(5):
        await guarded.client.create_token(f"t{number}", "read")
    first = (await guarded.http.get("/v1/audit", params={"limit": 3})).json()
    assert [each["details"]["token"] for each in first["items"]] == ["t4", "t3", "t2"]
    rest = (await guarded.http.get("/v1/audit", params={"limit": 3, "before": first["next"]})).json()
    assert [each["details"]["token"] for each in rest["items"]] == ["t1", "t0"]
    assert rest["next"] is None
    assert (await guarded.http.get("/v1/audit", params={"before": "0-0"})).json() == {"items": [], "next": None}
