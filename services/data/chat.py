"""What a model's chat template is used for: a notice if it is not, and a check that it shows tools."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from volley.data import DataSpec
from volley.errors import JobError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = (
    "the model has a chat template and data.chat is not set, so prompts reach it as plain text; a chat model answers "
    "worse then: write data: {chat: {}}"
)


def plain_text_notice(spec: DataSpec, model: Path) -> str:
    """Advice if ``model`` has a chat template and no source of ``spec`` uses it; otherwise ""."""
    if any(source.chat is not None for source in (spec, *spec.sources)) or not has_chat_template(model):
        return ""
    return PLAIN


def has_chat_template(model: Path) -> bool:
    """Whether the model's folder holds a chat template. Its tokenizer is not loaded."""
    if (model / "chat_template.jinja").exists() or (model / "chat_template.json").exists():
        return True
    try:
        settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # loading the tokenizer reports what is wrong
        return False
    return bool(isinstance(settings, dict) and settings.get("chat_template"))


_SHOWN = ("the tools", "the names of called tools", "the arguments of calls", "the answers of tools")


def check_template(tokenizer: "PreTrainedTokenizerBase", key: str) -> None:
    """Raise `JobError` if the model's chat template does not show the model its tools and their answers.

    Args:
        key: what in the job needs it, for the message.
    """
    marks = [f"mark{number}" for number in range(4)]
    tool = {"type": "function", "function": {"name": marks[0], "description": "", "parameters": {"type": "object"}}}
    call = {"id": "c00000000", "type": "function", "function": {"name": marks[1], "arguments": {"value": marks[2]}}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c00000000", "content": marks[3]},
    ]
    try:
        text = str(tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True))
    except Exception as problem:
        raise JobError(f"{key}: the model's chat template does not take tools: {problem}") from problem
    missing = [what for mark, what in zip(marks, _SHOWN, strict=True) if mark not in text]
    if missing:
        raise JobError(
            f"{key}: the model's chat template leaves out {' and '.join(missing)}: use a model that was made for "
            "tools, or write a template that shows them to chat_template.jinja in the model's folder"
        )


def tools_notice(tokenizer: "PreTrainedTokenizerBase", key: str) -> str:
    """The complaint of `check_template` as advice, for programs that may show tools in their own way; otherwise ""."""
    try:
        check_template(tokenizer, key)
    except JobError as problem:
        return str(problem)
    return ""
