"""What the loop needs of a tool."""

import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol


class Seen(NamedTuple):
    """What the model gets to see of a call, and whether that is an error."""

    text: str
    is_error: bool = False


Use = Callable[[Mapping[str, Any]], Awaitable[Seen]]
"""Calls a tool with the arguments that the model wrote.

Raises:
    ToolProblem: the model gets its text, as an error.
    ToolUnavailable: the episode leaves its group.
"""


class ToolProblem(Exception):
    """A call failed in a way that the model is to see."""


class Tool(Protocol):
    """One tool of a job, shared by all episodes of a worker."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """The tool as OpenAI's API describes it."""
        ...

    def episode(self) -> AbstractAsyncContextManager[Use]:
        """Holds what the tool keeps for one episode."""
        ...

    def stuck(self) -> bool:
        """Whether calls that timed out still occupy threads, which only the end of the process can end."""
        ...

    def close(self) -> None:
        """End all processes of the tool. Called once, when its worker ends in order."""
        ...


def described(name: str, description: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool as OpenAI's API describes it."""
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }


def as_text(value: object) -> str:
    """What a tool returned as the model sees it: text as it is, None as nothing, anything else as JSON if it can be."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def shortened(text: str, limit: int) -> str:
    """The text without its middle if it has more than ``limit`` characters, and without half surrogate pairs."""
    if len(text) > limit:
        head, tail = limit - limit // 2, limit // 2
        text = f"{text[:head]}\n... {len(text) - limit} characters left out ...\n{text[-tail:]}"
    return text.encode("utf-8", "backslashreplace").decode()
