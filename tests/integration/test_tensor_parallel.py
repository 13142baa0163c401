"""An engine of two workers, each with half of every matrix: on CPU, with GPUs that exist only in Ray's books."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import ray
import torch
from safetensors.torch import load, save

from actors.config import ActorConfig, GenerateRequest
from actors.pool import ActorPool
from learner.config import LearnerConfig
from learner.pool import LearnerPool
from services.runs.weight_groups import WeightGroups
from tests.integration.conftest import started_cluster, without_token
from tests.integration.oracle import Oracle, State
from tests.integration.processes import descendants, wait_until_gone
from tests.integration.test_weight_groups import job
from tests.models import character_tokenizer, tiny_llama
from volley.checksum import weights_checksum
from volley.job import ActorsSpec
from volley.memory import total_memory
from volley.model import ModelSpec
from volley.records import Group, WeightBucket, WeightUpdate
from volley.update import LearnerSpec, Optimizer, PolicyUpdate

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
# vLLM takes the share of one NUMA node, whose memory may be half of the machine's, and a worker's own memory counts.
SHARE = min(0.5, (3 << 30) / total_memory())
TWO_WAY = {"tensor_parallel_size": 2, "gpu_memory_utilization": SHARE, "enforce_eager": True}


@contextmanager
def ray_head_with_gpus() -> Iterator[None]:
    """A Ray head that believes it has two GPUs. vLLM cannot bind two workers on one NUMA node, so it binds none."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment.setenv("TORCH_COMPILE_DISABLE", "1")  # as in actors that have no GPU
        with started_cluster(num_cpus=8, num_gpus=2, object_store_memory=256 << 20) as cluster, without_token():
            ray.init(address=str(cluster.address), log_to_driver=False, logging_level="error")
            yield
            ray.shutdown()


@pytest.fixture(scope="module")
def pretended_gpus() -> Iterator[None]:
    with ray_head_with_gpus():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_like(tmp_path_factory.mktemp("model"))


def model_like(folder: Path, seed: int = 0) -> Path:
    """One key-value head for two workers, so that both hold it, and a head tied to the embedding."""
    return tiny_llama(folder, seed=seed, num_key_value_heads=1, tie_word_embeddings=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(pretended_gpus: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ActorPool]:
    spec = ActorsSpec.model_validate(
        {"count": 1, "cpus": 0.1, "gpus": 2, "max_num_seqs": 32, "group_deadline_s": 60, "engine": TWO_WAY}
    )
    started = await ActorPool.start(ActorConfig(ModelSpec(path=model), spec, 256, 0, tmp_path_factory.mktemp("logs")))
    pids = {pid for info in started.infos for pid in (info.pid, *info.engine_pids, *descendants(info.pid))}
    yield started
    await started.stop()
    wait_until_gone(pids)


def request(**changes: int) -> GenerateRequest:
    prompt_p = np.array(character_tokenizer()("12+34=")["input_ids"], dtype=np.int32)
    return GenerateRequest(1, "p", prompt_p, changes.get("n", 8), 1.0, 1.0, changes.get("max_tokens", 24))


def published(version: int, weights: State) -> WeightUpdate:
    file = np.frombuffer(save(weights), dtype=np.uint8)
    return WeightUpdate(version, (WeightBucket(ray.put((file,)), file.nbytes),), weights_checksum([file]), 0.0)


async def generated(pool: ActorPool, made: GenerateRequest) -> Group:
    return await (await pool.generate(made))[0]


async def served(pool: ActorPool) -> State:
    (file,) = (await pool.served_weights()).values()
    weights: State = load(file.tobytes())
    return weights


async def test_both_workers_serve_the_models_own_weights(pool: ActorPool, model: Path) -> None:
    assert [info.model_processes for info in pool.infos] == [2]
    oracle = Oracle(model)
    group = await generated(pool, request())
    np.testing.assert_allclose(group.logprobs_T, oracle.logprobs(group), atol=1e-4)
    assert_same(await served(pool), oracle.weights[0])


async def test_an_update_in_the_middle_of_samples_reaches_both_workers(pool: ActorPool, model: Path) -> None:
    oracle = oracle_of_versions(model)

    async def update() -> None:
        await pool.broadcast(published(1, oracle.weights[1]))

    await assert_served_in_the_middle_of_samples(pool, oracle, update, 1)


async def test_the_weight_group_delivers_to_both_workers_in_the_middle_of_samples(
    pool: ActorPool, model: Path, tmp_path: Path
) -> None:
    oracle = oracle_of_versions(model)
    trained = model_like(tmp_path / "trained", seed=1)
    oracle.weights[2] = Oracle(trained).weights[0]
    config = LearnerConfig(
        ModelSpec(path=trained), LearnerSpec(verify_weights=True), Optimizer(), 10, 0, tmp_path, PolicyUpdate()
    )
    learner = await LearnerPool.start(config)
    groups = WeightGroups(job(model, deadline_s=20), pool, learner)
    assert await groups.form()
    assert pool.weight_group_members == (("actor-0", 2),)

    async def update() -> None:
        update = await learner.publish(2)
        assert (update.received, update.stored) == (frozenset({"actor-0"}), False)
        (done,) = (await pool.broadcast(update)).actors
        assert done.grouped

    await assert_served_in_the_middle_of_samples(pool, oracle, update, 2)
    await learner.stop()


def oracle_of_versions(model: Path) -> Oracle:
    """Of the first two versions."""
    oracle = Oracle(model)
    oracle.weights[1] = oracle.other_weights(seed=1)
    return oracle


async def assert_served_in_the_middle_of_samples(
    pool: ActorPool, oracle: Oracle, update: Callable[[], Awaitable[None]], version: int
) -> None:
    """Update to ``version`` while samples are drawn: their log-probs are those of the weights that drew each token."""
    updated = asyncio.Event()

    async def stream() -> list[Group]:
        """Groups one after the other until the update is there, so that it always meets samples half drawn."""
        groups = []
        while not updated.is_set():
            groups.append(await generated(pool, request(n=16, max_tokens=200)))
        return groups

    streams = [asyncio.create_task(stream()) for _ in range(2)]
    await asyncio.sleep(0.3)
    await update()
    updated.set()
    groups = [group for groups in await asyncio.gather(*streams) for group in groups]
    assert any(set(group.versions_T.tolist()) == {version - 1, version} for group in groups), "samples were being drawn"
    for group in groups:
        np.testing.assert_allclose(group.logprobs_T, oracle.logprobs(group), atol=1e-4)
    assert_same(await served(pool), oracle.weights[version])


def assert_same(found: State, expected: State) -> None:
    tied = {"lm_head.weight"}
    assert found.keys() - tied == expected.keys() - tied
    for name in expected.keys() - tied:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)
