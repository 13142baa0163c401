"""Which histories are the same, and where two of them first differ."""

from typing import Any

import pytest

from actors.gateway.messages import BadMessages, checked, describe_difference, first_difference, same

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}
REPLY = {"role": "assistant", "content": "so", "tool_calls": [CALL], "reasoning_content": "hm"}


def message(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "so", "tool_calls": [CALL], **fields}


@pytest.mark.parametrize(
    "given",
    [
        message(),
        message(reasoning_content="hm"),
        message(reasoning="hm"),
        message(refusal=None, audio=None, annotations=[], function_call=None),
        message(tool_calls=[{**CALL, "function": {"name": "add", "arguments": '{"b":[2],"a":1}'}}]),
    ],
)
def test_a_reply_is_repeated_whatever_clients_add_or_leave_out(given: dict[str, Any]) -> None:
    assert same(REPLY, given)


@pytest.mark.parametrize(
    "given",
    [
        message(content="so "),
        message(content=None),
        message(role="user"),
        message(reasoning_content="other"),
        message(tool_calls=None),
        message(tool_calls=[CALL, CALL]),
        message(tool_calls=[{**CALL, "id": "c2"}]),
        message(tool_calls=[{**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b": [3]}'}}]),
        message(tool_calls=[{**CALL, "function": {"name": "add", "arguments": "{"}}]),
        message(name="someone"),
    ],
)
def test_anything_else_is_another_reply(given: dict[str, Any]) -> None:
    assert not same(REPLY, given)


def test_the_first_difference_is_found_and_described() -> None:
    old = checked([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    longer = [*old, {"role": "user", "content": "c"}]
    assert first_difference(old, longer) is None
    assert first_difference(old, old) is None
    assert first_difference(old, old[:1]) == 1
    assert 'ends before message 1, which was assistant "b"' in describe_difference(old, old[:1], 1)
    other = [{"role": "user", "content": "x" * 500}, *longer[1:]]
    assert first_difference(old, other) == 0
    sentence = describe_difference(old, other, 0)
    assert sentence.startswith('message 0 was user "a" and is user "xxx')
    assert len(sentence) < 200


@pytest.mark.parametrize("length", [10, 70, 90, 400])
def test_a_difference_at_the_end_of_a_long_message_is_shown(length: int) -> None:
    old, new = ([{"role": "assistant", "content": "x" * length + end}] for end in ("</code>", "</code></code>"))
    sentence = describe_difference(old, new, 0)
    assert 'x</code>" and is assistant ' in sentence
    assert sentence.endswith('x</code></code>"')
    assert len(sentence) < 200
    longer = describe_difference(new, [{"role": "assistant", "content": "x" * length + "y" * 500}], 0)
    assert "xyy" in longer
    assert longer.endswith("y...")
    assert len(longer) < 200


def test_a_difference_in_the_reasoning_is_shown() -> None:
    old, new = ([{"role": "assistant", "content": "4", "reasoning": said}] for said in ("two twos", "2 + 2"))
    sentence = describe_difference(old, new, 0)
    assert sentence == (
        'message 0 was assistant with the reasoning "two twos" and is assistant with the reasoning "2 + 2"'
    )


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}]
    assert checked([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one"),
        ("hi", "at least one"),
        ([{"content": "a"}], "message 0 must be an object whose role"),
        ([{"role": "user", "content": 3}], "content of message 0"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}, "text": "what is it"}]}], "only text"),
        ([{"role": "user", "content": [{"type": 5, "text": "a"}]}], "only text"),
        ([{"role": "user", "content": ["a"]}], "only text"),
        ([{"role": "user", "content": 0}], "content of message 0"),
        ([{"role": "user", "content": "a", "name": 5}], "name of message 0 must be a string or null"),
        ([{"role": "tool", "content": "a", "tool_call_id": False}], "tool_call_id of message 0"),
        ([{"role": "assistant", "content": "a", "reasoning_content": {}}], "reasoning_content of message 0"),
        ([{"role": "assistant", "tool_calls": 0}], "tool_calls of message 0"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}], "tool_calls of message 0"),
        ([{"role": "assistant", "tool_calls": [{}]}], "tool_calls of message 0"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "tool_calls of message 0"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}], "tool_calls"),
    ],
)
def test_what_is_no_chat_is_refused(messages: Any, problem: str) -> None:
    with pytest.raises(BadMessages, match=problem):
        checked(messages)
