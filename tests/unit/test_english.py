"""Phrases that no native speaker writes stay out of pages, docstrings, comments and messages."""

import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.pages import PACKAGES, ROOT, page_id

FOLDERS = ("volley", "actors", "environments", "learner", "reward_servers", "services", "examples", "benchmarks")
PHRASES = (
    r"can not",
    r"(?<!there\s)(is|are|was) (?-i:none)",
    r"(is|are|was|were) told",
    r"so many",
    r"keys once",
    r"what it is of",
    r"no such is",
    r"to be had",
    r"is so of",
    r"nothing is there",
    r"at the last",
    r"with nothing (if|where|when)",
)
GAP = r"\s+(?:#\s*)?"  # a phrase may be broken over two lines, of a comment too
ODD = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b".replace(" ", GAP), re.IGNORECASE)


def odd_phrases(text: str) -> list[str]:
    """Each odd phrase of ``text`` with the line it starts on."""
    return [f"line {text.count(chr(10), 0, odd.start()) + 1}: {odd.group()!r}" for odd in ODD.finditer(text)]


def prose(code: str) -> str:
    """The comments and strings of a module, each where it stands; everything else is left out."""
    lines = [""] * (code.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            for offset, line in enumerate(token.string.splitlines()):
                lines[token.start[0] - 1 + offset] += f" {line}"
    return "\n".join(lines)


def pages() -> list[Path]:
    patterns = ("*.md", "docs/*.md", "benchmarks/*.md", *(f"{folder}/**/README.md" for folder in PACKAGES))
    return [page for pattern in patterns for page in sorted(ROOT.glob(pattern))]


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_pages(page: Path) -> None:
    assert odd_phrases(page.read_text()) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_comments_and_messages(folder: str) -> None:
    found = [
        f"{file.relative_to(ROOT)} {odd}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for odd in odd_phrases(prose(file.read_text()))
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    "text", ["it can not be", "it can\n    not be", "# so\n# many", "keys once", "Is told what to do"]
)
def test_an_odd_phrase_is_seen(text: str) -> None:
    assert len(odd_phrases(text)) == 1


def test_code_is_no_prose() -> None:
    code = 'so_many = 1  # fine\ndef f() -> str:\n    """Fine."""\n    return "can not"\n'
    assert odd_phrases(prose(code)) == ["line 4: 'can not'"]
    assert odd_phrases(prose("can = not so\n")) == []
