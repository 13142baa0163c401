"""Real actors that are killed, replaced and scaled while they generate."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load

from actors.config import GenerateRequest
from actors.pool import ActorPool
from tests.integration.oracle import Oracle
from tests.integration.processes import descendants, wait_until_gone
from tests.integration.test_actors import configuration, generate, publish, request
from tests.integration.waiting import until
from tests.models import tiny_llama
from volley.errors import WorkerDied

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(ray_local: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ActorPool]:
    logs = tmp_path_factory.mktemp("logs")
    started = await ActorPool.start(configuration(model, logs, count=2, max_replacements=3, hang_deadline_s=8.0))
    yield started
    await started.stop()


def long(group_id: int = 1) -> GenerateRequest:
    return request(n=64, max_tokens=240, group_id=group_id)


async def until_count(pool: ActorPool, count: int) -> None:
    await until(lambda: pool.count == count, seconds=120)


async def until_died(pool: ActorPool, count: int) -> None:
    """Wait for the ``count``-th death, which the actor's next sign of life shows if no group was under way."""
    await until(lambda: len(pool.deaths) >= count, seconds=120)


async def serves(pool: ActorPool, oracle: Oracle, version: int) -> bool:
    """Whether every actor serves the weights bitwise."""
    served = [load(file.tobytes()) for file in (await pool.served_weights()).values()]
    return all(torch.equal(w[name], tensor) for w in served for name, tensor in oracle.weights[version].items())


async def test_no_group_is_lost_with_a_killed_engine_and_its_replacement_has_the_newest_weights(
    pool: ActorPool, oracle: Oracle
) -> None:
    oracle.weights[1] = oracle.other_weights(1)
    await pool.broadcast(publish(1, oracle.weights[1]))
    victim = pool.infos[0]
    pids = {victim.pid, *victim.engine_pids, *descendants(victim.pid)}
    groups = [asyncio.create_task(generate(pool, long(group_id=i))) for i in range(12)]
    await asyncio.sleep(0.1)
    os.kill(victim.engine_pids[0], signal.SIGKILL)
    done = await asyncio.gather(*groups)
    assert [group.group_id for group in done] == list(range(12))
    await until_died(pool, 1)
    (death,) = pool.deaths
    assert isinstance(death, WorkerDied)
    assert (death.worker, death.cause) == ("actor-0", "its engine exited with code -9")
    wait_until_gone(pids)
    await until_count(pool, 2)
    assert [info.name for info in pool.infos] == ["actor-1", "actor-2"]
    assert pool.version == 1
    assert await serves(pool, oracle, 1)
    after = await asyncio.gather(*(generate(pool, request()) for _ in range(4)))
    assert {group.actor for group in after} == {"actor-1", "actor-2"}
    for group in after:
        np.testing.assert_allclose(group.logprobs_T, oracle.logprobs(group), atol=1e-4)


async def test_scaling_to_zero_pauses_and_scaling_up_continues_with_the_newest_weights(
    pool: ActorPool, oracle: Oracle
) -> None:
    pids = {pid for info in pool.infos for pid in (info.pid, *info.engine_pids)}
    groups = [asyncio.create_task(generate(pool, long())) for _ in range(4)]
    await asyncio.sleep(0.1)
    await pool.scale(0)
    assert all(group.done() for group in groups)  # drained, not discarded
    assert {(await group).n for group in groups} == {64}
    assert pool.count == 0
    wait_until_gone(pids)
    oracle.weights[2] = oracle.other_weights(2)
    assert (await pool.broadcast(publish(2, oracle.weights[2]))).actors == ()
    paused = asyncio.create_task(generate(pool, request()))
    await asyncio.sleep(0.3)
    assert not paused.done()
    await pool.scale(1)
    assert set((await paused).versions_T) == {2}
    assert await serves(pool, oracle, 2)


async def test_an_actor_takes_the_weights_on_their_way_to_it_before_it_retires(pool: ActorPool, oracle: Oracle) -> None:
    (last,) = pool.infos
    oracle.weights[3] = oracle.weights[2]
    broadcast = asyncio.create_task(pool.broadcast(publish(3, oracle.weights[3])))
    await asyncio.sleep(0.01)
    await pool.scale(0)
    assert [update.actor for update in (await broadcast).actors] == [last.name]
    assert not [death for death in pool.deaths if last.name in str(death)]
    await pool.scale(1)


@pytest.mark.parametrize("hung", ["engine", "actor"])
async def test_a_hung_actor_is_killed(pool: ActorPool, oracle: Oracle, hung: str) -> None:
    deaths, before = len(pool.deaths), pool.count
    victim = pool.infos[0]
    pids = {victim.pid, *victim.engine_pids, *descendants(victim.pid)}
    groups = [asyncio.create_task(generate(pool, long(group_id=i))) for i in range(3)]
    await asyncio.sleep(0.1)
    os.kill(victim.engine_pids[0] if hung == "engine" else victim.pid, signal.SIGSTOP)
    done = await asyncio.gather(*groups)
    assert [group.group_id for group in done] == [0, 1, 2]
    await until_died(pool, deaths + 1)
    assert str(pool.deaths[deaths]) == f"actor pool waited 8 s for {victim.name}: a sign of life"
    wait_until_gone(pids)
    await until_count(pool, before)
    assert await serves(pool, oracle, pool.version)


async def test_weights_that_lack_a_tensor_end_the_engine(pool: ActorPool, oracle: Oracle) -> None:
    """The engine is then half loaded. This test must be the last one: the pool has no replacements left."""
    lacking = {name: tensor for name, tensor in oracle.weights[2].items() if name != "model.norm.weight"}
    with pytest.raises(WorkerDied, match=r"actor-\d died: weights 9 do not load: .*are missing.*model\.norm"):
        await pool.broadcast(publish(9, lacking))
