"""MkDocs hooks that turn the pages' Markdown into HTML that needs nothing else.

Links to source files, which are not part of the site, become file paths. Formulas become MathML, which browsers render
without a library.
"""

import re
from typing import Any

from latex2mathml.converter import convert

SOURCE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```[ \t]*$)", re.M | re.S)
INLINE_CODE = re.compile(r"(`[^`\n]+`)")
DISPLAYED = re.compile(r"\A```math\n(.*)^```", re.M | re.S)
INLINE_MATH = re.compile(r"(?<![\\$\w])\$(?=\S)([^$]+?)(?<=\S)\$(?![\w$])")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its formulas and source links replaced; code is unchanged."""
    return "".join(_block(part) if part.startswith("```") else _text(part) for part in FENCED.split(markdown))


def _block(fence: str) -> str:
    formula = DISPLAYED.match(fence)
    return f"\n{_math(formula[1], display='block')}\n" if formula else fence


def _text(markdown: str) -> str:
    parts = INLINE_CODE.split(markdown)
    formulas = [part if part.startswith("`") else INLINE_MATH.sub(lambda m: _math(m[1]), part) for part in parts]
    return SOURCE_LINK.sub(_path, "".join(formulas))


def _math(latex: str, display: str = "inline") -> str:
    return convert(" ".join(latex.split()), display=display)


def _path(match: re.Match[str]) -> str:
    """``[words](../services/coordinator/buffer.py)`` as ``words (`services/coordinator/buffer.py`)``."""
    words, file = match[1], match[2]
    return f"`{file}`" if words.strip("`") == file else f"{words} (`{file}`)"
