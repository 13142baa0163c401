"""The sessions on the page about objectives are what a user sees."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "objectives.md"


def test_sessions_on_the_page_run_as_printed() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert results.attempted > 10
    assert results.failed == 0
