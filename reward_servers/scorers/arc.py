"""``arc``: compares the last grid of digits in the sample with the expected grid."""

import json
from collections.abc import Sequence

from reward_servers.scorers.base import passed_or, row_error
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import ArcScorer

MAX_SIDE = 30
Grid = tuple[tuple[int, ...], ...]


def last_grid(text: str) -> Grid | None:
    """Return the last block of rows (digits, with or without spaces, or JSON lists); None if rows differ in length."""
    blocks: list[list[tuple[int, ...]]] = [[]]
    for line in text.splitlines():
        row = _row(line)
        if row is None:
            blocks.append([])
        else:
            blocks[-1].append(row)
    for block in reversed(blocks):
        if block:
            return _checked(block)
    return None


def _row(line: str) -> tuple[int, ...] | None:
    cells = "".join(ch if ch.isascii() and ch.isdigit() else " " if ch in "[], \t" else "x" for ch in line).split()
    if len(cells) == 1 and len(cells[0]) <= MAX_SIDE:
        cells = list(cells[0])
    if not cells or len(cells) > MAX_SIDE or any(len(cell) != 1 or not cell.isdigit() for cell in cells):
        return None
    return tuple(map(int, cells))


def _checked(rows: list[tuple[int, ...]]) -> Grid | None:
    return tuple(rows) if len(rows) <= MAX_SIDE and len({len(row) for row in rows}) == 1 else None


class Arc:
    """Passes equal grids; with ``partial``, the reward is the share of equal cells if the shapes match, else 0."""

    def __init__(self, spec: ArcScorer) -> None:
        self._spec = spec

    @staticmethod
    def check(spec: ArcScorer) -> None:
        """Accept every ``arc`` scorer."""

    @staticmethod
    def check_row(spec: ArcScorer, prompt: Prompt) -> None:
        """Raise JobError if the row has no valid grid."""
        if _expected(prompt.reference.get(spec.field)) is None:
            problem = f"the arc scorer needs a grid of integers 0-9 in {spec.field!r}, such as [[1, 0], [0, 1]]"
            raise row_error(prompt, problem, spec.field)

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        wanted = _expected(prompt.reference[self._spec.field])
        return [self._judge(last_grid(text), wanted) for text in texts]

    def _judge(self, got: Grid | None, wanted: Grid | None) -> Verdict:
        if got is None or wanted is None:
            return passed_or(VerdictStatus.NO_ANSWER, self._spec.values, detail="no grid in the sample")
        status = VerdictStatus.PASSED if got == wanted else VerdictStatus.WRONG_ANSWER
        answer = json.dumps(got, separators=(",", ":"))
        if not self._spec.partial:
            return passed_or(status, self._spec.values, answer=answer)
        return Verdict(status, _overlap(got, wanted), answer=answer)

    def close(self) -> None:
        """Do nothing: there are no processes to stop."""


def _overlap(got: Grid, wanted: Grid) -> float:
    if len(got) != len(wanted) or len(got[0]) != len(wanted[0]):
        return 0.0
    cells = [one == other for row, line in zip(got, wanted, strict=True) for one, other in zip(row, line, strict=True)]
    return sum(cells) / len(cells)


def _expected(raw: object) -> Grid | None:
    if not (isinstance(raw, list) and raw and all(isinstance(row, list) and row for row in raw)):
        return None
    if not all(type(cell) is int and 0 <= cell <= 9 for row in raw for cell in row):
        return None
    return _checked([tuple(row) for row in raw])
