"""Progress on the terminal: a live bar for people, a line now and then where nobody watches."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 15.0  # between lines when the output is a file


class Bar:
    """One running bar."""

    def __init__(self, display: "Display", label: str, total: int) -> None:
        self._display, self._label, self._total = display, label, total
        self._done, self._begun, self._spoke = 0, time.monotonic(), time.monotonic()
        self._unsaid = ""
        self._progress: Progress | None = None
        if display.console.is_terminal:
            self._progress = Progress(
                TextColumn("  {task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=display.console,
                transient=True,
            )
            self._task = self._progress.add_task(label, total=total, note="")
            self._progress.start()

    def advance(self, note: str | None = None, by: int = 1) -> None:
        """``by`` more are done; ``note`` says how it goes."""
        self._done += by
        if self._progress is not None:
            self._progress.update(self._task, advance=by)
            if note is not None:
                self._progress.update(self._task, note=note)
        elif note is not None:
            self._unsaid = f"  {self._label} {self._done}/{self._total}  {note}"
            if time.monotonic() - self._spoke >= LINE_SECONDS:
                self._say_newest()

    def go_to(self, done: int) -> None:
        """So many are done: the work was taken up again where it had been before."""
        self._done = done
        if self._progress is not None:
            self._progress.update(self._task, completed=done)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._say_newest()
        if self._done == self._total:
            self._display.say(f"  {self._label}: {self._total} in {time.monotonic() - self._begun:.0f} s")

    def _say_newest(self) -> None:
        if self._unsaid:
            self._spoke = time.monotonic()
            self._display.say(self._unsaid)
            self._unsaid = ""


class Display:
    """Where a run speaks to its user. ``quiet`` says nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False)
        self._begun = time.monotonic()

    def say(self, text: str) -> None:
        """One line, with the time since the start."""
        elapsed = time.monotonic() - self._begun
        self.console.print(f"[dim]{int(elapsed // 60):2d}:{elapsed % 60:04.1f}[/dim] {text}", soft_wrap=True)

    @contextlib.contextmanager
    def bar(self, label: str, total: int) -> Iterator[Bar]:
        """A bar for the length of the block."""
        bar = Bar(self, label, total)
        try:
            yield bar
        finally:
            bar.close()
