"""Webhooks with a real Redis and a real receiver; Ray is a fake that the test controls."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.notifications import deliveries, local
from services.notifications.deliveries import ATTEMPTS, Deliveries
from services.notifications.local import notifying
from services.notifications.sending import Sender
from services.notifications.watch import Watch
from services.stack.redis import embedded_redis
from services.store.folder import RunFolder
from services.store.outbox import Outbox
from services.store.redis import Store
from services.supervisor import decisions
from services.supervisor import supervisor as supervising
from services.supervisor.decisions import BARREN_LIVES
from services.supervisor.supervisor import Supervisor
from tests.integration.api.servers import a_job, flushed
from tests.integration.test_supervisor import FakeRay, ended
from tests.integration.waiting import until
from tests.integration.webhooks import KEY, Receiver, receiving
from volley.job import JOB
from volley.state import Observed, RunRecord

pytestmark = pytest.mark.integration


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture(scope="module")
async def redis_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    folder = tmp_path_factory.mktemp("redis")
    async with embedded_redis(folder / "data", folder / "redis.log") as url:
        yield url


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    async with Store(redis_url) as store:
        yield store
        for run_id in await store.run_ids():
            await store.delete(run_id)
        for notice_id in await store.notices():
            await store.delete_notice(notice_id)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "PASS_SECONDS", 0.02)
    monkeypatch.setattr(decisions, "delay", lambda history: 0.0)
    monkeypatch.setattr(deliveries, "PASS_SECONDS", 0.02)
    monkeypatch.setattr(deliveries, "delay", lambda attempts: 0.0)
    monkeypatch.setattr(local, "PASS_SECONDS", 0.02)
    monkeypatch.setenv("VOLLEY_WEBHOOK_KEY", KEY)


def record(run_id: str, url: str, **webhook: Any) -> RunRecord:
    job = a_job(run_id, notify=[{"url": url, **webhook}])
    resolved = JOB.validate_python(job).model_dump(mode="json")
    return RunRecord(id=run_id, name=run_id, kind="rl", job=resolved, created=time.time(), folder="/nowhere")


@contextlib.asynccontextmanager
async def service(store: Store, url: str, ray: FakeRay, *hosts: str) -> AsyncIterator[None]:
    """The supervisor with notifications, as `services.api.serve` runs them."""
    async with (
        Supervisor(store, ray, url, watch=Watch(store)) as supervisor,
        Sender(hosts or ["127.0.0.1"]) as sender,
        Deliveries(store, sender) as delivering,
    ):
        tasks = [asyncio.create_task(loop()) for loop in (supervisor.run, delivering.run)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def events(store: Store, run_id: str, kind: str, count: int = 1) -> list[dict[str, Any]]:
    """Wait for ``count`` events of this kind, and until no notice is left."""
    for _ in range(1000):
        found = [row for _, row in await store.entries(run_id, "events") if row["kind"] == kind]
        if len(found) >= count and not await store.notices():
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"no {count} events {kind} of {run_id}")


async def reported(store: Store, run_id: str, state: str) -> None:
    """Wait until the watch has seen the run in this state, '' for one that is not reported."""
    for _ in range(1000):
        seen = json.loads(await store.watch_state(run_id) or "{}").get("reported", "")
        if seen.partition(" ")[0] == state:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{state} of {run_id} was not seen")


async def test_a_run_whose_drivers_are_killed_reports_failed_once(
    store: Store, redis_url: str, receiver: Receiver
) -> None:
    ray = FakeRay()
    ray.dies_at_once = True
    await store.create(record("killed", receiver.url(), secret_env="VOLLEY_WEBHOOK_KEY"))
    async with service(store, redis_url, ray):
        await ended(store, "killed", "failed")
        (delivered,) = await events(store, "killed", "notice_delivered")
        await asyncio.sleep(0.3)
    assert len(ray.submitted) == BARREN_LIVES
    ((headers, body),) = receiver.got
    assert receiver.paths == ["/hook?x=1"]
    assert "webhook-signature" in headers
    assert (body["type"], headers["webhook-id"]) == ("run.failed", delivered["notice"])
    assert "drivers in a row" in body["data"]["run"]["problem"]
    async with service(store, redis_url, ray):  # another API server takes over
        await asyncio.sleep(0.3)
    assert len(receiver.got) == 1


async def test_a_failure_that_the_supervisor_mends_is_not_reported_and_a_pause_is(
    store: Store, redis_url: str, receiver: Receiver
) -> None:
    ray = FakeRay()
    await store.create(record("mended", receiver.url()))
    async with service(store, redis_url, ray):
        await until(lambda: ray.submitted == [("mended", 1)])
        ray.states["mended"] = "killed"
        await store.put_observed("mended", Observed(state="failed", step=2, updated=time.time(), ended=time.time()))
        await until(lambda: len(ray.submitted) == 2)
        for state in ("running", "paused", "paused", "running", "paused", "done"):
            now = time.time()
            seen = Observed.model_validate({"state": state, "step": 3, "updated": now, "ended": 9.0})
            await store.put_observed("mended", seen)
            await reported(store, "mended", state if state != "running" else "")
        await events(store, "mended", "notice_delivered", 3)
    assert receiver.types == ["run.paused", "run.paused", "run.done"]
    assert all("webhook-signature" not in headers for headers, _ in receiver.got)


async def test_rules_are_held_against_the_rows_that_a_driver_writes(
    store: Store, redis_url: str, receiver: Receiver
) -> None:
    rules = [
        {"kind": "fell", "metric": "evaluation/pass_at_16", "by": 0.05},
        {"kind": "above", "metric": "kl_k1", "limit": 0.1, "window": 2},
        {"kind": "no_step", "seconds": 10},
    ]
    made = record("ruled", receiver.url())
    made.job["notify"][0] |= {"states": [], "rules": rules}
    await store.create(made)
    watch = Watch(store)

    async def look(step: int) -> None:
        await watch.look(made, Observed(state="running", step=step, updated=time.time()), final=False)

    async with Outbox(redis_url, "ruled") as outbox:
        for version, value in enumerate((0.41, 0.47, 0.40, 0.40)):
            outbox.add("evaluations", {"version": version, "estimates": [{"k": 16, "mean": value}]})
        for step, kl in enumerate((0.05, 0.2, 0.2)):
            outbox.step({"step": step, "time": 1.0, "kl_k1": kl}, {})
        await flushed(outbox)
        await look(3)
        await look(3)
        with pytest.MonkeyPatch.context() as patch:
            now = time.time()
            patch.setattr("services.notifications.watch.time.time", lambda: now + 11)
            await look(3)
            await look(3)
            await look(4)
            patch.setattr("services.notifications.watch.time.time", lambda: now + 22)
            await Watch(store).look(made, Observed(state="running", step=4), final=False)
            patch.setattr("services.notifications.watch.time.time", lambda: now + 99)
            await Watch(store).look(made, Observed(state="pending", step=4), final=False)
            await Watch(store).look(made, Observed(state="running", step=4), final=False)
    async with Sender(["127.0.0.1"]) as sender, Deliveries(store, sender) as delivering:
        assert await delivering.deliver() == 2, "those that another clock dates later are not due"
        assert sorted(receiver.types) == ["rule.above", "rule.fell"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("services.notifications.deliveries.time.time", lambda: now + 100)
            assert await delivering.deliver() == 0
    assert receiver.types[2:] == ["rule.no_step"] * 2, "each wait is reported once, however many servers look"
    by_type = {body["type"]: body["data"] for _, body in receiver.got}
    fell = by_type["rule.fell"]
    assert (fell["value"], fell["reference"], fell["version"]) == (0.40, 0.47, 2)
    assert fell["text"] == "ruled: evaluation/pass_at_16 fell from 0.47 to 0.4 at version 2"
    assert by_type["rule.above"]["text"] == "ruled: mean kl_k1 of the last 2 is 0.125, above 0.1, at step 1"
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 4


async def test_a_failed_delivery_is_repeated_under_the_same_id_and_redirects_are_not_followed(
    store: Store, redis_url: str, receiver: Receiver
) -> None:
    receiver.answers = [500, 302, 404]
    await store.create(record("retried", receiver.url("localhost")))
    await store.put_observed("retried", Observed(state="done", updated=1.0, ended=1.0))
    async with service(store, redis_url, FakeRay(), "LOCALHOST"):
        await events(store, "retried", "notice_delivered")
    assert len(receiver.got) == 4
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert set(receiver.paths) == {"/hook?x=1"}, "nobody went to the Location of the answers"
    assert {headers["host"] for headers, _ in receiver.got} == {f"localhost:{receiver.port}"}
    assert await store.notices() == {}


@pytest.mark.parametrize(("hosts", "why"), [(["other"], "not among the hosts"), (["*"], "private address")])
async def test_what_cannot_be_delivered_is_given_up_and_an_event_of_the_run(
    store: Store, redis_url: str, receiver: Receiver, hosts: list[str], why: str
) -> None:
    await store.create(record("lost", receiver.url("localhost")))
    await store.put_observed("lost", Observed(state="done", updated=1.0, ended=1.0))
    async with service(store, redis_url, FakeRay(), *hosts):
        (event,) = await events(store, "lost", "notice_lost")
    assert why in event["problem"]
    assert "hook?x" not in json.dumps(event)
    assert receiver.got == []
    assert await store.notices() == {}
    assert ATTEMPTS > 1


@pytest.mark.parametrize("answers", [[], [500] * 1000])
async def test_a_local_run_notifies_by_itself_until_shortly_after_its_end(
    redis_url: str,
    store: Store,
    receiver: Receiver,
    tmp_path: Path,
    answers: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "END_SECONDS", 0.2)
    monkeypatch.setattr(deliveries, "ATTEMPTS", 10**6)
    receiver.answers = answers
    job = JOB.validate_python(a_job(notify=[{"url": receiver.url(), "states": ["failed"]}]))
    folder = RunFolder.create(tmp_path, job)
    said: list[str] = []
    async with notifying(job.notify, folder, redis_url, said.append):
        made = RunRecord(
            id=folder.run_id, name="x", kind="rl", job=job.model_dump(mode="json"), created=1.0, folder=str(folder.path)
        )
        await store.create(made)
        await store.put_observed(folder.run_id, Observed(state="failed", problem="gone", updated=1.0, ended=1.0))
    kinds = [row["kind"] for row in folder.read("events")]
    if answers:
        assert kinds == ["notice_lost"]
        assert receiver.got, "it was tried"
        assert said == ["  run.failed was not delivered: the run's process ended before the webhook accepted it"]
    else:
        assert kinds == ["notice_delivered"]
        assert receiver.types == ["run.failed"]
        assert said == []
    assert await store.notices() == {}


async def test_what_another_release_wrote_stops_neither_the_supervisor_nor_other_notices(
    store: Store, redis_url: str, receiver: Receiver
) -> None:
    strange, fine = record("strange", receiver.url()), record("fine", receiver.url())
    strange.job["notify"][0]["unknown"] = 1
    for each in (strange, fine):
        await store.create(each)
        await store.put_observed(each.id, Observed(state="done", updated=1.0, ended=1.0))
    await store.put_watch_state("fine", '{"unknown": 1}', {"msg_strange": '{"unknown": 1}'})
    async with service(store, redis_url, FakeRay()):
        await events(store, "fine", "notice_delivered")
    assert receiver.types == ["run.done"]
    assert await store.notices() == {}
