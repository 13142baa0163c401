"""What a request asks for, and what it may not ask: sampling is the job's.

The learner trains on the recorded log-probs, so they must be those of the distribution that the job names.
"""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from actors.gateway.messages import BadMessages
from actors.gateway.rendering import Setting

SamplingRule = Literal["strict", "override"]
T = TypeVar("T")


class BadRequest(ValueError):
    """A request that is answered with status 400; the text says what to change."""


@dataclass(frozen=True, slots=True)
class SamplingOfJob:
    """How the job samples; ``rule`` says what becomes of requests that ask for something else."""

    temperature: float
    top_p: float
    rule: SamplingRule = "strict"


@dataclass(frozen=True, slots=True)
class Asked:
    """The parts of a request that concern the answer.

    Attributes:
        stream: the answer is wanted piece by piece.
        usage: a stream ends with a piece about the tokens used.
        max_tokens: limit on the tokens of this answer; None without one.
        parse_tools: whether tool calls in the answer are parsed.
        one_call: the answer may have at most one tool call.
    """

    stream: bool
    usage: bool
    max_tokens: int | None
    setting: Setting
    parse_tools: bool
    one_call: bool


MOST_STOPS, LONGEST_STOP = 4, 200  # texts, as in OpenAI's API, and characters of each
_TEXTS = ("model", "user", "service_tier", "safety_identifier", "prompt_cache_key")
_IGNORED_KINDS: dict[str, type] = {**dict.fromkeys(_TEXTS, str), "metadata": dict, "store": bool}
IGNORED = frozenset(_IGNORED_KINDS)
READ = frozenset(
    {"messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "tools", "tool_choice"}
    | {"chat_template_kwargs", "parallel_tool_calls", "stop"}
)


def is_number(*numbers: float) -> Callable[[object], bool]:
    """A test for values that are one of ``numbers``; to Python, true and false are 1 and 0."""
    return lambda value: not isinstance(value, bool) and value in numbers


_UNCHANGED: dict[str, Callable[[Any], bool]] = {  # fields that may be sent with a value that changes nothing
    "n": is_number(1),
    "best_of": is_number(1),
    "echo": lambda value: value is False,
    "suffix": lambda value: value == "",
    "frequency_penalty": is_number(0),
    "presence_penalty": is_number(0),
    "repetition_penalty": is_number(1),
    "top_k": is_number(-1, 0),
    "min_p": is_number(0),
    "logit_bias": lambda value: value == {},
    "logprobs": lambda value: value is True or value is False or (value in (0, 1)),
    "top_logprobs": is_number(0),
    "response_format": lambda value: value == {"type": "text"},
    "return_token_ids": lambda value: isinstance(value, bool),
    "return_tokens_as_token_ids": lambda value: isinstance(value, bool),
    "skip_special_tokens": lambda value: value is True,
}
_FORM = ("n", "best_of", "echo", "suffix", "logprobs", "top_logprobs")  # what an answer has, however it is sampled
_OWN_OPTIONS = frozenset({"conversation", "tools", "tokenize", "add_generation_prompt", "chat_template"})
_OF_TEMPLATE = frozenset({"continue_final_message", "return_dict", "return_tensors", "documents", "padding"})


def asked(body: Mapping[str, Any], job: SamplingOfJob) -> Asked:
    """Read a request.

    Raises:
        BadRequest: it asks for something that this server does not do, or for another sampling than the job's, or has a
            field of the wrong type.
    """
    for name, kind in _IGNORED_KINDS.items():
        _check_kind(name, body.get(name), kind)
    _check_form(body)
    if job.rule == "strict":
        _check_sampling(body, job)
    return Asked(
        stream=given(body, "stream", default=False),
        usage=given(given(body, "stream_options", default={}), "include_usage", default=False),
        max_tokens=_max_tokens(body),
        setting=Setting(_tools(body), _options(body)),
        parse_tools=_parse_tools(body),
        one_call=not given(body, "parallel_tool_calls", default=True),
    )


def _check_form(body: Mapping[str, Any]) -> None:
    """Refuse, under either rule, what a program would miss in the answer."""
    for name in _FORM:
        value = body.get(name)
        if value is None or changes_nothing(name, value):
            continue
        advice = ": a call has one answer, so make as many calls as you want answers, each in a conversation of its own"
        raise BadRequest(
            f"{name} is not supported with the value {reprlib.repr(value):.40}"
            f"{advice if name in ('n', 'best_of') else ': leave it out'}"
        )


def _check_sampling(body: Mapping[str, Any], job: SamplingOfJob) -> None:
    for name, value in body.items():
        if value is None or name in READ or name in IGNORED:
            continue
        wanted = {"temperature": job.temperature, "top_p": job.top_p}.get(name)
        unchanged = changes_nothing(name, value) if wanted is None else is_number(wanted)(value)
        if not unchanged:
            raise BadRequest(
                f"{name} is not for the request to choose: the job sets how samples are drawn"
                f"{'' if wanted is None else f', with {name} {wanted:g}'}. Leave {name} out, or write "
                "gateway: {sampling: override} in the job to have such fields ignored"
            )


def changes_nothing(name: str, value: object) -> bool:
    """Whether a field that this server does not have was sent with a value that asks for nothing."""
    return name in _UNCHANGED and _UNCHANGED[name](value)


_KINDS: dict[type, str] = {bool: "true or false", dict: "an object", str: "a text"}


def given(body: Mapping[str, Any], name: str, *, default: T) -> T:
    """The field ``name``, or ``default`` if it is absent or null. Raises `BadRequest` if their types differ."""
    value = body.get(name)
    _check_kind(name, value, type(default))
    return default if value is None else value


def _check_kind(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise BadRequest(f"{name} must be {_KINDS[kind]}, not {reprlib.repr(value):.40}")


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    limits = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(f"{name} must be an integer of at least 1")
        limits.append(value)
    return min(limits, default=None)


def stops_of(body: Mapping[str, Any], most: int = MOST_STOPS) -> tuple[str, ...]:
    """The texts at which the answer is to stop. Raises `BadRequest`."""
    value = body.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > most or not all(_is_stop(each) for each in stops):
        raise BadRequest(f"stop must be a text or a list of at most {most} texts, of at most {LONGEST_STOP} characters")
    return tuple(filter(None, stops))


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_STOP


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = body.get("tools")
    tools = [] if tools is None else tools
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise BadRequest('tools must be a list of {"type": "function", "function": {"name": ..., "parameters": ...}}')
    for number, tool in enumerate(tools):
        _check_tool(f"tool {number}, {reprlib.repr(tool['function']['name'])},", tool)
    return tuple(tools)


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


# What vLLM's type of a tool demands: without these checks, its parsers would reject every reply that calls the tool.
_OF_FUNCTION: dict[str, type] = {"description": str, "parameters": dict, "strict": bool, "defer_loading": bool}


def _check_tool(which: str, tool: Mapping[str, Any]) -> None:
    _check_kind(f"defer_loading of {which}", tool.get("defer_loading"), bool)
    for name, kind in _OF_FUNCTION.items():
        _check_kind(f"{name} of {which}", tool["function"].get(name), kind)


def _parse_tools(body: Mapping[str, Any]) -> bool:
    choice = body.get("tool_choice")
    if choice in (None, "auto"):
        return bool(body.get("tools"))
    if choice == "none":
        return False
    raise BadRequest(
        "tool_choice must be auto or none: to force a call, the server would have to change the distribution that "
        "the learner trains on"
    )


def _options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    options: Mapping[str, Any] = given(body, "chat_template_kwargs", default={})
    if reserved := sorted((_OWN_OPTIONS | _OF_TEMPLATE) & set(options)):
        raise BadRequest(f"chat_template_kwargs must not set {', '.join(reserved)}")
    return options


def prompt_of(body: Mapping[str, Any]) -> str | list[int]:
    """The prompt of a call of /v1/completions: a text or token ids. Raises `BadMessages`."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # the API takes lists of prompts; one in a list is one
    if isinstance(prompt, str) and prompt:
        return prompt
    ids = (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(each, int) and not isinstance(each, bool) for each in prompt)
    )
    if not ids:
        raise BadMessages("prompt must be one non-empty text, or one list of token ids")
    return prompt  # type: ignore[return-value]
