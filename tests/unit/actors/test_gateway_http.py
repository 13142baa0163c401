"""The gateway over HTTP, with the real OpenAI client and a real socket: what is answered, refused and bounded."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from actors.gateway.bodies import most_bytes
from actors.gateway.rendering import Setting
from tests.chat_models import split
from tests.gateway_server import EOS, TOKENIZER, USER, Served, ask
from volley.errors import JobError, WorkerDied
from volley.gateway import GatewaySpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    made = Served(GatewaySpec())
    yield made
    await made.close()


async def test_a_stream_says_the_same_as_a_whole_answer(served: Served) -> None:
    text = "Grüße, 你好 🙂."
    client = served.client(text, text)
    pieces, final = "", None
    stream = await ask(client, USER, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            pieces += choice.delta.content or ""
            final = choice if choice.finish_reason else final
    assert pieces == text
    assert final is not None
    assert (final.finish_reason, final.token_ids) == ("stop", [*split(TOKENIZER, text), EOS])
    assert chunks[-1].usage.completion_tokens == len(final.token_ids)
    assert len(chunks) > 8
    whole = await ask(client, USER, {"role": "assistant", "content": pieces}, USER)
    assert whole.choices[0].message.content == text
    assert served.session(client).rewrites == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"seed": 3},
        {"n": 2},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 1},
        {"logit_bias": {"5": 10}},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"stop": "a" * 201},
        {"stop": [5]},
        {"response_format": {"type": "json_object"}},
        {"top_logprobs": 5, "logprobs": True},
        {"extra_body": {"guided_json": {}}},
        {"extra_body": {"min_p": 0.1}},
        {"extra_body": {"top_k": 5}},
        {"extra_body": {"something_new": 1}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}},
        {"max_tokens": 0},
        {"extra_body": {"tools": [{"name": "add"}]}},
        {"extra_body": {"stream": "yes"}},
    ],
)
async def test_requests_that_the_gateway_cannot_follow_say_so(served: Served, fields: dict[str, Any]) -> None:
    client = served.client()
    (name,) = fields.get("extra_body") or list(fields)[-1:]
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(client, USER, **fields)
    assert name.split("_")[-1] in str(refused.value)
    assert served.session(client).calls == 0
    assert served.engine.says == []


async def test_sampling_may_be_asked_as_it_is_or_be_overridden(served: Served) -> None:
    same = {"temperature": 1.0, "top_p": 1, "n": 1, "presence_penalty": 0, "logprobs": True, "user": "me"}
    client = served.client("a", seed=40)
    await ask(client, USER, **same, seed=None)
    assert served.engine.asked[-1] == {"temperature": 1.0, "top_p": 1.0, "seed": 40, "max_tokens": 400}
    client = served.client("a", rule="override")
    await ask(client, USER, temperature=0.0, seed=3, extra_body={"guided_json": {}})
    assert served.engine.asked[-1] == {"temperature": 1.0, "top_p": 1.0, "seed": None, "max_tokens": 400}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_stops_at_a_text_and_is_continued_without_it(served: Served, stream: bool) -> None:
    """What is recorded ends with the token that completes the text; what the client gets ends before it."""
    client = served.client("Act: add 2\nObservation: 5", "So 4.")
    reply = await ask(client, USER, stop=["Observation:", "Answer:"], stream=stream)
    if stream:
        choices = [choice async for chunk in reply for choice in chunk.choices]
        content, last = "".join(choice.delta.content or "" for choice in choices), choices[-1]
    else:
        content, last = reply.choices[0].message.content, reply.choices[0]
    sampled = split(TOKENIZER, "Act: add 2\nObservation:")
    assert (content, last.finish_reason, last.token_ids) == ("Act: add 2\n", "stop", sampled)
    session = served.session(client)
    drawn = session.branches[0].calls[0].drawn
    assert (drawn.tokens, drawn.logprobs, drawn.stopped) == (sampled, [-0.25] * len(sampled), True)
    await ask(client, USER, {"role": "assistant", "content": content}, {"role": "user", "content": "Observation: 4"})
    (branch,) = session.branches
    assert (session.rewrites, branch.calls[1].context) == (
        0,
        TOKENIZER("<|im_end|>\n<|im_start|>user\nObservation: 4<|im_end|>\n<|im_start|>assistant\n").input_ids,
    )
    group, _ = await served.gateway.close_sessions([client.api_key], group_id=1, prompt_id="p", actor="a")
    assert (group.texts, group.stopped_n.tolist()) == (("So 4.",), [True])


@pytest.mark.parametrize(("behind", "new"), [("Observation: 4\n", " 4\n"), ("Result: 4\n", "Result: 4\n")])
async def test_a_prompt_may_repeat_the_text_at_which_an_answer_stopped(served: Served, behind: str, new: str) -> None:
    client = served.client("Act: add\nObservation: 5", "So 4. Observation: none")
    first: Any = await client.completions.create(model="m", prompt="sum\n", stop="Observation:")
    assert first.choices[0].text == "Act: add\n"
    prompt = f"sum\nAct: add\n{behind}"
    await client.completions.create(model="m", prompt=prompt, stop=["Observation:", ""])
    (branch,) = served.session(client).branches
    assert branch.calls[1].context == TOKENIZER(new, add_special_tokens=False).input_ids
    group, _ = await served.gateway.close_sessions([client.api_key], group_id=1, prompt_id="p", actor="a")
    assert group.texts == ("So 4. ",), "the scorer judges what the program saw"
    assert TOKENIZER.decode(group.tokens_T) == "Act: add\nObservation:So 4. Observation:"


async def test_a_rewritten_history_is_named_and_ends_the_episode(served: Served) -> None:
    client = served.client("4")
    await ask(client)
    with pytest.raises(openai.BadRequestError, match=r"message 1 was assistant .*4.* and is assistant .*four"):
        await ask(client, USER, {"role": "assistant", "content": "four"}, USER)
    with pytest.raises(openai.BadRequestError, match="message 1 was"):
        await ask(client)


async def test_limits_are_answered_with_length(served: Served) -> None:
    client = served.client("abc", calls=1)
    reply = (await ask(client)).choices[0].message
    over = await ask(client, USER, reply.model_dump(), USER)
    assert (over.choices[0].finish_reason, over.choices[0].message.content) == ("length", "")
    client = served.client("abcdef", tokens=3)
    cut = await ask(client)
    assert (cut.choices[0].finish_reason, cut.choices[0].message.content) == ("length", "abc")
    assert served.session(client).end == "tokens"
    client = served.client("abcdef", tokens=30)
    assert (await ask(client, max_tokens=2)).choices[0].message.content == "ab"
    assert served.session(client).end is None


async def test_completions_in_text_and_in_ids(served: Served) -> None:
    client = served.client("fgh", "k", "m")
    first: Any = await client.completions.create(model="any", prompt="a b c d e")
    assert first.choices[0].text == "fgh"
    second: Any = await client.completions.create(model="any", prompt="a b c d efgh ij")
    ids = [*first.choices[0].prompt_token_ids, *first.choices[0].token_ids]
    assert second.choices[0].prompt_token_ids[: len(ids)] == ids
    ids = [*second.choices[0].prompt_token_ids, *second.choices[0].token_ids, 9]
    stream = await client.completions.create(model="any", prompt=ids, stream=True)
    assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == "m"
    assert served.engine.prompts[-1] == ids
    for prompt in ("", [10**9], [-1], [[1], [2]], ["a", "b"], None):
        answer = await post(served, "/v1/completions", client.api_key, {"prompt": prompt})
        assert answer.status_code == 400, prompt
    half = await post(served, "/v1/completions", client.api_key, None, content=b'{"prompt": "\\ud800"}')
    assert (half.status_code, "surrogate" in half.text) == (400, True)


async def test_token_ids_in_and_out(served: Served) -> None:
    """As renderers 0.1.12 asks for it."""
    client = served.client("fgh", "k")
    params = {"stop_token_ids": [EOS], "logprobs": 1, "skip_special_tokens": False, "temperature": 1.0, "max_tokens": 9}
    body = {"model": "any", "token_ids": [5, 6, 7], "sampling_params": params, "cache_salt": "3"}
    answer = (await post(served, "/inference/v1/generate", client.api_key, body)).json()
    (choice,) = answer["choices"]
    ids = [*split(TOKENIZER, "fgh"), EOS]
    assert (choice["token_ids"], choice["finish_reason"], answer["prompt_token_ids"]) == (ids, "stop", [5, 6, 7])
    assert [(each["token_id"], each["token"], each["logprob"]) for each in choice["logprobs"]["content"]] == [
        (token, f"token_id:{token}", -0.25) for token in ids
    ]
    assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": len(ids)}]
    body["token_ids"] = [5, 6, 7, *ids, 9]
    await post(served, "/inference/v1/generate", client.api_key, body)
    (branch,) = served.session(client).branches
    assert [call.context for call in branch.calls] == [[5, 6, 7], [9]]
    rewritten = await post(served, "/inference/v1/generate", client.api_key, {"token_ids": [5]})
    assert (rewritten.status_code, rewritten.json()["error"]["code"]) == (400, "history_rewritten")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sampling_params": {"temperature": 0.5}}, "temperature"),
        ({"sampling_params": {"stop_token_ids": [3]}}, "stop_token_ids"),
        ({"sampling_params": {"stop_token_ids": 3}}, "stop_token_ids"),
        ({"sampling_params": {"ignore_eos": True}}, "ignore_eos"),
        ({"sampling_params": {"logprobs": 5}}, "logprobs"),
        ({"sampling_params": {"stream": True}}, "stream"),
        ({"sampling_params": {"prompt": [6]}}, "prompt"),
        ({"sampling_params": {"something_new": 1}}, "something_new"),
        ({"sampling_params": []}, "sampling_params"),
        ({"stream": True}, "stream"),
        ({"output_mode": "text"}, "output_mode"),
        ({"features": {}}, "features"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": [10**9]}, "token ids"),
        ({"token_ids": "abc"}, "token_ids"),
    ],
)
async def test_token_requests_that_the_gateway_cannot_follow_say_so(
    served: Served, fields: dict[str, Any], name: str
) -> None:
    client = served.client()
    answer = await post(served, "/inference/v1/generate", client.api_key, {"token_ids": [5], **fields})
    assert (answer.status_code, name in answer.json()["error"]["message"]) == (400, True)
    assert served.session(client).calls == 0


@pytest.mark.parametrize("logprob", [float("-inf"), float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/chat/completions", {"messages": [USER], "stream": True}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/inference/v1/generate", {"token_ids": [5]}),
    ],
)
async def test_log_probs_that_json_cannot_hold_are_written_as_vllm_does(
    served: Served, path: str, body: dict[str, Any], logprob: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = served.client("a")
    monkeypatch.setattr(served.engine, "logprob", logprob)
    answer = await post(served, path, client.api_key, body)
    assert answer.status_code == 200
    assert "-9999.0" in answer.text
    assert "NaN" not in answer.text
    assert "Infinity" not in answer.text
    (recorded, _) = served.session(client).branches[0].calls[0].drawn.logprobs
    assert recorded == pytest.approx(logprob, nan_ok=True), "the learner sees what was sampled"


async def test_models_and_tokenize(served: Served) -> None:
    client = served.client()
    (model,) = (await client.models.list()).data
    assert (model.id, model.max_model_len) == ("tiny", 2000)  # type: ignore[attr-defined]
    base = served.server.url.removesuffix("/v1")
    chat = await post(served, "/tokenize", client.api_key, {"messages": [USER]}, base=base)
    assert chat.json()["tokens"] == served.gateway.renderer.prompt([USER], Setting())
    text = await post(served, "/tokenize", client.api_key, {"prompt": "hello"}, base=base)
    assert text.json()["tokens"] == TOKENIZER("hello", add_special_tokens=False).input_ids
    assert text.json()["count"] == len(text.json()["tokens"])


async def post(served: Served, path: str, key: str, body: Any, *, base: str = "", **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}", **options.pop("headers", {})}
    async with httpx.AsyncClient(timeout=20) as client:
        url = (base or served.server.url.removesuffix("/v1")) + path
        if "content" in options:
            return await client.post(url, headers=headers, **options)
        return await client.post(url, headers=headers, json=body, **options)


async def test_only_known_keys_from_this_host_get_in(served: Served) -> None:
    (key,) = served.open()
    path, body = "/v1/chat/completions", {"messages": [USER]}
    for wrong in ("no", "x" * 43, key[:-1]):
        assert (await post(served, path, wrong, body)).status_code == 401
    async with httpx.AsyncClient() as client:
        assert (await client.get(served.server.url + "/models")).status_code == 401
        authorization = {"Authorization": f"Bearer {key}"}
        other = await client.get(served.server.url + "/models", headers={**authorization, "Host": "evil.example"})
        page = await client.get(served.server.url + "/models", headers={**authorization, "Origin": "http://a.b"})
        assert (other.status_code, page.status_code) == (421, 403)
        assert (await client.get(served.server.url + "/models", headers=authorization)).status_code == 200


async def test_bodies_are_bounded_and_must_be_json(served: Served) -> None:
    (key,) = served.open()
    for content in (b"", b"[]", b"{", b"\xff", b'{"messages": ' + b"[" * 200_000, b'"a"'):
        answer = await post(served, "/v1/chat/completions", key, None, content=content)
        assert (answer.status_code, "error" in answer.json()) == (400, True)
    large = await post(served, "/v1/chat/completions", key, None, content=b" " * (most_bytes(2000) + 1))
    assert large.status_code == 413


async def test_a_client_that_leaves_takes_its_call_along(served: Served) -> None:
    client = served.client(None, "again")
    served.engine.hanging.clear()
    leaving = asyncio.create_task(ask(client))
    await asyncio.wait_for(served.engine.hanging.wait(), 20)
    leaving.cancel()
    answer = await ask(client)
    assert answer.choices[0].message.content == "again"
    session = served.session(client)
    assert (session.calls, session.abandoned, session.rewrites) == (1, 1, 0)


async def test_calls_of_one_session_follow_one_another(served: Served) -> None:
    """The second of two equal calls at once finds a history that is longer than its own."""
    client = served.client("one", "two")
    outcomes = await asyncio.gather(ask(client), ask(client), return_exceptions=True)
    assert sorted(type(each).__name__ for each in outcomes) == ["BadRequestError", "ChatCompletion"]
    assert served.engine.says == ["two"]
    served.engine.says.clear()


async def test_closing_a_session_drops_the_call_that_runs(served: Served) -> None:
    served.engine.hanging.clear()
    client = served.client(None)
    pending = asyncio.create_task(ask(client))
    await served.engine.hanging.wait()
    group, _ = await served.gateway.close_sessions([client.api_key], group_id=0, prompt_id="", actor="")
    with pytest.raises(openai.AuthenticationError):
        await pending
    assert len(group.tokens_T) == 0


async def drained(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (JobError("vLLM rejects the prompt"), openai.BadRequestError),
        (WorkerDied("actor-0", "its engine exited"), openai.APIStatusError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_of_the_engine_reach_the_program(
    served: Served, failure: Exception, error: type[Exception], stream: bool
) -> None:
    client = served.client(failure, "fine")
    with pytest.raises(openai.APIError if stream else error):
        await drained(await ask(client, USER, stream=stream))
    assert (await ask(client)).choices[0].message.content == "fine"
