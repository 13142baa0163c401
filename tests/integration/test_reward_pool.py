"""The reward pool with real Ray workers: scores, deaths, hangs, scaling."""

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from ray.exceptions import RayError

from reward_servers.pool import RewardConfig, RewardPool
from volley import pool_size
from volley.errors import DeadlineExceeded, WorkerDied
from volley.job import RewardWorkersSpec
from volley.records import Group, Prompt, VerdictStatus
from volley.scoring import CodeScorer, CountdownScorer, PythonScorer

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_local")]


def group(texts: tuple[str, ...]) -> Group:
    n = len(texts)
    return Group(
        group_id=0,
        prompt_id="p:1",
        prompt_p=np.zeros(3, np.int32),
        tokens_T=np.zeros(n, np.int32),
        logprobs_T=np.zeros(n, np.float32),
        versions_T=np.zeros(n, np.int32),
        lengths_n=np.ones(n, np.int32),
        stopped_n=np.ones(n, np.bool_),
        texts=texts,
        actor="actor-0",
        seconds=0.0,
    )


def config(tmp_path: Path, *, python: bool = False, **workers: float) -> RewardConfig:
    scorer = PythonScorer(target="reward_functions:trouble") if python else CountdownScorer()
    return RewardConfig(scorer, RewardWorkersSpec.model_validate(workers), tmp_path, prefix=f"{tmp_path.name}-")


COUNTDOWN = Prompt("p:1", "", {"numbers": [8, 3, 1, 1], "target": 24})


async def test_scores_come_back_in_order_from_all_workers(tmp_path: Path) -> None:
    pool = await RewardPool.start(config(tmp_path, count=2))
    right, wrong = ray.put(group(("8*3*1*1", "8+3+1+1", "?"))), ray.put(group(("1+1", "8*3*1*1")))
    scores = await asyncio.gather(*(pool.score(right if i % 2 else wrong, COUNTDOWN) for i in range(40)))
    await pool.stop()
    assert [s.rewards_n.tolist() for s in scores] == [[1.0, 0.0, 0.0] if i % 2 else [0.0, 1.0] for i in range(40)]
    assert {s.worker for s in scores} == {"reward-0", "reward-1"}
    assert "reward-0 ready" in (tmp_path / "reward-0.log").read_text()


async def test_a_call_has_little_overhead(tmp_path: Path) -> None:
    pool = await RewardPool.start(config(tmp_path))
    ref = ray.put(group(("8*3*1*1",) * 16))
    await pool.score(ref, COUNTDOWN)
    began = time.perf_counter()
    await asyncio.gather(*(pool.score(ref, COUNTDOWN) for _ in range(200)))
    each_ms = (time.perf_counter() - began) / 200 * 1e3
    await pool.stop()
    assert each_ms < 50, f"one group of 16 costs {each_ms:.2f} ms"


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_group_that_is_lost_costs_no_worker(tmp_path: Path, cancelled: bool) -> None:
    """As with the node that held it: whoever asked hears of it, or nobody if the call was cancelled."""

    def lose() -> Group:
        time.sleep(0.5)
        raise RuntimeError("lost")

    pool = await RewardPool.start(config(tmp_path))
    asked = asyncio.create_task(pool.score(ray.remote(lose).remote(), COUNTDOWN))
    if cancelled:
        await asyncio.sleep(0.1)
        asked.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else RayError):
        await asked
    async with asyncio.timeout(30):
        scores = await pool.score(ray.put(group(("8*3*1*1",))), COUNTDOWN)
    await pool.stop()
    assert scores.rewards_n.tolist() == [1.0]
    assert not pool.deaths


async def test_a_killed_worker_is_replaced_and_its_group_scored_again(tmp_path: Path) -> None:
    pool = await RewardPool.start(config(tmp_path, python=True))
    ref = ray.put(group(("kill once", "fine")))
    scores = await pool.score(ref, Prompt("p", "", {"flag": str(tmp_path / "flag")}))
    assert scores.rewards_n.tolist() == [1.0, 1.0]
    assert len(pool.deaths) == 1
    await pool.stop()


async def test_a_group_that_kills_every_worker_becomes_infra_errors(tmp_path: Path) -> None:
    pool = await RewardPool.start(config(tmp_path, python=True))
    reference = Prompt("p", "", {"flag": str(tmp_path / "flag")})
    scores = await pool.score(ray.put(group(("kill", "fine"))), reference)
    assert [v.status for v in scores.verdicts] == [VerdictStatus.INFRA_ERROR] * 2
    assert "reward-0 died" in scores.verdicts[0].detail
    assert not scores.valid_n.any()
    again = await pool.score(ray.put(group(("fine",))), reference)
    assert again.rewards_n.tolist() == [1.0]
    await pool.stop()


async def test_a_hung_worker_is_killed_with_its_children(tmp_path: Path) -> None:
    pool = await RewardPool.start(config(tmp_path, python=True, group_deadline_s=3))
    stuck = await asyncio.wait_for(
        pool.score(ray.put(group(("stop",))), Prompt("p", "", {"flag": str(tmp_path / "flag")})), 60
    )
    assert stuck.verdicts[0].status is VerdictStatus.INFRA_ERROR
    assert "waited 3 s for reward-0" in stuck.verdicts[0].detail
    await pool.stop()


async def test_too_many_deaths_end_the_pool(tmp_path: Path) -> None:
    pool = await RewardPool.start(config(tmp_path, python=True, max_replacements=1))
    with pytest.raises(WorkerDied, match=r"reward-0.*replaced 1 times") as death:
        await pool.score(ray.put(group(("kill",))), Prompt("p", "", {"flag": str(tmp_path / "flag")}))
    assert death.value.worker == "reward-0"
    await pool.stop()


async def test_scaling_down_waits_for_a_busy_worker_and_leaves_no_process(tmp_path: Path) -> None:
    pool = await RewardPool.start(config(tmp_path, python=True, count=1))
    await pool.scale(3)
    assert pool.count == 3
    reference = Prompt("p", "", {"flag": str(tmp_path / "flag")})
    busy = [asyncio.create_task(pool.score(ray.put(group(("slow", "slow"))), reference)) for _ in range(3)]
    await asyncio.sleep(0.3)
    await pool.scale(1)
    scores = await asyncio.gather(*busy)
    assert all(s.rewards_n.tolist() == [1.0, 1.0] for s in scores)
    await pool.stop()
    assert await gone("reward_functions:trouble")


async def test_a_worker_that_cannot_start_is_reported(tmp_path: Path) -> None:
    broken = RewardConfig(
        PythonScorer(target="reward_functions:trouble"), RewardWorkersSpec(start_deadline_s=0.01), tmp_path
    )
    with pytest.raises(DeadlineExceeded, match="reward-0 to start"):
        await RewardPool.start(broken)


async def test_a_killed_worker_takes_its_sandbox_with_it(tmp_path: Path) -> None:
    spec = CodeScorer(extract="raw")
    pool = await RewardPool.start(RewardConfig(spec, RewardWorkersSpec(), tmp_path, prefix=f"{tmp_path.name}-"))
    prompt = Prompt("p", "", {"tests": [{"stdin": "3 4", "expected": "7"}]})
    programs = ray.put(group(("print(sum(map(int, input().split())))", "print(8)", "while True: 1")))
    scores = await pool.score(programs, prompt)
    assert [v.status.value for v in scores.verdicts] == ["passed", "wrong_answer", "timeout"]
    assert pool.sandbox.startswith("tier ")
    (worker,) = pool._workers.values()
    tree = psutil.Process(worker.pid).children(recursive=True)
    assert any(process.name() == "bwrap" for process in tree)
    scoring = asyncio.create_task(pool.score(programs, prompt))
    await asyncio.sleep(0.5)
    os.kill(worker.pid, signal.SIGKILL)
    assert (await scoring).rewards_n.tolist() == [1.0, 0.0, 0.0]
    _, alive = psutil.wait_procs(tree, timeout=5)
    assert not alive
    await pool.stop()


async def test_the_pool_grows_while_groups_wait_and_shrinks_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volley.pool_size.LOOK_EVERY_S", 0.2)
    monkeypatch.setattr("volley.pool_size.LOOKS_AT_REST", 3)
    pool = await RewardPool.start(config(tmp_path, python=True, max_count=3))
    reference = Prompt("p", "", {"flag": str(tmp_path / "flag")})
    slow = ray.put(group(("slow",)))
    waiting = [asyncio.create_task(pool.score(slow, reference)) for _ in range(12)]
    most = 1
    while not all(task.done() for task in waiting):
        most = max(most, pool.count)
        await asyncio.sleep(0.05)
    assert most in (2, 3)
    assert all(task.result().rewards_n.tolist() == [1.0] for task in waiting)
    for _ in range(100):
        if pool.count == 1:
            break
        await asyncio.sleep(0.1)
    assert pool.count == 1
    await pool.stop()


@pytest.mark.parametrize(
    ("count", "waiting", "quiet", "wanted"),
    [
        (1, 0, 0, 1),
        (1, 1, 0, 1),
        (1, 2, 0, 2),
        (3, 9, 0, 4),
        (4, 99, 0, 4),
        (4, 0, 29, 4),
        (4, 0, 30, 3),
        (1, 0, 99, 1),
    ],
)
def test_the_next_number_of_workers(count: int, waiting: int, quiet: int, wanted: int) -> None:
    assert pool_size.next_count(count, waiting, quiet, low=1, high=4) == wanted


async def gone(needle: str) -> bool:
    for _ in range(50):
        mine = [p for p in psutil.process_iter(["cmdline"]) if needle in " ".join(p.info["cmdline"] or [])]
        if not mine:
            return True
        await asyncio.sleep(0.1)
    for process in mine:
        process.send_signal(signal.SIGKILL)
    return False


@pytest.mark.parametrize("sample", ["slow", "kill once"])
async def test_cancelling_a_group_while_it_is_scored_keeps_its_worker(tmp_path: Path, sample: str) -> None:
    pool = await RewardPool.start(config(tmp_path, python=True))
    reference = Prompt("p", "", {"flag": str(tmp_path / "flag")})
    given_up = asyncio.create_task(pool.score(ray.put(group((sample,))), reference))
    await asyncio.sleep(0.3)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    scores = await asyncio.wait_for(pool.score(ray.put(group(("fine",))), reference), 30)
    assert scores.rewards_n.tolist() == [1.0]
    await pool.stop()


async def test_a_death_without_a_waiting_call_also_ends_the_pool(tmp_path: Path) -> None:
    pool = await RewardPool.start(config(tmp_path, python=True, max_replacements=0))
    reference = Prompt("p", "", {"flag": str(tmp_path / "flag")})
    given_up = asyncio.create_task(pool.score(ray.put(group(("slow", "kill"))), reference))
    await asyncio.sleep(0.3)
    given_up.cancel()
    fine = ray.put(group(("fine",)))
    waiting = [asyncio.create_task(pool.score(fine, reference)) for _ in range(3)]
    failures = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    assert [type(failure) for failure in failures] == [WorkerDied] * 3
    with pytest.raises(WorkerDied, match=r"reward-0.*replaced 0 times"):
        await asyncio.wait_for(pool.score(fine, reference), 1)
    assert pool.count == 0
    assert pool.waiting == 0
    await pool.stop()


async def test_stop_ends_a_retired_worker_that_is_busy(tmp_path: Path) -> None:
    pool = await RewardPool.start(config(tmp_path, python=True, count=2))
    pids = [worker.pid for worker in pool.workers()]
    reference = Prompt("p", "", {"flag": str(tmp_path / "flag")})
    long = ray.put(group(("slow",) * 60))
    busy = [asyncio.create_task(pool.score(long, reference)) for _ in range(2)]
    await asyncio.sleep(0.5)
    await pool.scale(1)
    await asyncio.wait_for(pool.stop(), 20)
    ends = await asyncio.wait_for(asyncio.gather(*busy, return_exceptions=True), 10)
    assert [type(end) for end in ends] == [WorkerDied] * 2
    assert await gone("reward_functions:trouble")
    for _ in range(100):  # Ray takes a while to end a killed actor's process
        if not any(psutil.pid_exists(pid) for pid in pids):
            break
        await asyncio.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_cancelled_growth_leaves_no_worker(tmp_path: Path) -> None:
    pool = await RewardPool.start(config(tmp_path, python=True))
    growing = asyncio.create_task(pool.scale(3))
    await asyncio.sleep(0.1)
    growing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await growing
    assert pool.count == 1
    for _ in range(300):
        mine = [name for name in ray.util.list_named_actors() if name.startswith(tmp_path.name)]
        if len(mine) == 1:
            break
        await asyncio.sleep(0.1)
    assert mine == [f"{tmp_path.name}-reward-0"]
    await pool.stop()
