"""Programs on a real engine: what they are answered is what is recorded, and what the learner would compute."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
import ray
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from actors.config import ActorConfig, EpisodesRequest, OpenedSessions
from actors.gateway.groups import EpisodeReport
from actors.gateway.session import End, Limits
from actors.pool import ActorPool
from tests.chat_models import chat_tokenizer
from tests.integration.oracle import Oracle, State
from tests.models import tiny_llama
from volley.errors import WorkerDied
from volley.gateway import GatewaySpec
from volley.job import ActorsSpec
from volley.model import ModelSpec
from volley.records import Group, WeightBucket, WeightUpdate

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

LIMITS = Limits(calls=4, tokens=90, context=480)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("chat-model"), tokenizer=chat_tokenizer())


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(ray_local: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ActorPool]:
    actors = ActorsSpec.model_validate({"cpus": 0.1, "kv_cache_gb": 0.1, "max_num_seqs": 32, "max_replacements": 1})
    logs = tmp_path_factory.mktemp("logs")
    config = ActorConfig(ModelSpec(path=model), actors, 512, 0, logs, gateway=GatewaySpec())
    started = await ActorPool.start(config)
    yield started
    await started.stop()


def request(n: int = 4, seed: int | None = None) -> EpisodesRequest:
    return EpisodesRequest(7, "p", n, 1.0, 1.0, LIMITS, seed)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def converse(opened: OpenedSessions, key: str, between: Any = None) -> list[Any]:
    """Three calls, the second streamed; ``between`` is awaited before the last one."""
    answers: list[Any] = []
    async with openai.AsyncOpenAI(base_url=opened.url, api_key=key, max_retries=0) as client:
        messages: list[Any] = [user("count to ten, please")]
        first: Any = await client.chat.completions.create(model="m", messages=messages, max_tokens=12)
        answers.append((first.choices[0].token_ids, [each.logprob for each in first.choices[0].logprobs.content]))
        messages += [first.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": "1", "content": "42"}]
        text, ids = "", []
        stream: Any = await client.chat.completions.create(model="m", messages=messages, max_tokens=12, stream=True)
        async for chunk in stream:
            (choice,) = chunk.choices
            text += choice.delta.content or ""
            if choice.finish_reason:
                ids = choice.token_ids
                answers.append((ids, [each["logprob"] for each in choice.logprobs.model_dump()["content"]]))
        if between is not None:
            await between()
        messages += [{"role": "assistant", "content": text}, user("go on")]
        last: Any = await client.chat.completions.create(model="m", messages=messages, max_tokens=12)
        answers.append((last.choices[0].token_ids, [each.logprob for each in last.choices[0].logprobs.content]))
    return answers


async def everyone(opened: OpenedSessions, between: Any = None) -> list[list[Any]]:
    return list(await asyncio.gather(*(converse(opened, key, between) for key in opened.keys)))


def rows(group: Group) -> list[tuple[list[int], slice, list[int]]]:
    """Per sample the row that the learner computes, its tokens, and the place of each of them in the row."""
    found = []
    for sample in range(group.n):
        start = int(group.lengths_n[:sample].sum())
        row, places = list(group.prompt_p), []
        for at in range(start, start + int(group.lengths_n[sample])):
            row += group.observation_S[group.observation_at_S == at].tolist()
            places.append(len(row))
            row.append(int(group.tokens_T[at]))
        found.append((row, slice(start, start + len(places)), places))
    return found


@torch.inference_mode()
def expected(oracle: Oracle, group: Group) -> NDArray[np.float32]:
    """Each token's log-prob in one forward pass over the whole episode, under the weights it was drawn with."""
    result = np.zeros(len(group.tokens_T), np.float32)
    for row, own, places in rows(group):
        for version in np.unique(group.versions_T[own]):
            oracle.model.load_state_dict(oracle.weights[int(version)], strict=False)
            logits = oracle.model(torch.tensor([row])).logits[0].log_softmax(-1)
            drawn = group.versions_T[own] == version
            at = torch.tensor(places)[torch.from_numpy(drawn)]
            result[own][drawn] = logits[at - 1, torch.tensor(row)[at]].numpy()
    return result


def update(version: int, weights: State) -> WeightUpdate:
    file = np.frombuffer(save(weights), dtype=np.uint8)
    return WeightUpdate(version, (WeightBucket(ray.put((file,)), file.nbytes),), None, 0.0)


async def recorded(
    pool: ActorPool, run: Any, asked: EpisodesRequest | None = None
) -> tuple[Any, Group, tuple[EpisodeReport, ...]]:
    result, ref, meta, reports = await pool.episodes(asked or request(), run)
    group: Group = await ref
    assert meta == group.meta()
    return result, group, reports


async def test_what_programs_are_answered_is_recorded_with_the_learners_log_probs(
    pool: ActorPool, oracle: Oracle
) -> None:
    answers, group, reports = await recorded(pool, everyone)
    assert [report.calls for report in reports] == [3] * 4
    assert all(report.end is None and report.rewrites == 0 for report in reports)
    told = [ids for episode in answers for ids, _ in episode]
    assert np.concatenate(told).tolist() == group.tokens_T.tolist()
    logprobs = np.concatenate([logprobs for episode in answers for _, logprobs in episode])
    np.testing.assert_allclose(logprobs, group.logprobs_T, atol=1e-6)
    np.testing.assert_allclose(group.logprobs_T, expected(oracle, group), atol=1e-4)
    assert len(set(group.texts)) > 1
    assert len(group.observation_S) > 4 * 10


async def test_each_call_is_made_with_the_weights_of_its_version(pool: ActorPool, oracle: Oracle) -> None:
    """The prefix of an earlier version is computed again, so all of a call has one version's log-probs."""
    oracle.weights[1] = oracle.other_weights(1)
    waiting, changed = 0, asyncio.Event()

    async def between() -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 4:
            await pool.broadcast(update(1, oracle.weights[1]))
            changed.set()
        await changed.wait()

    _, group, _ = await recorded(pool, lambda opened: everyone(opened, between))
    for _, own, _ in rows(group):
        assert set(group.versions_T[own].tolist()) == {0, 1}
    np.testing.assert_allclose(group.logprobs_T, expected(oracle, group), atol=1e-4)
    swapped = Group(**{**{f: getattr(group, f) for f in group.__slots__}, "versions_T": 1 - group.versions_T})
    assert np.abs(group.logprobs_T - expected(oracle, swapped)).max() > 0.1, "the two versions differ clearly"


async def test_answers_that_stop_at_a_text_are_recorded_as_they_were_sampled(pool: ActorPool, oracle: Oracle) -> None:
    stops = ["e", "t", "a ", "o"]

    async def run(opened: OpenedSessions) -> tuple[list[int], int]:
        told: list[int] = []
        stopped = 0
        async with openai.AsyncOpenAI(base_url=opened.url, api_key=opened.keys[0], max_retries=0) as client:
            messages: list[Any] = [user("count to ten, please")]
            for stream in (False, True, False):
                asked: Any = {"model": "m", "messages": messages, "stop": stops, "max_tokens": 30, "stream": stream}
                answer: Any = await client.chat.completions.create(**asked)
                choices = [each async for chunk in answer for each in chunk.choices] if stream else answer.choices
                text = "".join((each.delta if stream else each.message).content or "" for each in choices)
                assert not any(stop in text for stop in stops)
                told += choices[-1].token_ids
                stopped += choices[-1].finish_reason == "stop" and len(choices[-1].token_ids) > 0
                messages += [{"role": "assistant", "content": text}, user("go on")]
        return told, stopped

    answers = [await recorded(pool, run, request(n=1, seed=seed)) for seed in range(4)]
    for (told, _), group, (report,) in answers:
        assert (report.calls, report.rewrites, group.tokens_T.tolist()) == (3, 0, told)
        np.testing.assert_allclose(group.logprobs_T, expected(oracle, group), atol=1e-4)
    assert sum(stopped for (_, stopped), _, _ in answers) > 6


async def test_seeds_repeat_episodes(pool: ActorPool) -> None:
    once, again = [await recorded(pool, everyone, request(seed=11)) for _ in range(2)]
    assert once[1].tokens_T.tolist() == again[1].tokens_T.tolist()
    assert len({tuple(ids) for episode in once[0] for ids, _ in episode[:1]}) > 1, "each episode has a seed of its own"


async def test_the_budget_ends_an_episode(pool: ActorPool) -> None:
    async def greedy(opened: OpenedSessions) -> None:
        async with openai.AsyncOpenAI(base_url=opened.url, api_key=opened.keys[0], max_retries=0) as client:
            messages: list[Any] = [user("x")]
            while True:
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message.model_dump(), user("on")]

    async def run(opened: OpenedSessions) -> str:
        with pytest.raises(openai.BadRequestError) as ended:
            await greedy(opened)
        return str(ended.value)

    said, group, (report,) = await recorded(pool, run, request(n=1))
    assert report.end in (End.TOKENS, End.CALLS)
    assert str(report.end) in said
    assert not group.stopped_n[0]
    assert group.lengths_n[0] <= LIMITS.tokens


async def test_other_episodes_find_another_actor_if_theirs_dies(pool: ActorPool) -> None:
    attempts = 0

    async def run(opened: OpenedSessions) -> list[list[Any]] | None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            (victim,) = pool._serving
            ray.kill(victim._handle)
            with pytest.raises((openai.APIConnectionError, openai.APIStatusError)):
                await everyone(opened)
            return None
        return await everyone(opened)

    answers, group, _ = await recorded(pool, run)
    assert attempts == 2
    assert np.concatenate([ids for episode in answers for ids, _ in episode]).tolist() == group.tokens_T.tolist()
    assert [type(death) for death in pool.deaths] == [WorkerDied]
