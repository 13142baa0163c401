"""Runs over the API with a real Redis: created, listed, changed, stopped, resumed, deleted."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.store.redis import QUEUE_KEY, Store, run_key
from tests.integration.api.servers import Api, a_job, make_run, observe, serving
from volley.errors import JobError

pytestmark = pytest.mark.integration


def problem(answer: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """The problem document in ``answer``; asserts its status and kind."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["type"] == f"urn:volley:problem:{kind}"
    assert document["status"] == status
    assert document["title"]
    return document


async def test_a_run_is_created_and_found(api: Api, runs: Path) -> None:
    before = time.time()
    answer = await api.http.post("/v1/runs", json={"job": a_job("first"), "tags": {"team": "a"}})
    assert answer.status_code == 201
    view = answer.json()
    record = view["record"]
    assert answer.headers["location"] == f"/v1/runs/{record['id']}"
    assert answer.headers["etag"] == '"0"'
    assert (record["name"], record["kind"], record["tags"]) == ("first", "rl", {"team": "a"})
    assert before <= record["created"] <= time.time()
    assert record["folder"] == str(runs / record["id"])
    assert record["job"]["checkpoint"] is not None, "the job is resolved: every default is written out"
    assert view["state"] == view["observed"]["state"] == "queued"
    assert (await api.http.get(answer.headers["location"])).json() == view


async def test_the_same_idempotency_key_creates_one_run(api: Api) -> None:
    async def post(job: dict[str, Any]) -> httpx.Response:
        return await api.http.post("/v1/runs", json={"job": job}, headers={"Idempotency-Key": "once"})

    answers = await asyncio.gather(*(post(a_job("once")) for _ in range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
    assert len({answer.json()["record"]["id"] for answer in answers}) == 1
    assert len({answer.json()["record"]["folder"] for answer in answers}) == 1
    assert len((await api.http.get("/v1/runs", params={"name": "once"})).json()["items"]) == 1
    problem(await post(a_job("twice")), 409, "idempotency-key-used")


async def test_an_accepted_job_is_not_checked_again(redis_url: str) -> None:
    """A client that gave up waiting for the check and asks again is answered immediately."""
    checked: list[str] = []

    async def slowly(job: Any) -> None:
        checked.append(job.name)
        await asyncio.sleep(0.5)

    async with serving(redis_url, checker=slowly) as api:
        about: dict[str, Any] = {"json": {"job": a_job("slow")}, "headers": {"Idempotency-Key": "slow"}}
        with pytest.raises(httpx.ReadTimeout):
            await api.http.post("/v1/runs", **about, timeout=0.1)
        answers = await asyncio.gather(*(api.http.post("/v1/runs", **about) for _ in range(3)))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert checked == ["slow"]


async def test_an_invalid_job_is_rejected_with_advice(api: Api) -> None:
    bad = a_job(steps=0, sampling={"n": 8, "max_token": 1})
    document = problem(await api.http.post("/v1/runs", json={"job": bad}), 422, "invalid-job")
    assert {error["pointer"] for error in document["errors"]} == {"/job/rl/steps", "/job/rl/sampling/max_token"}
    assert "unknown key" in document["detail"]
    document = problem(await api.http.post("/v1/runs", json={"jobs": {}}), 422, "invalid-request")
    assert {error["pointer"] for error in document["errors"]} == {"/job", "/jobs"}


@pytest.mark.parametrize(
    ("changes", "pointer", "words"),
    [
        ({"scorer": {"kind": "python", "target": "os:system"}}, "/job/scorer/target", "allow_code"),
        ({"scorer": {"kind": "python", "target": "scorers_of_others:f"}}, "/job/scorer/target", "allow_code"),
        (
            {"scorer": {"kind": "sum", "terms": [{"scorer": {"kind": "python", "target": "os:system"}}]}},
            "/job/scorer/terms/0/scorer/target",
            "allow_code",
        ),
        ({"actors": {"engine": {"worker_cls": "os.system"}}}, "/job/actors/engine/worker_cls", "allow_code"),
        ({"data": {"path": "prompts.jsonl"}}, "/job/data/path", "relative"),
        ({"scorer": {"kind": "http", "url": "http://me:hunter2@host/score"}}, "/job/scorer/url", "token_env"),
        ({"scorer": {"kind": "http", "url": "http://host/score?api_key=hunter2"}}, "/job/scorer/url", "token_env"),
        (
            {"scorer": {"kind": "http", "url": "http://host/", "token_env": "RAY_AUTH_TOKEN"}},
            "/job/scorer/token_env",
            "scorer_env",
        ),
    ],
)
async def test_a_job_that_this_server_does_not_accept(
    api: Api, changes: dict[str, Any], pointer: str, words: str
) -> None:
    for path in ("/v1/runs", "/v1/jobs/check"):
        document = problem(await api.http.post(path, json={"job": a_job(**changes)}), 422, "job-not-taken")
        assert [error["pointer"] for error in document["errors"]] == [pointer]
        assert words in document["detail"]
        assert "hunter2" not in document["detail"]


async def test_allowed_code_is_accepted(api: Api) -> None:
    for target in ("scorers:f", "scorers.countdown:f"):
        job = a_job(scorer={"kind": "python", "target": target}, actors={"engine": {"enforce_eager": True}})
        assert (await api.http.post("/v1/jobs/check", json={"job": job})).json() == {"ok": True}


async def test_errors_of_the_job_check_are_returned(redis_url: str) -> None:
    async def refuse(job: Any) -> None:
        raise JobError(f"{job.data.path}:3: the row has no prompt")

    async with serving(redis_url, checker=refuse) as api:
        document = problem(await api.http.post("/v1/runs", json={"job": a_job()}), 422, "invalid-job")
        assert document["detail"] == "/data/prompts.jsonl:3: the row has no prompt"


async def test_runs_are_paged_and_filtered(redis_url: str, api: Api) -> None:
    ids = [await make_run(api, f"page-{i}") for i in range(7)]
    await observe(redis_url, ids[3], state="done", step=16)
    seen: list[str] = []
    cursor = None
    while True:
        params: dict[str, str | int] = {"name": "PAGE-", "limit": 3, **({"cursor": cursor} if cursor else {})}
        page = (await api.http.get("/v1/runs", params=params)).json()
        seen += [item["id"] for item in page["items"]]
        if len(seen) == 3:
            ids.append(await make_run(api, "page-late"))  # a newer run does not shift later pages
        if (cursor := page["next"]) is None:
            break
    assert seen == list(reversed(ids[:7]))
    done = (await api.http.get("/v1/runs", params={"name": "page-", "state": "done"})).json()
    assert [item["id"] for item in done["items"]] == [ids[3]]
    assert (await api.http.get("/v1/runs", params={"name": "page-", "kind": "sft"})).json()["items"] == []
    problem(await api.http.get("/v1/runs", params={"cursor": "nonsense"}), 422, "invalid-request")


async def test_tag_filters_are_combined(api: Api) -> None:
    for tags in ({"a": "1"}, {"a": "1", "b": "x=y"}):
        await api.http.post("/v1/runs", json={"job": a_job("tagged"), "tags": tags})
    asked: tuple[tuple[tuple[str, ...], int], ...] = ((("a=1",), 2), (("a=1", "b=x=y"), 1), (("a=",), 0))
    for tags_asked, count in asked:
        params = httpx.QueryParams([("tag", tag) for tag in tags_asked])
        assert len((await api.http.get("/v1/runs", params=params)).json()["items"]) == count


async def test_a_summary_has_progress_and_newest_metrics(redis_url: str, api: Api) -> None:
    run_id = await make_run(api, "summed")
    async with Store(redis_url) as store:
        for step in range(50):
            await store._redis.xadd(f"volley:run:{run_id}:metrics", {"json": f'{{"step":{step},"reward_mean":{step}}}'})
    await observe(
        redis_url, run_id, state="running", step=50, steps=60, actors=2, reward_workers=3, updated=time.time()
    )
    (item,) = (await api.http.get("/v1/runs", params={"name": "summed"})).json()["items"]
    assert (item["state"], item["step"], item["steps"], item["actors"]) == ("running", 50, 60, 2)
    assert item["objective"] == "max_at_k k=4"
    assert item["spark"] == [float(step) for step in range(10, 50)]
    await observe(redis_url, run_id, state="running", step=50, updated=time.time() - 60)
    assert (await api.http.get(f"/v1/runs/{run_id}")).json()["state"] == "lost"


async def test_desired_changes_accumulate(api: Api) -> None:
    run_id = await make_run(api)
    path = f"/v1/runs/{run_id}"
    first = await api.http.patch(path, json={"actors": 3, "objective": {"k": 2}})
    assert first.status_code == 200, first.text
    assert first.headers["etag"] == '"1"'
    second = (await api.http.patch(path, json={"paused": True, "objective": {"center": True}})).json()["desired"]
    assert (second["actors"], second["paused"], second["objective"]) == (3, True, {"k": 2, "center": True})
    third = (await api.http.patch(path, json={"actors": None, "objective": None, "paused": None})).json()["desired"]
    assert (third["actors"], third["paused"], third["objective"], third["revision"]) == (None, False, {}, 3)


async def test_a_change_based_on_an_old_revision_is_rejected(api: Api) -> None:
    path = f"/v1/runs/{await make_run(api)}"
    answers = await asyncio.gather(
        *(api.http.patch(path, json={"actors": count}, headers={"If-Match": '"0"'}) for count in range(1, 9))
    )
    assert sorted(answer.status_code for answer in answers) == [200] + [412] * 7
    problem(next(answer for answer in answers if answer.status_code == 412), 412, "changed-meanwhile")
    await asyncio.gather(*(api.http.patch(path, json={"actors": count}) for count in range(1, 9)))
    assert (await api.http.get(path)).json()["desired"]["revision"] == 9, "without If-Match every change is applied"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": {"k": 99}}, "k"),
        ({"objective": {"kk": 1}}, "kk"),
        ({}, "name what to change"),
        ({"learning_rate": 0}, "greater than 0"),
        ({"actors": -1}, "greater than or equal to 0"),
        ({"revision": 7}, "no such field"),
        ({"stopped": True}, "no such field"),
    ],
)
async def test_changes_that_can_not_be(api: Api, changes: dict[str, Any], words: str) -> None:
    path = f"/v1/runs/{await make_run(api)}"
    answer = await api.http.patch(path, json=changes)
    assert answer.status_code == 422
    assert words in answer.json()["detail"]
    assert (await api.http.get(path)).json()["desired"]["revision"] == 0


async def test_a_run_is_stopped_resumed_and_deleted(redis_url: str, api: Api) -> None:
    run_id = await make_run(api, "mortal")
    path = f"/v1/runs/{run_id}"
    problem(await api.http.delete(path), 409, "run-is-live")
    for _ in range(2):
        stopped = await api.http.post(f"{path}/stop")
        assert stopped.status_code == 202
        assert (stopped.json()["desired"]["stopped"], stopped.json()["desired"]["revision"]) == (True, 1)
    await observe(redis_url, run_id, state="stopped", step=3, ended=time.time())
    problem(await api.http.patch(path, json={"actors": 1}), 409, "run-has-ended")
    resumed = await api.http.post(f"{path}/resume")
    assert resumed.status_code == 202
    assert (resumed.json()["desired"]["stopped"], resumed.json()["desired"]["revision"]) == (False, 2)
    await observe(redis_url, run_id, state="done", step=16, ended=time.time())
    problem(await api.http.post(f"{path}/resume"), 409, "run-has-ended")
    assert (await api.http.delete(path)).status_code == 204
    for answer in (await api.http.get(path), await api.http.delete(path), await api.http.get(f"{path}/metrics")):
        problem(answer, 404, "no-such-run")
    assert (await api.http.get("/v1/runs", params={"name": "mortal"})).json()["items"] == []


async def test_a_run_that_this_release_cannot_read_hides_no_other(redis_url: str, api: Api) -> None:
    odd, plain = await make_run(api, "odd"), await make_run(api, "plain")
    async with Store(redis_url) as store:
        await store._redis.set(run_key(odd, "observed"), json.dumps({"state": "as of tomorrow"}))
        await store._redis.hset(QUEUE_KEY, odd, "{}")
    listed = (await api.http.get("/v1/runs", params={"name": "plain"})).json()["items"]
    everything = (await api.http.get("/v1/runs")).json()["items"]
    assert [each["id"] for each in listed] == [plain]
    assert odd not in [each["id"] for each in everything]
    problem(await api.http.get(f"/v1/runs/{odd}"), 409, "run-of-another-release")
    for path in ("/v1/queue", "/v1/cluster", "/metrics"):
        assert (await api.http.get(path)).status_code == 200, path
    async with Store(redis_url) as store:
        await store.move([], [odd], {})
        await store.delete(odd)


async def test_the_view_tells_where_the_model_is(redis_url: str, api: Api, runs: Path) -> None:
    run_id = await make_run(api)
    path = f"/v1/runs/{run_id}/export"
    nothing = (await api.http.post(path)).json()
    assert (nothing["checkpoint"], nothing["ready"]) == (None, False)
    for name in ("step-4", "step-12", ".step-16.partial"):
        (runs / run_id / "checkpoints" / name).mkdir(parents=True)
    newest = (await api.http.post(path, json={"checkpoint": None})).json()
    assert newest == {
        "run": run_id,
        "checkpoint": 12,
        "path": str(runs / run_id / "checkpoints" / "step-12"),
        "ready": True,
    }
    assert (await api.http.post(path, json={"checkpoint": 8})).json()["ready"] is False
    (runs / run_id / "model").mkdir()
    await observe(redis_url, run_id, state="done", step=16, ended=time.time())
    done = (await api.http.post(path)).json()
    assert (done["checkpoint"], done["path"], done["ready"]) == (None, str(runs / run_id / "model"), True)
