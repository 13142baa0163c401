"""A row's fields to the text the model sees: a field, a Jinja template, the model's chat template.

Jinja runs in its immutable sandbox: a template reaches the row and nothing else.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.sandbox

from services.data.readers import Row, called
from volley.data import ChatSpec, SourceSpec
from volley.errors import JobError

Render = Callable[[Row, Mapping[str, Any]], str]
ROLES = frozenset({"system", "user", "assistant", "developer", "tool"})

_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
)


def renderer(spec: SourceSpec, default: str | None, tokenizer: Any | None) -> Render:
    """What makes a row's prompt.

    Args:
        default: the recipe's template, used where the job has none.
        tokenizer: the model's; needed for ``chat``.

    Raises:
        JobError: the template does not parse, or the model has no chat template.
    """
    template = spec.template if spec.template is not None else default
    content = _field(spec) if template is None else _template(template)
    if spec.chat is None:
        return lambda row, fields: (
            checked_text(row, "the rendered template", content(row, fields))
            if template
            else (checked_text(row, f"field '{spec.prompt_field}'", content(row, fields)))
        )
    return _chat(spec.chat, content, tokenizer)


def checked_text(row: Row, what: str, value: Any) -> str:
    """``value`` where it is a text a tokenizer takes; raises `DataError`."""
    if not isinstance(value, str):
        raise row.error(f"{what} is {called(value)}, not a text")
    if not value:
        raise row.error(f"{what} is empty")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise row.error(f"{what} has half a surrogate pair, which no tokenizer takes")
    return value


def field_value(row: Row, fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field that must be there; raises `DataError`."""
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


def _chat(spec: ChatSpec, content: Callable[[Row, Mapping[str, Any]], Any], tokenizer: Any | None) -> Render:
    if tokenizer is None:
        raise JobError("data.chat needs the model's tokenizer: give --model")
    if not tokenizer.chat_template:
        raise JobError("data.chat: the model's tokenizer has no chat template; use template instead")
    added = _added_start(tokenizer)

    def render(row: Row, fields: Mapping[str, Any]) -> str:
        turns = _turns(row, content(row, fields))
        if spec.system is not None:
            turns = [{"role": "system", "content": spec.system}, *turns]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **spec.options)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise row.error(f"the model's chat template refuses it: {error}") from error
        return checked_text(row, "the rendered chat", text.removeprefix(added) if added else text)

    return render


def _added_start(tokenizer: Any) -> str:
    """The beginning-of-text token where the tokenizer puts it before every text: a template must not put it twice."""
    if tokenizer.bos_token is None:
        return ""
    return str(tokenizer.bos_token) if tokenizer("").input_ids[:1] == [tokenizer.bos_token_id] else ""


def _turns(row: Row, content: Any) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"role": "user", "content": checked_text(row, "the prompt", content)}]
    good = isinstance(content, list) and all(
        isinstance(turn, dict) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)
        for turn in content
    )
    if not good or not content:
        raise row.error('a chat prompt is a text, or a list of turns: [{"role": "user", "content": "..."}]')
    return [dict(turn) for turn in content]
