"""The gateway of a finished model: sampling of the request's own, stops, keys, hosts, and what it refuses."""

import json
from collections.abc import AsyncIterator, Collection
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from actors.gateway.asked import BadRequest
from actors.gateway.http import create_app
from actors.gateway.server import Server
from actors.gateway.standalone import OwnSampling, StandaloneGateway, sampling_of
from tests.gateway_server import EOS, TOKENIZER, USER, FreeEngine
from volley.gateway import GatewaySpec

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Serving:
    def __init__(self, token: str | None, hosts: Collection[str] | None) -> None:
        self.engine = FreeEngine()
        gateway = StandaloneGateway(self.engine, TOKENIZER, [EOS], GatewaySpec(), context=200, token=token)
        self.server = Server("127.0.0.1")
        self.server.start(create_app(gateway, "tiny", hosts))

    def client(self, *says: str, key: str = "any") -> openai.AsyncOpenAI:
        self.engine.says += says
        return openai.AsyncOpenAI(base_url=self.server.url, api_key=key, max_retries=0, timeout=20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def free() -> AsyncIterator[Serving]:
    made = Serving(None, ["127.0.0.1", "localhost"])
    yield made
    await made.server.stop()


async def ask(client: openai.AsyncOpenAI, *messages: Any, **fields: Any) -> Any:
    async with client:
        return await client.chat.completions.create(model="m", messages=list(messages or (USER,)), **fields)


async def test_requests_choose_their_sampling(free: Serving) -> None:
    asked = {"temperature": 0, "top_p": 0.5, "seed": 3, "presence_penalty": 0.5, "max_tokens": 7}
    answer = await ask(free.client("hello"), **asked, extra_body={"top_k": 4})
    assert answer.choices[0].message.content == "hello"
    more = {"presence_penalty": 0.5, "top_k": 4}
    assert free.engine.asked[-1] == {"temperature": 0, "top_p": 0.5, "seed": 3, "max_tokens": 7, "more": more}
    await ask(free.client("hello"))
    assert free.engine.asked[-1]["temperature"] == 1.0
    assert free.engine.asked[-1]["max_tokens"] == 200 - len(free.engine.prompts[-1])


async def test_requests_stand_for_themselves(free: Serving) -> None:
    first = await ask(free.client("4"))
    second = await ask(free.client("5"), USER, {"role": "assistant", "content": "something else"}, USER)
    assert (first.choices[0].message.content, second.choices[0].message.content) == ("4", "5")
    assert second.prompt_token_ids == free.engine.prompts[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"), [("END", "one "), (["zz", "n"], "o"), ("zz", "one END two"), ("", "one END two")]
)
async def test_stops(free: Serving, stop: Any, text: str, stream: bool) -> None:
    made = await ask_text(free.client("one END two"), stop=stop, stream=stream)
    assert made == (text, "stop")


async def ask_text(client: openai.AsyncOpenAI, *, stream: bool, **fields: Any) -> tuple[str, str]:
    async with client:
        if not stream:
            (choice,) = (await client.completions.create(model="m", prompt="count", **fields)).choices
            return choice.text, choice.finish_reason
        text, finish = "", ""
        async for chunk in await client.completions.create(model="m", prompt="count", stream=True, **fields):
            text += chunk.choices[0].text
            finish = chunk.choices[0].finish_reason or finish
        return text, finish


async def test_an_answer_that_is_cut(free: Serving) -> None:
    answer = await ask(free.client("hello"), max_tokens=2)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("he", "length")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"n": 2}, "n is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"stop": [1]}, "stop must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"seed": 2**70}, "seed must be"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be a number"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty must be from 0.01 to 100"),
        ({"repetition_penalty": -1}, "repetition_penalty must be from 0.01 to 100"),
        ({"repetition_penalty": 101}, "repetition_penalty must be from 0.01 to 100"),
    ],
)
async def test_what_is_not_done_is_said(free: Serving, fields: dict[str, Any], problem: str) -> None:
    body = {"model": "m", "messages": [USER], **fields}
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{free.server.url}/chat/completions", content=json.dumps(body))
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


async def test_a_prompt_that_is_too_long(free: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match=r"the prompt has 200 tokens; the model takes 199"):
        async with free.client() as client:
            await client.completions.create(model="m", prompt=[5] * 200)
    with pytest.raises(openai.BadRequestError, match="token ids must be from 0"):
        async with free.client() as client:
            await client.completions.create(model="m", prompt=[10**9])


async def test_keys_and_hosts() -> None:
    serving = Serving("secret", None)
    try:
        assert (await ask(serving.client("yes", key="secret"))).choices[0].message.content == "yes"
        for key in ("wrong", "sécret"):
            async with httpx.AsyncClient() as client:
                headers = {b"Authorization": f"Bearer {key}".encode()}
                assert (await client.get(f"{serving.server.url}/models", headers=headers)).status_code == 401
    finally:
        await serving.server.stop()


async def test_other_hosts_and_web_pages_are_refused(free: Serving) -> None:
    async with httpx.AsyncClient() as client:
        for headers, status in (({"host": "evil.example"}, 421), ({"origin": "http://evil.example"}, 403), ({}, 200)):
            answer = await client.get(f"{free.server.url}/models", headers=headers)
            assert answer.status_code == status
        assert json.loads(answer.content)["data"][0]["id"] == "tiny"


async def test_absent_fields_change_nothing() -> None:
    assert sampling_of({"model": "m", "temperature": None, "n": 1, "stop": None, "user": "u"}) == OwnSampling()
    with pytest.raises(BadRequest, match="guided_json"):
        sampling_of({"guided_json": {}})
