"""Renders a row's fields to the prompt text: a field, a Jinja template, or the model's chat template.

Jinja runs in its immutable sandbox: a template can access the row and nothing else.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.sandbox

from actors.gateway.messages import for_template
from services.data.chat import check_template
from services.data.readers import Row, called
from volley.data import ChatSpec, SourceSpec
from volley.errors import JobError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Render = Callable[[Row, Mapping[str, Any]], str]
_LIST_ADVICE = (
    "a job with rollout takes the prompt as text: put the messages in another field, which the program gets with the "
    "row; for another job, write data.chat: {} to have the model's chat template render them"
)
ROLES = frozenset({"system", "user", "assistant", "developer", "tool"})

_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
)


def renderer(spec: SourceSpec, default: str | None, tokenizer: "PreTrainedTokenizerBase | None") -> Render:
    """Return the function that renders a row's prompt.

    Args:
        default: the recipe's template, used if the job has none.
        tokenizer: the model's tokenizer; needed for ``chat``.

    Raises:
        JobError: the template does not parse, or the model has no chat template.
    """
    template = spec.template if spec.template is not None else default
    content = _field(spec) if template is None else _template(template)
    if spec.chat is None:
        return _text("the rendered template" if template else f"field '{spec.prompt_field}'", content)
    return _chat(spec.chat, content, tokenizer)


def _text(what: str, content: Callable[[Row, Mapping[str, Any]], object]) -> Render:
    def render(row: Row, fields: Mapping[str, Any]) -> str:
        value = content(row, fields)
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            raise row.error(f"{what} is a list, not a string: {_LIST_ADVICE}")
        return checked_text(row, what, value)

    return render


def checked_text(row: Row, what: str, value: object) -> str:
    """Return ``value`` if it is a string that a tokenizer accepts; raises `DataError` otherwise."""
    if not isinstance(value, str):
        raise row.error(f"{what} is {called(value)}, not a string")
    if not value:
        raise row.error(f"{what} is empty")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise row.error(f"{what} has half a surrogate pair, which no tokenizer accepts")
    return value


def field_value(row: Row, fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a required field; raises `DataError` if it is missing or null."""
    if name not in fields:
        raise row.error(f"no field '{name}'; the row has {row.columns()}")
    if fields[name] is None:
        raise row.error(f"field '{name}' is null")
    return fields[name]


def _field(spec: SourceSpec) -> Callable[[Row, Mapping[str, Any]], Any]:
    return lambda row, fields: field_value(row, fields, spec.prompt_field)


def _template(text: str) -> Callable[[Row, Mapping[str, Any]], str]:
    try:
        template = _ENVIRONMENT.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise JobError(f"data.template: line {error.lineno}: {error.message}") from error

    def render(row: Row, fields: Mapping[str, Any]) -> str:
        try:
            return template.render(fields)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise row.error(f"template: {error}") from error

    return render


def _chat(
    spec: ChatSpec,
    content: Callable[[Row, Mapping[str, Any]], object],
    tokenizer: "PreTrainedTokenizerBase | None",
) -> Render:
    if tokenizer is None:
        raise JobError("data.chat needs the model's tokenizer: pass --model")
    if not tokenizer.chat_template:
        raise JobError("data.chat: the model's tokenizer has no chat template; use template instead")
    if spec.options.get("tools"):
        check_template(tokenizer, "data.chat.options.tools")
    added = _added_start(tokenizer)

    def render(row: Row, fields: Mapping[str, Any]) -> str:
        turns = _turns(row, content(row, fields))
        if spec.system is not None:
            turns = [{"role": "system", "content": spec.system}, *turns]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **spec.options)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise row.error(f"the model's chat template rejects it: {error}") from error
        return checked_text(row, "the rendered chat", text.removeprefix(added) if added else text)

    return render


def _added_start(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the beginning-of-text token if the tokenizer adds it to every text, so that a template must not."""
    if tokenizer.bos_token is None:
        return ""
    return str(tokenizer.bos_token) if tokenizer("").input_ids[:1] == [tokenizer.bos_token_id] else ""


def _turns(row: Row, content: object) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": "user", "content": checked_text(row, "the prompt", content)}]
    if not isinstance(content, list) or not content or not all(map(_is_turn, content)):
        raise row.error(
            'a chat prompt must be a string or a list of turns: [{"role": "user", "content": "..."}]; an assistant '
            'turn may have "tool_calls": [{"type": "function", "function": {"name": "...", "arguments": {...}}}]'
        )
    return [for_template(turn) for turn in content]


def _is_turn(value: object) -> bool:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        return False
    content, calls = value.get("content"), value.get("tool_calls")
    if not calls:
        return isinstance(content, str)
    text = content is None or isinstance(content, str)
    return value["role"] == "assistant" and text and isinstance(calls, list) and all(map(_is_call, calls))


def _is_call(value: object) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return False
    return isinstance(function.get("name"), str) and isinstance(function.get("arguments"), str | dict)
