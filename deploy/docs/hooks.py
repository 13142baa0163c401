"""Hooks of the documentation site: links to source files, which are no pages of it, become their paths."""

import re
from typing import Any

SOURCE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """``[words](../services/buffer.py)`` as ``words (`services/buffer.py`)``."""

    def path(match: re.Match[str]) -> str:
        words, file = match[1], match[2]
        return f"`{file}`" if words.strip("`") == file else f"{words} (`{file}`)"

    return SOURCE_LINK.sub(path, markdown)
