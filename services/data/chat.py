"""Tells a user whose chat model is about to get plain text."""

import json
from pathlib import Path

from volley.data import DataSpec

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
