"""Two real actors with vLLM engines on one small model: their samples, and weight updates in flight."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import ray
import torch
from safetensors.torch import load, save

from actors.config import ActorConfig, GenerateRequest
from actors.pool import ActorPool
from tests.integration.oracle import Oracle, State, version_changes
from tests.integration.processes import descendants, wait_until_gone
from tests.models import character_tokenizer, tiny_llama
from volley.checksum import weights_checksum
from volley.errors import HostError, JobError, WorkerDied
from volley.job import ActorsSpec
from volley.model import ModelSpec
from volley.records import Group, WeightBucket, WeightUpdate

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

LENGTH = 256
ACTORS = ("actor-0", "actor-1")
MOST_UPDATES = 10  # until samples were half drawn; two suffice unless the machine is busy
TOKENIZER = character_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The head is tied to the embedding, the harder case for an update, because the engine packs that matrix twice."""
    return tiny_llama(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


def configuration(model: Path, logs: Path, **spec: object) -> ActorConfig:
    actors = ActorsSpec.model_validate(
        {"cpus": 0.1, "max_num_seqs": 128, "kv_cache_gb": 0.1, "group_deadline_s": 60, "max_replacements": 0, **spec}
    )
    return ActorConfig(ModelSpec(path=model), actors, LENGTH, 0, logs, verify=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(ray_local: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ActorPool]:
    started = await ActorPool.start(configuration(model, tmp_path_factory.mktemp("logs"), count=2))
    assert len(scratch_folders()) == 2
    yield started
    pids = processes(started)
    await started.stop()
    wait_until_gone(pids)
    assert not scratch_folders()


def scratch_folders() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"volley-{os.getpid()}-*"))


def processes(pool: ActorPool) -> set[int]:
    return {pid for info in pool.infos for pid in (info.pid, *info.engine_pids, *descendants(info.pid))}


def request(text: str = "12+34=", **changes: object) -> GenerateRequest:
    prompt_p = np.array(TOKENIZER(text)["input_ids"], dtype=np.int32)
    made = GenerateRequest(1, "p", prompt_p, 8, 1.0, 1.0, 24)
    return replace(made, **changes)  # type: ignore[arg-type]


async def generate(pool: ActorPool, made: GenerateRequest) -> Group:
    ref, meta = await pool.generate(made)
    group: Group = await ref
    assert meta == group.meta()
    return group


def publish(version: int, weights: State, *, cuts: int = 2) -> WeightUpdate:
    """Put weights into the object store as safetensors files, as the learner does; a layer may be split over two."""
    names = list(weights)
    parts = [names[i::cuts] for i in range(cuts)]
    files = [np.frombuffer(save({name: weights[name] for name in part}), dtype=np.uint8) for part in parts]
    buckets = tuple(WeightBucket(ray.put((file,)), file.nbytes) for file in files)
    return WeightUpdate(version, buckets, weights_checksum(files), 0.0)


async def test_columns_agree_with_each_other_and_with_the_request(pool: ActorPool) -> None:
    group = await generate(pool, request(group_id=9, n=16, max_tokens=40))
    assert (group.group_id, group.prompt_id, group.n, len(group.texts)) == (9, "p", 16, 16)
    assert group.lengths_n.sum() == len(group.tokens_T) == len(group.logprobs_T) == len(group.versions_T)
    assert (group.logprobs_T <= 0).all()
    assert (group.versions_T == 0).all()
    stops = 0
    for tokens, stopped, text in zip(
        np.split(group.tokens_T, np.cumsum(group.lengths_n)[:-1]), group.stopped_n, group.texts, strict=True
    ):
        stops += stopped
        assert (tokens[-1] == TOKENIZER.eos_token_id) == stopped
        assert (tokens[:-1] != TOKENIZER.eos_token_id).all()
        assert stopped or len(tokens) == 40
        assert text == "".join(t for t in TOKENIZER.convert_ids_to_tokens(tokens.tolist()) if len(t) == 1)
    assert 0 < stops < 16


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)])
async def test_logprobs_are_those_of_the_distribution_sampled_from(
    pool: ActorPool, oracle: Oracle, temperature: float, top_p: float
) -> None:
    group = await generate(pool, request(n=16, temperature=temperature, top_p=top_p, max_tokens=64))
    expected = oracle.logprobs(group, temperature=temperature, top_p=top_p)
    np.testing.assert_allclose(group.logprobs_T, expected, atol=1e-4)


async def test_a_seed_determines_the_samples_on_any_actor(pool: ActorPool) -> None:
    groups = await asyncio.gather(*(generate(pool, request(seed=seed)) for seed in (3, 3, 4)))
    assert len({group.actor for group in groups}) == 2
    assert groups[0].texts == groups[1].texts != groups[2].texts
    assert len(set(groups[0].texts)) > 1


async def test_actors_share_the_load_and_draw_different_samples(pool: ActorPool) -> None:
    groups = await asyncio.gather(*(generate(pool, request(n=4)) for _ in range(6)))
    assert sorted(group.actor for group in groups) == ["actor-0"] * 3 + ["actor-1"] * 3
    assert len({text for group in groups for text in group.texts}) > 12


async def test_an_unused_cache_takes_no_memory(pool: ActorPool) -> None:
    """Three groups of short samples use little of the cache, which is the engine's largest mapping."""
    for info in pool.infos:
        largest = max(mappings(info.engine_pids[0]))
        assert largest[0] > 0.09 * 2**30
        assert largest[1] < 0.2 * largest[0]


def mappings(pid: int) -> list[tuple[int, int]]:
    """The writable private anonymous mappings of a process: bytes, and those that are resident."""
    found, anonymous = [], False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name:
            anonymous = rest[0] == "rw-p" and len(rest) == 4
        elif anonymous and name in ("Size:", "Rss:"):
            found.append(int(rest[0]) * 1024)
    return list(zip(found[::2], found[1::2], strict=True))


async def test_invalid_requests_are_job_errors_and_do_no_harm(pool: ActorPool) -> None:
    with pytest.raises(JobError, match=r"prompt 'p' has 301 tokens, but the model takes 1 to 255: change it"):
        await pool.generate(request("1" * 300))
    with pytest.raises(JobError, match="prompt 'p' contains token 5000, but the model has only 49"):
        await pool.generate(request(prompt_p=np.array([1, 5000], dtype=np.int32)))
    with pytest.raises(JobError, match=r"vLLM rejects prompt 'p': .*top_p"):
        await pool.generate(request(top_p=1.5))
    assert (await generate(pool, request())).n == 8


async def test_weights_change_in_the_middle_of_samples(pool: ActorPool, oracle: Oracle) -> None:
    """Each engine has three times the samples it can draw at once, so an update meets samples half drawn.

    On a busy machine it may come when they are all drawn, and nobody could ask for more: then another one follows.
    """
    oracle.weights |= {version: oracle.other_weights(version) for version in range(1, MOST_UPDATES + 1)}
    updates = [publish(version, oracle.weights[version]) for version in range(1, MOST_UPDATES + 1)]
    updated, groups = asyncio.Event(), list[Group]()

    async def stream() -> None:
        while not updated.is_set():
            groups.append(await generate(pool, request(n=64, max_tokens=120)))

    async def drawing(version: int) -> None:
        """Wait until each actor has drawn tokens with these weights, and has more to draw."""
        async with asyncio.timeout(240):
            while len({group.actor for group in groups if version in group.versions_T}) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while not all(actor.busy >= 256 for actor in pool.workers()):  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)

    def changes(actor: str) -> set[tuple[int, int]]:
        """The updates that came in the middle of one of the actor's samples."""
        found = {step for group in groups if group.actor == actor for step in version_changes(group)}
        return {(before, after) for before, after in found if after == before + 1}

    streams = [asyncio.create_task(stream()) for _ in range(12)]
    await drawing(0)
    reports = []
    for update in updates:
        reports.append(await pool.broadcast(update))
        await drawing(update.version)
        if all(len(changes(actor)) >= 2 for actor in ACTORS):
            break
    updated.set()
    await asyncio.gather(*streams)
    for actor in ACTORS:
        assert len(changes(actor)) >= 2
    changed = [group for group in groups if version_changes(group)]  # how many there are depends on the machine
    for group in (*changed[:8], *changed[-4:], groups[0], groups[-1]):
        np.testing.assert_allclose(group.logprobs_T, oracle.logprobs(group), atol=1e-4)
    for report in reports:
        assert [done.actor for done in report.actors] == list(ACTORS)
        assert all(0 < done.load_seconds < done.stall_seconds < 5 for done in report.actors)
    assert pool.version == len(reports)


async def test_served_weights_equal_the_published_ones_bitwise(pool: ActorPool, oracle: Oracle) -> None:
    version = pool.version + 1
    weights = oracle.weights[version] = oracle.other_weights(version)
    await pool.broadcast(publish(version, weights, cuts=5))
    published = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    served = {name: load(file.tobytes()) for name, file in (await pool.served_weights()).items()}
    assert set(served) == set(ACTORS)
    for tensors in served.values():
        assert set(tensors) == set(published)
        for name, tensor in published.items():
            assert torch.equal(tensors[name], tensor), name


async def test_cached_prompts_are_recomputed_after_an_update(pool: ActorPool, oracle: Oracle) -> None:
    """The prompt is long enough that whole blocks of its keys and values, from the old weights, are cached."""
    prompt = request("7" * 200, n=4, max_tokens=8)
    await asyncio.gather(*(generate(pool, prompt) for _ in range(4)))
    version = pool.version + 1
    oracle.weights[version] = oracle.other_weights(version)
    await pool.broadcast(publish(version, oracle.weights[version]))
    for group in await asyncio.gather(*(generate(pool, prompt) for _ in range(4))):
        assert set(group.versions_T) == {version}
        np.testing.assert_allclose(group.logprobs_T, oracle.logprobs(group), atol=1e-4)


@pytest.mark.parametrize("loads", [True, False], ids=["a new version", "the same"])
async def test_samples_sleep_halfway_without_their_cache_and_go_on(
    pool: ActorPool, oracle: Oracle, loads: bool
) -> None:
    for _ in range(MOST_UPDATES):  # on a busy machine, all may be drawn before they sleep
        before = pool.version
        groups, halfway = await sleep_and_go_on(pool, oracle, loads)
        for group in groups:
            np.testing.assert_allclose(group.logprobs_T, oracle.logprobs(group, slept=True), atol=1e-4)
        assert set(groups[-1].versions_T) == {before + loads}, "it began after they woke up"
        changes = {change for group in groups for change in version_changes(group)}
        assert changes <= ({(before, before + loads)} if loads else set())
        if halfway and (changes or not loads):
            return
    pytest.fail("no sample slept when it was half drawn")


async def sleep_and_go_on(pool: ActorPool, oracle: Oracle, loads: bool) -> tuple[list[Group], bool]:
    """Let the actors sleep, with or without a new version; returns the last groups, and whether some slept halfway.

    While they sleep nothing is drawn, new requests wait, and the engines' caches take next to no memory.
    """
    after = pool.version + loads
    oracle.weights[after] = oracle.other_weights(after) if loads else oracle.weights[after]
    update = publish(after, oracle.weights[after])
    asleep = asyncio.Event()

    async def stream() -> list[Group]:
        groups = [await generate(pool, request("7" * 100, n=64, max_tokens=120))]
        while not asleep.is_set():
            groups.append(await generate(pool, request("7" * 100, n=64, max_tokens=120)))
        return groups

    streams = [asyncio.create_task(stream()) for _ in range(6)]
    while not all(actor.busy >= 128 for actor in pool.workers()):  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.01)
    await generate(pool, request(n=2, max_tokens=2))  # so others have drawn tokens too
    await pool.sleep()
    await pool.sleep()  # a second time changes nothing
    asleep.set()
    late = asyncio.create_task(generate(pool, request(n=4)))
    caches = [max(mappings(info.engine_pids[0])) for info in pool.infos]
    assert all(size > 0.09 * 2**30 and resident < 2**20 for size, resident in caches)
    earlier, ended = -1, 0
    while ended != earlier:  # what had been drawn arrives, and then nothing more
        await asyncio.sleep(0.5)
        earlier, ended = ended, sum(task.done() for task in streams)
    assert not late.done()
    assert all(actor.state == "serving" for actor in pool.workers())
    await (pool.broadcast(update) if loads else pool.wake())
    groups = [group for groups in await asyncio.gather(*streams) for group in groups[-2:]] + [await late]
    assert pool.version == after
    return groups, ended < 6


async def test_corrupted_weights_are_not_served(pool: ActorPool, oracle: Oracle) -> None:
    before = pool.version
    torn = replace(publish(before + 1, oracle.other_weights(before + 1)), checksum="0" * 64)
    checksums = "have checksum [0-9a-f]{64}, but were published as 0{64}"
    with pytest.raises(HostError, match=f"weights {before + 1} {checksums}"):
        await pool.broadcast(torn)
    assert set((await generate(pool, request())).versions_T) == {before}


async def test_a_model_that_does_not_load_is_a_clear_error(ray_local: None, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tiny_llama(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not a model")
    started = (ActorPool.start(configuration(folder, tmp_path / folder.name)) for folder in (empty, broken))
    errors = await asyncio.gather(*started, return_exceptions=True)
    for named, error in zip((f"{empty}", f"{broken}, a model of type llama,"), errors, strict=True):
        assert isinstance(error, JobError), error
        assert f"actor-0: {named} does not load: " in str(error)
        assert "\n" not in str(error)
        assert len(str(error)) < 700
    assert "header" in str(errors[1]).lower()  # the safetensors error in the engine's process


OPTIONS = """
import json, sys
from actors.config import ActorConfig
from actors.options import engine_args
from volley.errors import JobError
from volley.job import ActorsSpec
from volley.model import ModelSpec
for options in json.loads(sys.argv[2]):
    try:
        spec = ActorsSpec(engine=options)
        print(engine_args(ActorConfig(ModelSpec(path=sys.argv[1]), spec, 64, 3, "logs"), 2).seed)
    except JobError as error:
        print(error)
"""


async def test_an_engine_option_is_checked_against_vllms_own(model: Path) -> None:
    options = [{"enforce_eagre": True}, {"max_num_seqs": 3}, {"logprobs_mode": "raw_logprobs"}, {"block_size": 64}]
    arguments = [sys.executable, "-c", OPTIONS, str(model), json.dumps(options)]
    done = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "actors.engine: vLLM has no option 'enforce_eagre'; did you mean 'enforce_eager'?",
        "actors.engine: 'max_num_seqs' is set by actors.max_num_seqs; remove it",
        "actors.engine: 'logprobs_mode' is set by Volley and cannot be changed; remove it",
        "5",
    ]


async def test_a_killed_actor_is_named_immediately_and_its_engine_ends_with_it(pool: ActorPool) -> None:
    """This test must be the last one, because the pool does not replace dead actors."""
    victim = pool.infos[1]
    pids = {victim.pid, *victim.engine_pids, *descendants(victim.pid)}
    groups = [asyncio.create_task(pool.generate(request(n=64, max_tokens=240))) for _ in range(4)]
    await asyncio.sleep(0.1)
    killed = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await asyncio.gather(*groups)
    assert time.monotonic() - killed < 10
    results = await asyncio.gather(*groups, return_exceptions=True)
    deaths = [result for result in results if isinstance(result, WorkerDied)]
    assert {death.worker for death in deaths} == {"actor-1"}
    assert deaths[0].log_tail
    wait_until_gone(pids)
