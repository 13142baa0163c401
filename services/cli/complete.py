"""Shell completion of runs: their ids in the service, and run folders on this machine."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import typer

SECONDS = 2.0  # that the service may take to answer
MOST = 50


def complete_run_id(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return (id, state) of the service's runs whose id begins with ``incomplete``, newest first."""
    from volley.client import Client
    from volley.errors import VolleyError

    with (
        contextlib.suppress(VolleyError),  # a shell has no place for the reason
        Client(context.params.get("server"), timeout=SECONDS) as client,
    ):
        return [(each.id, each.state) for each in client.runs(MOST, id_prefix=incomplete)]
    return []


def complete_run(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Like `complete_run_id`, and run folders: those in ``runs``, or where ``incomplete`` points."""
    found = [] if "/" in incomplete else complete_run_id(context, incomplete)
    return found + [(folder, "run folder") for folder in _run_folders(incomplete)]


def complete_process(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the run's processes that have a log."""
    from services.cli.sources import open_run
    from volley.errors import VolleyError

    with contextlib.suppress(VolleyError), open_run(context.params["run"], context.params.get("server")) as source:
        return [each["process"] for each in source.processes() if each["process"].startswith(incomplete)]
    return []


def _run_folders(incomplete: str) -> Iterator[str]:
    """The run folders that ``incomplete`` begins, written as its beginning is."""
    head, slash, _ = incomplete.rpartition("/")
    for place in (head + slash,) if slash else ("", "runs/"):
        with contextlib.suppress(OSError):
            folders = sorted(f"{place}{folder.parent.name}" for folder in Path(place or ".").glob("*/job.yaml"))
            yield from (folder for folder in folders if folder.startswith(incomplete))
