"""A live run on the real stack is scaled, paused, stopped and damaged, and still ends with an exact ledger."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import redis.asyncio
import yaml
from ray.util.placement_group import placement_group, remove_placement_group

from services.jobs.job_file import load_job
from services.recording.display import Display
from services.runs.checkpoints import complete_checkpoints, newest_checkpoint
from services.runs.run import Result, prepare, run_on
from services.stack.ephemeral import Stack
from services.stack.redis import embedded_redis
from services.store.desired import change_in_folder
from services.store.folder import RunFolder
from services.store.redis import Store
from tests.integration.jobs import PROMPTS, rl_job, unhurried_job, write_inputs
from tests.integration.waiting import until
from volley.errors import JobError
from volley.job import RLJob
from volley.processes import is_alive
from volley.state import Observed

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


class Live:
    """A run in this process, observed from outside through its folder and Redis."""

    def __init__(self, stack: Stack, folder: RunFolder, job: RLJob, store: Store, task: "asyncio.Task[Result]") -> None:
        self.stack, self.folder, self.job, self.store, self.task = stack, folder, job, store, task

    async def want(self, **changes: Any) -> None:
        change_in_folder(self.folder, self.job, changes)

    async def observed(self) -> Observed:
        return await self.store.observed(self.folder.run_id)

    async def until(self, true: Callable[[Observed], bool], seconds: float = 240) -> Observed:
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            if self.task.done():
                break
            if true(observed := await self.observed()):
                return observed
            await asyncio.sleep(0.2)
        if self.task.done():
            await self.task
        pytest.fail(f"after {time.monotonic() - begun:.0f} s: {await self.observed()}")

    async def more_steps(self, more: int = 3) -> Observed:
        done = (await self.observed()).step
        return await self.until(lambda seen: seen.step >= done + more)

    async def pid(self, name: str) -> int:
        """The process id of the worker with this name."""
        return next(worker.pid for worker in (await self.observed()).workers if worker.name == name)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.folder.read("events") if row["kind"] == kind]


@contextlib.asynccontextmanager
async def live(stack: Stack, inputs: Path, parent: Path, **changes: Any) -> AsyncIterator[Live]:
    """A run that is up and training."""
    file = parent / "job.yaml"
    file.write_text(yaml.safe_dump(unhurried_job(inputs, **{"steps": 2000, **changes})))
    job = load_job(file)
    assert isinstance(job, RLJob)
    folder = RunFolder.create(parent / "runs", job)
    async with Store(stack.redis_url) as store:
        task = asyncio.create_task(run_on(stack, prepare(job), folder, Display(quiet=True)))
        run = Live(stack, folder, job, store, task)
        try:
            await run.until(lambda seen: seen.step >= 3)
            yield run
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def assert_ledger_exact(folder: RunFolder) -> None:
    """Assert that no group ended twice or is missing, and that each step trained its own groups."""
    rows = folder.read("ledger")
    groups = [row["group"] for row in rows]
    assert len(groups) == len(set(groups)), "a group ended twice"
    last = folder.read("metrics")[-1]
    assert sum(row["end"] == "trained" for row in rows) == last["groups_trained"]
    steps = [row["step"] for row in folder.read("metrics")]
    assert steps == list(range(len(steps))), "every step once"


async def test_actors_and_reward_workers_come_and_go_on_a_live_run(stack: Stack, inputs: Path, tmp_path: Path) -> None:
    """The weight group always consists of the current actors."""
    async with live(stack, inputs, tmp_path, broadcast={"transport": "collective", "deadline_s": 20}) as run:

        def all_grouped(_seen: Observed) -> bool:
            return bool(run.folder.read("metrics")[-1]["weight_group_share"] == 1)

        await run.until(all_grouped)
        await run.want(actors=2, reward_workers=2)
        seen = await run.until(lambda seen: (seen.actors, seen.reward_workers) == (2, 2))
        assert seen.revision == 1
        versions = {worker.name: worker.version for worker in seen.workers if worker.role == "actor"}
        assert set(versions) == {"actor-0", "actor-1"}
        assert min(version or 0 for version in versions.values()) >= seen.version, "a new actor has the newest weights"
        before = await run.more_steps()
        await run.until(all_grouped)
        await run.until(lambda seen: any(w.busy for w in seen.workers if w.name == "actor-1"))
        await run.want(actors=1, reward_workers=1)
        await run.until(lambda seen: (seen.actors, seen.reward_workers) == (1, 1))
        assert (await run.more_steps()).step > before.step
        await run.want(actors=0)
        held = await run.until(lambda seen: seen.actors == 0 and seen.state == "paused")
        assert held.problem == "no actors are desired"
        await asyncio.sleep(3)
        assert (await run.observed()).step <= held.step + 2, "only groups in flight are still trained"
        await run.want(actors=1)
        await run.more_steps()
        await run.until(all_grouped)
        assert not run.events("actor_died")
        await run.want(stopped=True)
        assert (await run.task).state == "stopped"
        assert_ledger_exact(run.folder)


async def test_a_run_is_paused_changed_stopped_and_resumed_and_ends_exactly(
    stack: Stack, inputs: Path, tmp_path: Path
) -> None:
    async with live(stack, inputs, tmp_path, steps=40, max_lag=2) as run:
        await run.want(paused=True)
        await run.until(lambda seen: seen.state == "paused")
        await run.want(paused=False, objective={"k": 2}, learning_rate=1e-5, max_lag=0)
        await run.until(lambda seen: seen.revision == 2)
        await run.more_steps(8)
        row = run.folder.read("metrics")[-1]
        assert row["learning_rate"] == pytest.approx(1e-5)
        assert set(row["lag_histogram"]) == {"0"}
        await run.want(stopped=True)
        result = await run.task
        assert result.state == "stopped"
        change_in_folder(run.folder, run.job, {"stopped": False, "max_lag": None})
        checkpoint = newest_checkpoint(run.folder)
        again = await run_on(stack, prepare(run.job), run.folder, Display(quiet=True), checkpoint=checkpoint)
        assert again.state == "done"
        assert_ledger_exact(run.folder)
        assert run.folder.read("metrics")[-1]["groups_trained"] == 40 * PROMPTS
        observed = await run.observed()
        assert (observed.state, observed.step, observed.life) == ("done", 40, 2)


async def test_dead_and_hung_learner_ranks_reward_workers_and_actors_are_replaced(
    stack: Stack, inputs: Path, tmp_path: Path
) -> None:
    """One run outlives them all, resumes from its checkpoint after each lost rank, and ends with every group."""
    steps = 80
    learner = {"ranks": 2, "cpus_per_rank": 0.5, "step_deadline_s": 20, "verify_weights": True}
    changes = {"steps": steps, "learner": learner, "checkpoint": {"every": 4}, "reward_workers": {"count": 2}}
    async with live(stack, inputs, tmp_path, **changes) as run:
        for kill in (signal.SIGKILL, signal.SIGSTOP):
            before = await run.more_steps(6)
            restarts = len(run.events("learner_restarted"))
            os.kill(await run.pid("learner-1"), kill)
            await run.until(lambda _, seen=restarts: len(run.events("learner_restarted")) > seen)  # type: ignore[misc]
            event = run.events("learner_restarted")[-1]
            assert event["step"] >= before.step - 4, "the newest checkpoint, not the beginning"
        await run.more_steps()
        assert len(run.events("learner_restarted")) == 2
        assert not run.events("actor_died"), "the actors were kept"
        for name, role in (("reward-1", "reward_worker_died"), ("actor-0", "actor_died")):
            os.kill(await run.pid(name), signal.SIGKILL)
            await run.until(lambda _, role=role: bool(run.events(role)))  # type: ignore[misc]
            await run.more_steps()
        assert (await run.task).state == "done"
        assert_ledger_exact(run.folder)
        assert run.folder.read("metrics")[-1]["groups_trained"] == steps * PROMPTS


async def test_a_run_whose_roles_take_turns_survives_their_deaths_and_is_resumed(
    stack: Stack, inputs: Path, tmp_path: Path
) -> None:
    """Actors that start later cannot read what the learner lent: they get it from the object store."""
    changes = {"steps": 40, "checkpoint": {"every": 4}, "sampling": {"n": 8, "max_tokens": 32}}
    turns = {"placement": "colocated", "broadcast": {"transport": "shared_memory"}}
    async with live(stack, inputs, tmp_path, **turns, **changes) as run:
        for name, died in (("learner-0", "learner_restarted"), ("actor-0", "actor_died")):
            os.kill(await run.pid(name), signal.SIGKILL)
            await run.until(lambda _, died=died: bool(run.events(died)))  # type: ignore[misc]
            await run.more_steps()
        await run.want(actors=2)
        await run.until(lambda seen: seen.actors == 2)
        await run.more_steps()
        await run.want(actors=1, stopped=True)
        assert (await run.task).state == "stopped"
        change_in_folder(run.folder, run.job, {"stopped": False})
        checkpoint = newest_checkpoint(run.folder)
        again = await run_on(stack, prepare(run.job), run.folder, Display(quiet=True), checkpoint=checkpoint)
        assert again.state == "done"
        assert_ledger_exact(run.folder)
        rows = run.folder.read("metrics")
        assert rows[-1]["groups_trained"] == 40 * PROMPTS
        assert {int(lag) for row in rows for lag in row["lag_histogram"]} == {0, 1}
        assert max(row.get("logprob_mismatch_max", 0.0) for row in rows) < 1e-3


async def test_redis_may_die_or_hang_at_any_time(inputs: Path, ray_local: None, tmp_path: Path) -> None:
    """Embedded Redis is killed twice, then hangs: it comes back with what it had, and the run never waits for it."""
    async with (
        embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url,
        live(Stack(url, "local"), inputs, tmp_path) as run,
    ):
        for _ in range(2):
            os.kill(await redis_pid(url), signal.SIGKILL)
            await run.more_steps(5)
        pid = await redis_pid(url)
        os.kill(pid, signal.SIGSTOP)
        done = len(run.folder.read("metrics"))
        await until(lambda: len(run.folder.read("metrics")) > done + 2 or not is_alive(pid), seconds=60)
        assert is_alive(pid), "nobody has killed it yet, but the run continues"
        await until(lambda: not is_alive(pid), seconds=60)
        await run.want(stopped=True)
        assert (await run.task).state == "stopped"
        rows = [row["step"] for _, row in await run.store.entries(run.folder.run_id, "metrics")]
        assert rows == [row["step"] for row in run.folder.read("metrics")] == list(range(len(rows)))


async def redis_pid(url: str) -> int:
    async with redis.asyncio.from_url(url) as client:
        return int((await client.info("server"))["process_id"])


async def test_a_failing_scorer_pauses_the_run_until_it_works_again(stack: Stack, inputs: Path, tmp_path: Path) -> None:
    switch = tmp_path / "broken"
    rows = [{"prompt": f"{a} {b}=", "switch": str(switch)} for a in range(1, 9) for b in range(1, 5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "prompts.jsonl")}
    scorer = {"kind": "python", "target": "tests.integration.scorers:fails_while"}
    infra = {"window": 4, "probe_every_s": 1}
    changes = {"data": data, "scorer": scorer, "infra_errors": infra, "prompts_per_step": 8}
    async with live(stack, inputs, tmp_path, **changes) as run:
        switch.touch()
        held = await run.until(lambda seen: seen.state == "paused")
        assert "of the samples of the last 4 groups could not be scored" in held.problem
        assert "the scorer is broken" in held.problem
        switch.unlink()
        await run.until(lambda seen: seen.state == "running")
        await run.more_steps()
        await run.want(stopped=True)
        await run.task
        assert_ledger_exact(run.folder)
        ends = {row["end"] for row in run.folder.read("ledger") if row["end"].startswith("dropped")}
        assert any("0 of 8 samples could be scored" in end for end in ends)
        for end in ends:  # groups in scoring when the scorer broke have unscored samples
            assert " of 8 samples could be scored" in end or "the run ended" in end, end
        for row in run.folder.read("metrics"):
            assert row["reward_mean"] > 0 or "verdict_infra_error" not in row, "no infra error became reward 0"


async def test_a_scorer_that_never_works_ends_the_run_with_its_line(stack: Stack, inputs: Path, tmp_path: Path) -> None:
    scorer = {"kind": "python", "target": "tests.integration.scorers:wrong_attribute", "cache": 100}
    told = r"no sample of the first 4 groups.*AttributeError: 'str' .* \(line \d+ of scorers.py, in wrong_attribute\)"
    with pytest.raises(JobError, match=told):
        async with live(stack, inputs, tmp_path, scorer=scorer, infra_errors={"window": 4}):
            pass
    (folder,) = (tmp_path / "runs").iterdir()
    assert RunFolder(folder).summary()["state"] == "failed"
    (kept,) = folder.glob("rewards/*/results.sqlite")
    with contextlib.closing(sqlite3.connect(kept)) as database:
        assert database.execute("SELECT count(*) FROM results").fetchone() == (0,), "failures are not kept"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system that can be filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a disk to fill must be mounted, which takes root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


async def test_a_full_disk_pauses_the_run_until_space_is_free(stack: Stack, inputs: Path, small_disk: Path) -> None:
    async with live(stack, inputs, small_disk, steps=30, checkpoint={"every": 2}) as run:
        await run.until(lambda seen: seen.step >= 4)
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        held = await run.until(lambda seen: seen.state == "paused")
        assert "the disk is full" in held.problem
        before = complete_checkpoints(run.folder)
        assert before, "the checkpoint before is intact"
        await asyncio.sleep(4)
        assert (await run.observed()).step <= held.step + 1
        assert complete_checkpoints(run.folder) == before
        ballast.unlink()
        assert (await run.task).state == "done"
        assert_ledger_exact(run.folder)
        kinds = [event["kind"] for _, event in await run.store.entries(run.folder.run_id, "events")]
        assert kinds.index("paused") < kinds.index("unpaused")


@pytest.mark.parametrize("sampling", [{}, {"refill": 0.75, "selection": {}}], ids=["every prompt", "worth it"])
async def test_a_resumed_seeded_run_without_lag_equals_the_uninterrupted_one(
    stack: Stack, inputs: Path, tmp_path: Path, sampling: dict[str, Any]
) -> None:
    plan = {"steps": 8, "checkpoint": {"every": 4}, "evaluation": None, "samples_kept": 64}
    sampling = {"n": 8, "max_tokens": 8, "seeded": True, **sampling}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(rl_job(inputs, **plan, sampling=sampling)))
    job = load_job(file)
    whole = await run_on(stack, prepare(job), RunFolder.create(tmp_path / "runs", job), Display(quiet=True))
    cut = RunFolder(tmp_path / "runs" / "cut")
    shutil.copytree(whole.folder.path, cut.path)
    shutil.rmtree(cut.checkpoints / "step-8")
    await run_on(stack, prepare(job), cut, Display(quiet=True), checkpoint=cut.checkpoints / "step-4")
    refilled = ("replaced_groups", "live_sample_fraction_made") if "refill" in sampling else ()
    same = ("loss", "reward_mean", "grad_norm", "entropy", "tokens", "groups_dead", *refilled)
    for ours, theirs in zip(cut.read("metrics"), whole.folder.read("metrics"), strict=True):
        assert [ours[name] for name in same] == [theirs[name] for name in same]
    assert cut.read("ledger") == whole.folder.read("ledger")
    if refilled:
        assert sum(row["replaced_groups"] for row in whole.folder.read("metrics")) > 0


async def test_a_run_without_resources_is_pending_and_says_what_it_waits_for(
    stack: Stack, inputs: Path, tmp_path: Path
) -> None:
    """It starts when the resources are free; a pending run can be stopped."""
    holder = placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    await holder.ready()  # an earlier run's processes may still hold some
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(rl_job(inputs, steps=2, evaluation=None)))
    job = load_job(file)
    assert isinstance(job, RLJob)
    tasks, folders = [], []
    async with Store(stack.redis_url) as store:
        for _ in range(2):
            folders.append(RunFolder.create(tmp_path / "runs", job))
            tasks.append(asyncio.create_task(run_on(stack, prepare(job), folders[-1], Display(quiet=True))))
        first, second = (Live(stack, folder, job, store, task) for folder, task in zip(folders, tasks, strict=True))
        for run in (first, second):
            seen = await run.until(lambda seen: seen.state == "pending")
            assert "waits for" in seen.problem
        await second.want(stopped=True)
        assert (await second.task).state == "stopped"
        held = await first.until(lambda seen: "CPU" in seen.problem)
        assert held.problem == "waits for room on the cluster: the job reserves 2.1 CPUs, it has 0 free"
        remove_placement_group(holder)
        assert (await first.task).state == "done"
