"""Progress on the terminal: a live bar on a terminal, an occasional line when the output goes to a file."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from services.recording.terminal import make_console

LINE_SECONDS = 15.0  # between lines when the output is not a terminal
SILENCE_SECONDS = 4.0  # without a line, after which the run says what it is doing
UNCHANGED_SECONDS = 60.0  # until it says so again while it does the same, or between lines of a bar that has notes
FIGURES = (MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn)


class _NotedProgress(Progress):
    """A bar with the task's note on a line of its own, so that neither takes the other's room."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if note := task.fields["note"]:
                yield Text(f"  {note}", no_wrap=True, overflow="ellipsis")


def evaluation_words(row: Mapping[str, Any]) -> str:
    """The means of a row of ``evaluations.jsonl``, as in ``pass@1 0.312  @8 0.640  weighted 0.476``."""
    words = "pass" + "  ".join(f"@{each['k']} {each['mean']:.3f}" for each in row["estimates"])
    weighted = f"  weighted {row['weighted']['mean']:.3f}" if row.get("weighted") else ""
    return words + weighted + (f"  ({row['unscored']} samples unscored)" if row.get("unscored") else "")


class Bar:
    """One progress bar.

    Attributes:
        noted: whether it shows a note of the work itself.
    """

    def __init__(self, display: "Display", label: str, total: int) -> None:
        self._display, self._label, self._total = display, label, total
        self._done, self._begun, self._printed = 0, time.monotonic(), time.monotonic()
        self._pending_line, self.noted = "", False
        self._progress: Progress | None = None
        if display.console.is_terminal:
            self._progress = _NotedProgress(
                TextColumn("  {task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=2)),
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                *(column(table_column=Column(no_wrap=True)) for column in FIGURES),
                expand=True,
                console=display.console,
                transient=True,
            )
            self._task = self._progress.add_task(label, total=total, note="")
            self._progress.start()

    def advance(self, note: str | None = None, by: int = 1) -> None:
        """Count ``by`` more as done and show ``note`` beside the bar."""
        self._done += by
        self.noted |= note is not None
        if self._progress is not None:
            self._progress.update(self._task, advance=by)
            if note is not None:
                self._progress.update(self._task, note=note)
        elif note is not None:
            self._pending_line = f"  {self.progress}  {note}"
            if time.monotonic() - self._printed >= LINE_SECONDS:
                self._print_pending_line()

    @property
    def live(self) -> bool:
        """Whether the bar is drawn on a terminal."""
        return self._progress is not None

    @property
    def progress(self) -> str:
        return f"{self._label} {self._done}/{self._total}"

    def note_idle(self, doing: str) -> None:
        """Show what the run is doing, until `advance` brings a note."""
        if self._progress is not None and not self.noted:
            self._progress.update(self._task, note=doing)

    def go_to(self, done: int) -> None:
        """Set how many are done, for work that resumes where it was interrupted."""
        self._done = done
        if self._progress is not None:
            self._progress.update(self._task, completed=done)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._print_pending_line()
        if self._done == self._total:
            self._display.say(f"  {self._label}: {self._total} in {time.monotonic() - self._begun:.0f} s")

    def _print_pending_line(self) -> None:
        if self._pending_line:
            self._printed = time.monotonic()
            self._display.say(self._pending_line)
            self._pending_line = ""


class Display:
    """Prints what a run tells its user.

    Args:
        quiet: print nothing.
        stderr: print to standard error, because standard output is for a result.
    """

    def __init__(self, *, quiet: bool = False, stderr: bool = False) -> None:
        self.console = make_console(quiet=quiet, stderr=stderr)
        self._begun = self._last_said = time.monotonic()
        self._bar: Bar | None = None
        self._idle_line = ""  # the line of `idle` if that was the last one

    def say(self, text: str) -> None:
        """Print one line, with the time since the start."""
        self._last_said, self._idle_line = time.monotonic(), ""
        elapsed = self._last_said - self._begun
        clock = Text(f"{int(elapsed // 60):2d}:{elapsed % 60:04.1f}", style="dim")
        self.console.print(Text.assemble(clock, f" {text}"), soft_wrap=True)

    @contextlib.contextmanager
    def bar(self, label: str, total: int) -> Iterator[Bar]:
        """Show a bar during the block."""
        bar = self._bar = Bar(self, label, total)
        try:
            yield bar
        finally:
            self._bar = None
            bar.close()

    def idle(self, doing: str) -> None:
        """Say what the run is doing if nothing was said for a while; meant to be called every second or so.

        A live bar shows ``doing`` until it gets its first note.
        """
        if self._bar is not None and self._bar.live:
            self._bar.note_idle(doing)
            return
        line = f"  {self._bar.progress}  {doing}" if self._bar is not None else f"  {doing}"
        if (self._bar is not None and self._bar.noted) or line == self._idle_line:
            due = UNCHANGED_SECONDS
        else:
            due = SILENCE_SECONDS if not self._idle_line else LINE_SECONDS
        if time.monotonic() - self._last_said >= due:
            self.say(line)
            self._idle_line = line
