"""Chat messages: one form for equal messages, and where two histories first differ."""

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from actors.gateway.json_values import parse_json

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
REASONING = ("reasoning_content", "reasoning")  # both names are in use for the same field
SHOWN, BEFORE = 80, 20  # characters of a message in an error, and of those before the first difference


class BadMessages(ValueError):
    """The messages of a request cannot be used as written; the text says why."""


def checked(messages: object) -> list[Message]:
    """The messages of a request, each with its content as one string or None.

    Raises:
        BadMessages: they are not a list of chat messages, or hold something other than text.
    """
    if not isinstance(messages, list) or not messages:
        raise BadMessages("messages must be a list with at least one message")
    return [_checked(number, message) for number, message in enumerate(messages)]


def _checked(number: int, message: object) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise BadMessages(f"message {number} must be an object whose role is one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        if not all(_is_text(part) for part in content):
            raise BadMessages(f"message {number} has a part that is not text: only text is supported")
        content = "\n".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise BadMessages(f"content of message {number} must be a string, a list of text parts, or null")
    if message.get("tool_calls") is not None:
        _check_calls(number, message["tool_calls"])
    for name in ("name", "tool_call_id", *REASONING):
        if not isinstance(message.get(name), str | None):
            raise BadMessages(f"{name} of message {number} must be a string or null")
    return {**message, "content": content}


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in (None, "text") and isinstance(part.get("text"), str)


def _check_calls(number: int, calls: object) -> None:
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise BadMessages(
            f"tool_calls of message {number} must be a list of calls whose id, and function's name and arguments, are "
            "strings"
        )


def _is_call(value: object) -> bool:
    function = value.get("function") if isinstance(value, dict) and isinstance(value.get("id"), str | None) else None
    return isinstance(function, dict) and all(isinstance(function.get(key), str) for key in ("name", "arguments"))


def canonical(message: Message) -> dict[str, Any]:
    """The message without empty fields and without its reasoning, tool arguments parsed: equal if it means the same."""
    kept = {key: value for key, value in message.items() if key not in REASONING and value not in (None, "", [], {})}
    if "tool_calls" in kept:
        kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
    return kept


def _call(call: Message) -> dict[str, Any]:
    return {"id": call.get("id"), "name": call["function"]["name"], "arguments": parsed(call["function"]["arguments"])}


def parsed(arguments: str) -> Any:
    """Tool arguments as a JSON value, or the text itself if it is not JSON that a template can render."""
    try:
        return parse_json(arguments)
    except ValueError:
        return arguments


def for_template(message: Message) -> dict[str, Any]:
    """The message as chat templates expect it: tool arguments as an object where they are one."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_call_for_template(call) for call in calls]}


def _call_for_template(call: Message) -> dict[str, Any]:
    given = call["function"]["arguments"]
    arguments = parsed(given) if isinstance(given, str) else given
    usable = arguments if isinstance(arguments, dict) else given
    return {**call, "function": {**call["function"], "arguments": usable}}


def reasoning_of(message: Message) -> str:
    """The reasoning that a message carries; "" without any."""
    return next((str(message[key]) for key in REASONING if message.get(key)), "")


def same(recorded: Message, given: Message) -> bool:
    """Whether ``given`` repeats ``recorded``. Clients may leave the reasoning out, but not change it."""
    unchanged = reasoning_of(given) in ("", reasoning_of(recorded))
    return unchanged and canonical(recorded) == canonical(given)


def first_difference(recorded: Sequence[Message], given: Sequence[Message]) -> int | None:
    """The number of the first message of ``recorded`` that ``given`` does not repeat; None if it repeats them all."""
    pairs = zip_longest(recorded, given[: len(recorded)])
    return next((number for number, (old, new) in enumerate(pairs) if new is None or not same(old, new)), None)


def describe_difference(recorded: Sequence[Message], given: Sequence[Message], number: int) -> str:
    """A sentence about message ``number``, which `first_difference` found."""
    role, old = _described(recorded[number])
    if number >= len(given):
        return f"the history ends before message {number}, which was {role} {_shown(old)}"
    given_role, new = _described(given[number])
    if (role, old) == (given_role, new):
        old, new = (json.dumps(reasoning_of(message)) for message in (recorded[number], given[number]))
        role = given_role = f"{role} with the reasoning"
    same = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return f"message {number} was {role} {_shown(old, same)} and is {given_role} {_shown(new, same)}"


def _described(message: Message) -> tuple[str, str]:
    """A message's role and the rest of it as ASCII."""
    fields = canonical(message)
    role = str(fields.pop("role", "?"))
    return role, json.dumps(fields.get("content", "") if set(fields) <= {"content"} else fields)


def _shown(text: str, different: int = 0) -> str:
    """At most `SHOWN` characters of ``text``, those around character ``different`` among them."""
    if len(text) <= SHOWN:
        return text
    if different <= SHOWN - BEFORE:
        return f"{text[: SHOWN - 3]}..."
    rest = text[different - BEFORE :]
    return f"...{rest if len(rest) <= SHOWN - 3 else rest[: SHOWN - 6] + '...'}"
