"""vLLM's own parsers behind the gateway: tool calls, broken ones, and reasoning."""

import json
import logging
import warnings
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from actors.config import EpisodesRequest
from actors.gateway.calls import Gateway
from actors.gateway.session import Drawn, Limits
from actors.parser_names import parser_names
from tests.chat_models import chat_tokenizer, split
from tests.gateway_server import EOS, TOKENIZER, USER, ScriptedEngine, Served, ask
from volley.errors import JobError
from volley.gateway import GatewaySpec

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def _vllm() -> None:
    """vLLM, whose import warns of many things."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.entrypoints.openai.chat_completion.protocol
        import vllm.parser  # noqa: F401
    for name in ("actors.gateway.replies", "vllm"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@pytest.mark.usefixtures("_vllm")
async def test_the_names_read_from_the_source_are_those_that_vllm_has() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert parser_names("tool_parser") == tuple(sorted(ToolParserManager.lazy_parsers))
    assert parser_names("reasoning_parser") == tuple(sorted(ReasoningParserManager.lazy_parsers))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(_vllm: None) -> AsyncIterator[Served]:
    made = Served(GatewaySpec(tool_parser="hermes"))
    yield made
    await made.close()


async def test_a_conversation_with_a_tool(served: Served) -> None:
    client = served.client(f"Let me see. {CALL_TEXT}", "It is 4.")
    first = await ask(client, USER, tools=TOOLS)
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "add")
    assert json.loads(call.function.arguments) == {"a": 2, "b": 2}
    assert choice.message.content == "Let me see. "
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    second = await ask(client, USER, choice.message.model_dump(), result, tools=TOOLS)
    assert second.choices[0].message.content == "It is 4."
    assert second.choices[0].finish_reason == "stop"
    prompt, tokens = first.prompt_token_ids, choice.token_ids
    assert tokens == [*split(TOKENIZER, f"Let me see. {CALL_TEXT}"), EOS]
    assert (
        second.prompt_token_ids[: len(prompt) + len(tokens)]
        == prompt + tokens
        == served.engine.prompts[-1][: len(prompt) + len(tokens)]
    )
    assert [each.token for each in choice.logprobs.content] == [f"token_id:{token}" for token in tokens]
    assert {each.logprob for each in choice.logprobs.content} == {-0.25}
    assert first.usage.total_tokens == len(prompt) + len(tokens)
    group, (report,) = await served.gateway.close_sessions([client.api_key], group_id=5, prompt_id="p", actor="actor-0")
    assert (group.texts, group.group_id, report.calls) == (("It is 4.",), 5, 2)
    assert [*group.prompt_p] == prompt
    with pytest.raises(openai.AuthenticationError, match="belongs to no session"):
        await ask(client)


async def test_a_streamed_tool_call(served: Served) -> None:
    client = served.client(CALL_TEXT, "4")
    chunks = [chunk async for chunk in await ask(client, USER, tools=TOOLS, stream=True)]
    (call,) = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    echoed = {"id": call.id, "type": "function", "function": call.function.model_dump()}
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    await ask(client, USER, {"role": "assistant", "content": None, "tool_calls": [echoed]}, result, tools=TOOLS)
    assert (served.session(client).calls, served.session(client).rewrites) == (2, 0)


@pytest.mark.parametrize(
    "says",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>',
        "<tool_call>\n{'name': 'add'}\n</tool_call>",
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        "well <tool_call>",
        "<tool_call></tool_call>",
    ],
)
async def test_a_broken_tool_call_is_text_and_is_counted(served: Served, says: str) -> None:
    client = served.client(says, "no tool", says)
    first = await ask(client, USER, tools=TOOLS)
    message = first.choices[0].message
    assert (message.content, message.tool_calls, first.choices[0].finish_reason) == (says, None, "stop")
    await ask(client, USER, message.model_dump(), USER, tools=TOOLS)
    assert served.session(client).parse_failures == 1
    plain = served.client(says)
    assert (await ask(plain, USER)).choices[0].message.content == says
    assert (await served.gateway.close_sessions([plain.api_key], group_id=0, prompt_id="", actor=""))[1][
        0
    ].parse_failures == 0
    served.engine.says.clear()


async def test_a_broken_tool_call_is_not_logged_by_vllm(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm")
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [caplog.handler])  # its records go no further
    client = served.client(CALL_TEXT)
    cut = await ask(client, USER, tools=TOOLS, max_tokens=len(CALL_TEXT) // 2)
    assert (cut.choices[0].finish_reason, served.session(client).parse_failures) == ("length", 1)
    assert [record for record in caplog.records if record.name.startswith("vllm")] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_for_one_call_at_a_time_gets_the_first(served: Served, stream: bool) -> None:
    """All that was sampled stays recorded, and the history that is continued is the answer's."""
    other = CALL_TEXT.replace("2", "3")
    client = served.client(f"{CALL_TEXT}\n{other}", "4")
    reply = await ask(client, USER, tools=TOOLS, parallel_tool_calls=False, stream=stream)
    if stream:
        chunks = [choice async for chunk in reply for choice in chunk.choices]
        calls, ids = [call for choice in chunks for call in choice.delta.tool_calls or []], chunks[-1].token_ids
    else:
        calls, ids = reply.choices[0].message.tool_calls, reply.choices[0].token_ids
    (call,) = calls
    assert json.loads(call.function.arguments) == {"a": 2, "b": 2}
    assert ids == [*split(TOKENIZER, f"{CALL_TEXT}\n{other}"), EOS]
    echoed = {"id": call.id, "type": "function", "function": call.function.model_dump()}
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    message = {"role": "assistant", "content": None, "tool_calls": [echoed]}
    await ask(client, USER, message, result, tools=TOOLS, parallel_tool_calls=False)
    session = served.session(client)
    assert (session.calls, session.rewrites, session.parse_failures) == (2, 0, 0)
    assert session.branches[0].calls[0].drawn.tokens == ids


@pytest.mark.parametrize("allowed", [True, None])
async def test_other_requests_get_all_calls(served: Served, allowed: bool | None) -> None:
    client = served.client(CALL_TEXT * 2)
    reply = await ask(client, USER, tools=TOOLS, parallel_tool_calls=allowed)
    assert len(reply.choices[0].message.tool_calls) == 2


@pytest.mark.parametrize("parsers", [{"tool_parser": "no-such"}, {"reasoning_parser": "no-such"}])
@pytest.mark.usefixtures("_vllm")
async def test_a_parser_that_vllm_does_not_have(parsers: dict[str, str]) -> None:
    with pytest.raises(JobError, match="no-such"):
        Gateway(ScriptedEngine(), TOKENIZER, [EOS], GatewaySpec(**parsers))


async def test_reasoning_is_taken_apart_and_may_be_left_out_of_the_history(served: Served) -> None:
    engine = ScriptedEngine()
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    gateway = Gateway(engine, tokenizer, [EOS], GatewaySpec(reasoning_parser="deepseek_r1"))
    (key,) = gateway.open_sessions(EpisodesRequest(1, "p", 1, 1.0, 1.0, Limits(8, 400, 2000)))
    think = tokenizer.convert_tokens_to_ids("</think>")
    ids = [*split(tokenizer, "two and two"), think, *split(tokenizer, "4"), EOS]

    async def draw(prompt: list[int], **_: Any) -> Drawn:
        engine.prompts.append(prompt)
        return Drawn(ids, [-1.0] * len(ids), [0] * len(ids), stopped=True)

    engine.draw = draw  # type: ignore[method-assign]
    first = await gateway.chat(gateway.find(key), {"messages": [USER]})
    assert (first.reply.content, first.reply.reasoning) == ("4", "two and two")
    again = {"messages": [USER, {"role": "assistant", "content": "4"}, USER]}
    await gateway.chat(gateway.find(key), again)
    assert engine.prompts[1][: len(engine.prompts[0]) + len(ids)] == engine.prompts[0] + ids
