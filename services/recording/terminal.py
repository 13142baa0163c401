"""What the terminal shows: tables and lists that fit its width. Output that is not a terminal gets whole lines."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

WHOLE_LINES = 100_000  # columns of an output that is not a terminal
GAP, INDENT = "  ", "  "
Cell = str | Text


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console of the terminal's width. Without a terminal its lines are never broken."""
    console = Console(highlight=False, stderr=stderr, quiet=quiet)
    if not console.is_terminal:
        console = Console(highlight=False, stderr=stderr, quiet=quiet, width=WHOLE_LINES)
    return console


def headline_k(row: Mapping[str, object], k: int | None) -> int | None:
    """The k whose pass@k stands for a step: the objective's, or the largest in the row if it has none (or 1)."""
    ks = [int(name.removeprefix("pass_at_")) for name in row if name.startswith("pass_at_")]
    return k if k in ks and k != 1 else max(ks, default=None)


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of a table. ``note`` is a sentence that gets lines of its own below the cells."""

    cells: Sequence[Cell]
    note: Cell = ""


@dataclass(frozen=True, slots=True)
class TerminalTable:
    """A table that is never wider than the terminal and breaks no word.

    If it does not fit, optional columns are left out. If it still does not fit, the first cell of each row gets a line
    of its own and the others follow on the next line.

    Args:
        optional: columns that may be left out, the least important first.
    """

    columns: Sequence[str]
    rows: Sequence[TableRow]
    optional: Collection[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines(options.max_width)

    def lines(self, width: int) -> Iterator[Text]:
        """Yield the lines of the table for a terminal with ``width`` columns."""
        kept = self._kept(width)
        widths = {at: self._width(at) for at in kept}
        split = _total(widths.values()) > width
        if any(self.columns):
            yield from _broken([Text(self.columns[at], style="bold") for at in kept], widths, split=split)
        for row in self.rows:
            yield from _broken([_text(row.cells[at]) for at in kept], widths, split=split)
            if row.note:
                yield from _indented(_text(row.note), width)

    @property
    def width(self) -> int:
        """Columns that the table takes if none is left out."""
        return _total(self._width(at) for at in range(len(self.columns)))

    def _kept(self, width: int) -> list[int]:
        kept = list(range(len(self.columns)))
        for name in self.optional:
            if _total(self._width(at) for at in kept) <= width:
                break
            kept.remove(list(self.columns).index(name))
        return kept

    def _width(self, at: int) -> int:
        return max(cell_len(self.columns[at]), *(cell_len(_plain(row.cells[at])) for row in self.rows), 0)


@dataclass(frozen=True, slots=True)
class ItemList:
    """Short items one after another, as many on a line as fit; an item is never broken.

    Args:
        lead: stands before the first item.
    """

    items: Sequence[str]
    lead: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line, empty = self.lead, True
        for item in self.items:
            if not empty and cell_len(line + GAP + item) > options.max_width:
                yield Text(line)
                line, empty = " " * cell_len(self.lead), True
            line += (GAP if not empty else "") + item
            empty = False
        yield Text(line)


def _broken(cells: Sequence[Text], widths: dict[int, int], *, split: bool) -> Iterator[Text]:
    """One line with all cells; if ``split``, one with the first cell and one with the others."""
    padded = []
    for cell, width in zip(cells, widths.values(), strict=True):
        padded.append(cell.copy())
        padded[-1].append(" " * (width - cell.cell_len))
    lines = [padded[:1], [Text(INDENT.removesuffix(GAP)), *padded[1:]]] if split else [padded]
    for line in lines:
        joined = Text(GAP, no_wrap=True, overflow="ignore").join(line)
        joined.rstrip()
        yield joined


def _indented(note: Text, width: int) -> Iterator[Text]:
    """The note in lines that are broken at words, or as one line if it is all that the width can hold."""
    room = max(20, width - len(INDENT))
    console = Console(width=room)
    for line in note.wrap(console, room):
        line.rstrip()
        yield Text.assemble(INDENT, line)


def _total(widths: Iterable[int]) -> int:
    found = list(widths)
    return sum(found) + len(GAP) * (len(found) - 1)


def _text(cell: Cell) -> Text:
    return Text(cell) if isinstance(cell, str) else cell


def _plain(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.plain
