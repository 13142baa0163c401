"""The fenced blocks of the pages and how each is checked; no block on a page is unchecked.

A comment just above a block says how it is checked, if its language alone does not decide that:

    <!-- file: job.yaml -->        written to this file before the page's commands run
    <!-- run by: tests/... -->     that test runs it
    <!-- not run: reason -->       commands that a test cannot run

Otherwise ``python`` and ``bash`` are run as they stand, page by page from top to bottom: Python within the unit tests,
commands by `tests/integration/test_page_commands.py`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "deploy", "examples", "benchmarks")
PACKAGES = ("volley", "services")  # a README.md beside their code is a page
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/**/*.md")),
        *(page for folder in PACKAGES for page in ROOT.glob(f"{folder}/**/README.md")),
    ]
)
DRAWINGS = frozenset({"text", "math"})  # nothing to run or parse
PARSED = frozenset({"yaml", "json", "toml", "ini"})
RUN = frozenset({"python", "bash", "console"})
_COMMENT = r"(?:^<!-- (?P<marker>[^\n]*) -->\n\n?)?"
_BLOCK = re.compile(_COMMENT + r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```", re.M | re.S)
_MARKER = re.compile(r"(file|run by|not run): (\S.*)")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        line: line number of its fence, from 1.
        how: ``file``, ``run by``, ``not run``, or empty if it has no comment.
        what: the text after the colon.
    """

    page: Path
    line: int
    language: str
    text: str
    how: str = ""
    what: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of ``page`` in order; raises ValueError for an unknown comment above a block."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        how = what = ""
        if (marker := found["marker"]) is not None:
            parts = _MARKER.fullmatch(marker)
            if parts is None:
                raise ValueError(f"{page_id(page)}:{line}: {marker!r} is no way to check a block")
            how, what = parts.groups()
        yield Block(page, line, found["language"], found["text"], how, what)


def to_run(page: Path, *languages: str) -> list[Block]:
    """The blocks of ``page`` that are run unchanged."""
    return [block for block in blocks(page) if block.language in languages and not block.how]
