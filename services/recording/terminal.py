"""What the terminal shows: tables and lists that fit its width. Output that is not a terminal gets whole lines."""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

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


def text_console(file: TextIO, width: int) -> Console:
    """A console that writes plain text to ``file``."""
    return Console(file=file, width=width, highlight=False, color_system=None)


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
    of its own and the others follow on as many lines as they need. Only a single cell may be wider than the terminal.

    Args:
        optional: columns that may be left out, the least important first.
    """

    columns: Sequence[str]
    rows: Sequence[TableRow]
    optional: Collection[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines(options.max_width, notes_below=console.is_terminal)

    def lines(self, width: int, *, notes_below: bool = True) -> Iterator[Text]:
        """Yield the lines of the table for a terminal with ``width`` columns.

        Args:
            notes_below: on lines of their own; otherwise, as in a pipe, a note ends the line of its row.
        """
        widths = {at: self._width(at) for at in self._kept(width)}
        lines = _packed(widths, width)
        if any(self.columns):
            yield from _broken([Text(column, style="bold") for column in self.columns], widths, lines)
        for row in self.rows:
            *before, last = _broken([_text(cell) for cell in row.cells], widths, lines)
            beside = row.note and not notes_below
            yield from (*before, Text.assemble(last, GAP, _text(row.note)) if beside else last)
            if row.note and notes_below:
                yield from _between_words(_text(row.note), width, INDENT)

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


@dataclass(frozen=True, slots=True)
class Sentence:
    """Words that are broken between lines only at spaces, so that an id or path among them can be copied."""

    words: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _between_words(Text(self.words, self.style), options.max_width)


def _packed(widths: Mapping[int, int], width: int) -> list[list[int]]:
    """The columns of each line: all on one if it is wide enough, else the first alone and the others as they fit."""
    first, *others = widths
    if _total(widths.values()) <= width:
        return [[first, *others]]
    lines = [[first]]
    for at in others:
        fits = len(INDENT) + _total(widths[each] for each in (*lines[-1], at)) <= width
        if len(lines) > 1 and fits:
            lines[-1].append(at)
        else:
            lines.append([at])
    return lines


def _broken(cells: Sequence[Text], widths: Mapping[int, int], lines: Sequence[Sequence[int]]) -> Iterator[Text]:
    """The lines of one row, each with the cells of its columns; those after the first are indented."""
    for number, columns in enumerate(lines):
        padded = [cells[at].copy() for at in columns]
        for at, cell in zip(columns, padded, strict=True):
            cell.append(" " * (widths[at] - cell.cell_len))
        joined = Text(GAP, no_wrap=True, overflow="ignore").join(padded)
        joined.rstrip()
        yield Text.assemble(INDENT if number else "", joined, no_wrap=True, overflow="ignore")


def _between_words(text: Text, width: int, indent: str = "") -> Iterator[Text]:
    """The text in lines that are broken only between words: a word wider than the terminal is a run's id or a path."""
    room = max(20, width - len(indent))
    for line in textwrap.wrap(text.plain, room, break_long_words=False, break_on_hyphens=False):
        yield Text(indent + line, text.style, no_wrap=True, overflow="ignore")


def _total(widths: Iterable[int]) -> int:
    found = list(widths)
    return sum(found) + len(GAP) * (len(found) - 1)


def _text(cell: Cell) -> Text:
    return Text(cell) if isinstance(cell, str) else cell


def _plain(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.plain
