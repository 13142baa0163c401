"""The Python client against the real API and a real Redis, with simulated drivers; and the blocks of docs/python.md."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.store.redis import Store
from tests.integration.api.servers import ADMIN, Api, SilentLauncher, a_job, driver, flushed, make_run, observe, serving
from tests.pages import ROOT, blocks
from volley.client import AsyncRun, Client, Run, Update
from volley.errors import Conflict, InvalidRequest, NotAllowed, NotFound, RunFailed

pytestmark = pytest.mark.integration

PAGE = ROOT / "docs" / "python.md"


async def blocking(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a method of the blocking client while this event loop serves the API."""
    async with asyncio.timeout(60):
        return await asyncio.to_thread(call, *args, **options)


async def train(redis_url: str, run_id: str, steps: range, *, state: str = "running", **fields: Any) -> None:
    """Write what a driver writes for these steps, and then its state."""
    async with driver(redis_url, run_id) as outbox:
        for step in steps:
            outbox.step({"step": step, "reward_mean": step / 8, "lag_histogram": {"0": 8}}, {"trained": 8 * step})
            outbox.add("events", {"kind": "tick", "time": float(step), "step": step})
            sample = {"step": step, "group": step, "status": "passed", "reward": 1.0, "prompt_id": f"p{step}"}
            outbox.add("samples", {**sample, "sample": "7", "tokens": 1})
        estimates = [{"k": k, "mean": 0.1 * k, "low": 0.0, "high": 1.0} for k in (1, 8)]
        outbox.add("evaluations", {"version": steps.stop, "n": 8, "prompts": 4, "estimates": estimates})
        await flushed(outbox)
    await observe(redis_url, run_id, state=state, step=steps.stop, steps=8, updated=time.time(), **fields)


async def test_a_run_from_its_submission_to_its_end(redis_url: str, api: Api) -> None:
    run = await api.client.submit(a_job("client"), tags={"team": "a"}, key="client-1")
    assert (await api.client.submit(a_job("client"), tags={"team": "a"}, key="client-1")).id == run.id
    with pytest.raises(Conflict):
        await api.client.submit(a_job("other"), key="client-1")
    assert (await api.client.run("client-")).id == run.id
    (summary,) = await api.client.runs(tags={"team": "a"}, name="client", state="queued")
    assert (summary.id, summary.objective) == (run.id, "max_at_k k=4")
    assert (await run.set(k=2, max_lag=3)).desired.objective == {"k": 2}
    assert (await run.scale(actors=3)).desired.actors == 3
    with pytest.raises(InvalidRequest, match="k=99 needs n >= 99") as raised:
        await run.set(k=99)
    assert raised.value.kind == "change-not-possible"
    with pytest.raises(Conflict, match="read the run again"):
        await run.change({"actors": 1}, revision=0)
    assert (await run.pause()).desired.paused
    assert not (await run.resume()).desired.paused
    await train(redis_url, run.id, range(4))
    assert (await run.stop()).desired.stopped
    await observe(redis_url, run.id, state="stopped", step=4, steps=8, updated=time.time())
    assert (await run.wait(30)).state == "stopped"
    with pytest.raises(Conflict):
        await run.scale(actors=1)
    metrics = await run.metrics()
    assert metrics["reward_mean"].tolist() == [0.0, 0.125, 0.25, 0.375]
    assert "lag_histogram.0" in metrics
    assert (await run.evaluations()).at(8).tolist() == [0.8]
    assert [each.kind for each in await run.events(2)] == ["tick", "tick"]
    assert len(await run.events(None)) == 4
    samples = await run.samples(3, status="passed")
    assert [each.step for each in samples] == [3, 2, 1]
    assert (samples[0].prompt_id, samples[0].sample, samples[0].model_extra) == ("p3", "7", {"tokens": 1})
    assert await run.ledger() == {"trained": 24}
    assert [each.process for each in await run.processes()] == ["driver"]
    assert await run.logs() == f"driver of {run.id}"
    assert (await run.export()).path.endswith(f"{run.id}/model")
    await run.delete()
    with pytest.raises(NotFound, match="there is no run"):
        await run.view()


async def follow(run: Run | AsyncRun, **options: Any) -> list[Update]:
    async with asyncio.timeout(60):
        if isinstance(run, AsyncRun):
            return [update async for update in run.follow(**options)]
        return await asyncio.to_thread(lambda: list(run.follow(**options)))


async def test_followers_see_everything_and_end_with_the_run(redis_url: str, api: Api, runs: Path) -> None:
    """Blocking and not, from the start and from now on, through this server and another, before and after the end."""
    run_id = await make_run(api, "followed")
    await train(redis_url, run_id, range(2))
    async with serving(redis_url, launcher=SilentLauncher(), runs=runs) as other:
        with Client(api.url) as one, Client(other.url) as two:
            sources: list[Run | AsyncRun] = [AsyncRun(api.client, run_id), Run(one, run_id), Run(two, run_id)]
            whole = [asyncio.create_task(follow(run, since_start=True)) for run in sources]
            later = [asyncio.create_task(follow(run)) for run in sources]
            await asyncio.sleep(2)
            for step in range(2, 8):
                await train(redis_url, run_id, range(step, step + 1))
            await train(redis_url, run_id, range(8, 8), state="failed", problem="no signal", ended=time.time())
            found = await asyncio.gather(*whole, *later, *(follow(run, since_start=True) for run in sources))
            for number, updates in enumerate(found):
                first = 2 if len(whole) <= number < len(whole) + len(later) else 0
                for kind in ("step", "event"):
                    steps = [update.data["step"] for update in updates if update.kind == kind]
                    assert steps == list(range(first, 8)), (number, kind)
            assert [update.kind for update in await follow(Run(one, run_id))] == ["state"]
            with pytest.raises(RunFailed, match="failed: no signal"):
                await blocking(Run(one, run_id).wait, 30)


async def test_a_token_that_does_not_allow_it_is_named(redis_url: str, runs: Path) -> None:
    async with serving(redis_url, runs=runs, admin_token=ADMIN) as api:
        token = (await api.client.create_token("reader", "read")).token
        with Client(api.url, token) as reader, Client(api.url) as nobody:
            assert await blocking(reader.runs) is not None
            with pytest.raises(NotAllowed, match="token"):
                await blocking(reader.submit, a_job("forbidden"))
            with pytest.raises(NotAllowed, match="token"):
                await blocking(nobody.runs)
        await api.client.delete_token("reader")


async def test_the_blocks_of_the_page_run(
    redis_url: str, api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They run from top to bottom in one namespace. The run does its steps once the page has changed it."""
    monkeypatch.setenv("VOLLEY_SERVER", api.url)
    monkeypatch.delenv("VOLLEY_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    code = [compile(block.text, block.place, "exec") for block in blocks(PAGE) if block.language == "python"]
    known: dict[str, Any] = {}

    async def act() -> None:
        """The driver of the page's run."""
        async with Store(redis_url) as store:
            while "run" not in known or (await store.desired(known["run"].id)).revision < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        await train(redis_url, known["run"].id, range(8), state="done", ended=time.time())

    acting = asyncio.create_task(act())
    for block in code:
        await blocking(exec, block, known)
    await acting
    known["client"].close()
    said = capsys.readouterr().out
    assert "7 0.875" in said
    assert "it cannot be changed any more" in said
    assert said.splitlines()[-1].startswith("[")
