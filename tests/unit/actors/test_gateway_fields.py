"""Fields of requests with values of the wrong type: each is refused by its name, and the model is not asked."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from actors.gateway.asked import BadRequest, SamplingOfJob, asked
from tests.gateway_server import USER, Served, Standalone
from volley.gateway import GatewaySpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT: list[Any] = [5, 0, True, False, [], {}]
FLAG: list[Any] = ["banana", "", "true", 0, 1, [], {}]
OBJECT: list[Any] = ["x", "", 5, 0, True, False, []]
NUMBER: list[Any] = ["1", "", True, False, [], {}]
FIELDS: dict[str, list[Any]] = {
    **dict.fromkeys(["model", "user", "service_tier", "safety_identifier", "prompt_cache_key", "suffix"], TEXT),
    **dict.fromkeys(
        ["stream", "store", "parallel_tool_calls", "echo", "return_token_ids", "skip_special_tokens"], FLAG
    ),
    **dict.fromkeys(["metadata", "stream_options", "chat_template_kwargs", "response_format", "logit_bias"], OBJECT),
    **dict.fromkeys(["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens"], NUMBER),
    **dict.fromkeys(["n", "best_of", "frequency_penalty", "presence_penalty", "repetition_penalty"], NUMBER),
    "top_logprobs": NUMBER,
    "logprobs": ["1", "", [], {}],
    "stop": [5, 0, True, False, {}, [5], [None]],
    "tools": ["x", "", 5, 0, True, False, {}, [5], [[]]],
    "tool_choice": ["", 5, 0, True, False, [], {}],
}
CHAT, TOKENIZE, GENERATE = "/v1/chat/completions", "/tokenize", "/inference/v1/generate"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["actor", "serve"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    made = Served(GatewaySpec()) if request.param == "actor" else Standalone()
    yield made
    await made.close()


async def refused(served: Served, path: str, *bodies: dict[str, Any], saying: str) -> None:
    """Check that every request is answered 400 with a message that has ``saying`` in it."""
    (key,), asked_before = served.open(), len(served.engine.prompts)
    served.engine.says = ["what is not refused"] * len(bodies)
    base = served.server.url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=base, headers={"Authorization": f"Bearer {key}"}, timeout=20) as client:
        answers = await asyncio.gather(*(client.post(path, json=body) for body in bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert (answer.status_code, saying in answer.text) == (400, True), (body, answer.text)
    assert len(served.engine.prompts) == asked_before


@pytest.mark.parametrize("name", FIELDS)
async def test_a_field_of_the_wrong_type_is_named(served: Served, name: str) -> None:
    await refused(served, CHAT, *({"messages": [USER], name: wrong} for wrong in FIELDS[name]), saying=name)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"stream_options": {"include_usage": "yes"}}, "include_usage must be true or false"),
        ({"stream_options": {"include_usage": 0}}, "include_usage must be true or false"),
        ({"user": 5}, "user must be a text, not 5"),
        ({"parallel_tool_calls": "banana"}, "parallel_tool_calls must be true or false, not 'banana'"),
        ({"metadata": []}, "metadata must be an object, not []"),
    ],
)
async def test_what_to_write_is_said(served: Served, options: dict[str, Any], name: str) -> None:
    await refused(served, CHAT, {"messages": [USER], **options}, saying=name)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        *(
            ({"sampling_params": {"stop_token_ids": wrong}}, "stop_token_ids")
            for wrong in [*OBJECT[:-1], {}, [[]], [True]]
        ),
        *(({"sampling_params": {"min_tokens": wrong}}, "min_tokens") for wrong in NUMBER),
        *(({"sampling_params": wrong}, "sampling_params") for wrong in OBJECT),
        *(({"priority": wrong}, "priority") for wrong in NUMBER),
        ({"model": 5}, "model"),
        ({"sampling_params": {"temperature": True}}, "temperature"),
        ({"sampling_params": {"stop": 0}}, "stop"),
    ],
)
async def test_a_field_of_a_token_request_of_the_wrong_type_is_named(
    served: Served, fields: dict[str, Any], name: str
) -> None:
    await refused(served, GENERATE, {"token_ids": [5], **fields}, saying=name)


@pytest.mark.parametrize("wrong", ["no", 0, 1, [], {}])
async def test_a_request_to_tokenize_of_the_wrong_type(served: Served, wrong: Any) -> None:
    body = {"messages": [USER], "add_generation_prompt": wrong}
    await refused(served, TOKENIZE, body, saying="add_generation_prompt must be true or false")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ({"parameters": "x"}, "parameters of tool 1, 'add', must be an object"),
        ({"parameters": []}, "parameters of tool 1, 'add', must be an object"),
        ({"description": ["x"]}, "description of tool 1, 'add', must be a text"),
        ({"strict": "yes"}, "strict of tool 1, 'add', must be true or false"),
        ({"defer_loading": 2}, "defer_loading of tool 1, 'add', must be true or false"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
async def test_a_tool_that_vllm_would_reject_is_named(
    served: Served, path: str, function: dict[str, Any], problem: str
) -> None:
    tools = [{"type": "function", "function": {"name": name, **more}} for name, more in (("f", {}), ("add", function))]
    await refused(served, path, {"messages": [USER], "tools": tools}, saying=problem)
    late = [{**tools[0], "defer_loading": "x"}]
    await refused(served, path, {"messages": [USER], "tools": late}, saying="defer_loading of tool 0, 'f', must be")


async def test_null_is_the_same_as_absent() -> None:
    job = SamplingOfJob(1.0, 1.0)
    nothing = asked({}, job)
    assert asked(dict.fromkeys(FIELDS), job) == nothing
    assert (nothing.stream, nothing.usage, nothing.one_call, nothing.max_tokens) == (False, False, False, None)
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    assert len(asked({"tools": [{"type": "function", "function": function}]}, job).setting.tools) == 1


@pytest.mark.parametrize("name", ["n", "parallel_tool_calls", "stream", "tools", "user", "stream_options"])
async def test_a_job_that_overrides_sampling_refuses_wrong_types_too(name: str) -> None:
    for wrong in FIELDS[name]:
        with pytest.raises(BadRequest, match=name):
            asked({name: wrong}, SamplingOfJob(1.0, 1.0, "override"))
