"""The live view of a run over server-sent events: a panel on a terminal, lines otherwise."""

import json
import time
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from services.cli import tables
from services.cli.sources import RunSource
from services.recording.display import evaluation_words
from services.recording.terminal import ItemList, make_console
from volley.client import LiveEvent
from volley.state import ENDED

EVENTS_SHOWN = 8
CURVE = 60  # steps in the sparkline
LINE_SECONDS = 15.0  # between lines of metrics when the output is not a terminal
POLL_SECONDS = 2.0
LOG_BYTES = 1 << 20  # most bytes of a log per request


def follow_run(source: RunSource, *, as_json: bool) -> int:
    """Show the run until it ends. Returns the exit code: 0 if it is done, 1 if it failed or was stopped."""
    view = source.view()
    if as_json:
        return _print_events(source)
    console = make_console()
    screen = Screen(view)
    if not console.is_terminal:
        return _print_lines(source, screen)
    with Live(screen, console=console, refresh_per_second=2) as live:
        if not screen.ended():
            for event in source.follow():
                screen.take(event)
                live.refresh()
                if event.kind == "ended":
                    break
    return screen.exit_code


def follow_log(source: RunSource, process: str, tail: int, *, as_json: bool) -> None:
    """Print the log's end, then whatever is appended, until interrupted; as JSON, one object per piece."""
    piece = source.log_piece(process, tail)
    while True:
        if not as_json:
            typer.echo(piece.text, nl=False)
        elif piece.text:
            typer.echo(json.dumps({"process": process, "text": piece.text}))
        if not piece.text:
            time.sleep(POLL_SECONDS)
        piece = source.log_piece(process, LOG_BYTES, piece.next)


class Screen:
    """Everything known about the watched run; rich renders it."""

    def __init__(self, view: dict[str, Any]) -> None:
        self.view = view
        self.rows: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def ended(self) -> bool:
        return self.view["state"] in ENDED

    @property
    def exit_code(self) -> int:
        return 0 if self.view["state"] == "done" else 1

    def take(self, event: LiveEvent) -> None:
        """Add one event to the picture."""
        match event.kind:
            case "observed":
                self.view = {**self.view, **event.data}
            case "metrics":
                for row in event.data["rows"]:
                    self.rows = {step: old for step, old in self.rows.items() if step < row["step"]}
                    self.rows[row["step"]] = row
                    self.rows.pop(row["step"] - CURVE, None)
            case "events":
                self.events += _items(event.data)
                del self.events[:-EVENTS_SHOWN]
            case "evaluations":
                self.evaluations += _items(event.data)

    def figures(self) -> list[str]:
        """Return the headline metrics of the newest step."""
        return tables.headlines(self.rows[max(self.rows)], self.view["record"]["job"]) if self.rows else []

    def __rich__(self) -> Group:
        observed = self.view["observed"]
        parts: list[RenderableType] = [tables.overview(self.view, time.time())]
        if observed["steps"]:
            parts.append(ProgressBar(total=observed["steps"], completed=observed["step"], width=CURVE))
        rewards = [row["reward_mean"] for row in self.rows.values() if row.get("reward_mean") is not None]
        if rewards:
            parts.append(Text.assemble(("reward ", "dim"), tables.sparkline(rewards[-CURVE:])))
        if figures := self.figures():
            parts.append(ItemList(figures))
        if self.evaluations:
            parts.append(tables.evaluations(self.evaluations))
        if self.events:
            parts += [Text.assemble((_clock(event), "dim"), f"  {_event_words(event)}") for event in self.events]
        return Group(*parts)


def _print_lines(source: RunSource, screen: Screen) -> int:
    printed_state, printed_at, printed_step = "", 0.0, -1
    run_id = source.run_id
    typer.echo(f"{run_id}: {screen.view['state']}")
    if screen.ended():
        return screen.exit_code
    for event in source.follow():
        screen.take(event)
        newest = max(screen.rows, default=-1)
        due = event.kind == "metrics" and time.monotonic() - printed_at > LINE_SECONDS
        if newest > printed_step and (due or event.kind == "ended"):
            printed_step, printed_at = newest, time.monotonic()
            typer.echo(f"  step {newest}  {'  '.join(screen.figures())}")
        state = " ".join(filter(None, (screen.view["state"], screen.view["observed"]["problem"])))
        if event.kind == "observed" and state != printed_state:
            printed_state = state
            typer.echo(f"{run_id}: {state}")
        elif event.kind == "events":
            for item in _items(event.data):
                typer.echo(f"  {_event_words(item)}")
        if event.kind == "ended":
            break
    return screen.exit_code


def _print_events(source: RunSource) -> int:
    """Print one JSON object per line."""
    for event in source.follow():
        typer.echo(json.dumps({"event": event.kind, **event.data}))
        if event.kind == "ended":
            return 0 if event.data["state"] == "done" else 1
    return 1


def _items(data: dict[str, Any]) -> list[dict[str, Any]]:
    return list(data.get("items") or data.get("rows") or ())


def _clock(event: dict[str, Any]) -> str:
    return time.strftime("%H:%M:%S", time.localtime(event["time"]))


def _event_words(event: dict[str, Any]) -> str:
    if event["kind"] == "evaluation":
        return f"version {event['version']}, held-out prompts: {evaluation_words(event)}"
    details = [f"{key}={value}" for key, value in event.items() if key not in ("id", "kind", "time")]
    return " ".join([event["kind"], *details])[:200]
