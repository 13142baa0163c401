"""``volley queue`` and ``volley audit``: who uses the cluster, and who changed what."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from services.cli.options import Json, Server, print_json, remote

HOLDERS = {"admitted": "holds", "stopping": "stops"}  # what the column `place` shows of runs that hold resources


def queue(server: Server = None, as_json: Json = False) -> None:
    """List the runs that hold resources, then those that wait, in their order and with the reason."""
    with remote(server) as client:
        found = client.queue().model_dump(mode="json")
    if as_json:
        print_json(found)
    else:
        _print_queue(found["items"], found["owners"], time.time())


def audit(
    run: Annotated[str | None, typer.Option(help="only changes of the run with this id")] = None,
    who: Annotated[str | None, typer.Option(help="only changes by the token of this name")] = None,
    limit: Annotated[int, typer.Option(min=1, help="most records to list")] = 50,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """List who changed what: submitted, changed, stopped, resumed or removed runs, and tokens. Newest first."""
    with remote(server) as client:
        found = [each.model_dump(mode="json") for each in client.audit(limit, run=run, who=who)]
    if as_json:
        print_json(found)
    else:
        _print_audit(found)


def _print_queue(items: Sequence[Mapping[str, Any]], owners: Sequence[Mapping[str, Any]], now: float) -> None:
    from services.cli.tables import age, print_table
    from services.recording.terminal import TableRow, TerminalTable

    rows = []
    for each in items:
        place = HOLDERS.get(each["state"], str(each["position"]))
        amounts = (f"{each['resources'].get(name, 0):g}" for name in ("CPU", "GPU"))
        preempted = f"preempted by {each['preempted_by']}" if each["preempted_by"] else ""
        note = "" if each["state"] == "admitted" else "; ".join(part for part in (preempted, each["reason"]) if part)
        cells = (each["run"], place, str(each["priority"]), each["owner"], *amounts, age(now - each["since"]))
        rows.append(TableRow(cells, note))
    columns = ("run", "place", "priority", "owner", "CPUs", "GPUs", "for")
    print_table(TerminalTable(columns, rows, ("for", "GPUs")), "no runs hold resources, and none wait")
    limited = [TableRow(_owner_cells(each)) for each in owners if each["name"]]
    if limited:
        typer.echo()
        print_table(TerminalTable(("owner", "runs", "CPUs", "GPUs"), limited), "")


def _owner_cells(owner: Mapping[str, Any]) -> tuple[str, ...]:
    limits = owner["limits"]
    return owner["name"], *(_share(owner[name], limits[name]) for name in ("runs", "cpus", "gpus"))


def _share(held: float, limit: float | None) -> str:
    return f"{held:g}" if limit is None else f"{held:g} of {limit:g}"


def _word(value: object) -> str:
    """A value as `volley set` takes it."""
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _print_audit(found: Sequence[Mapping[str, Any]]) -> None:
    from services.cli.tables import print_table
    from services.recording.terminal import TableRow, TerminalTable

    rows = []
    for each in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["time"]))
        details = "  ".join(f"{name}={_word(value)}" for name, value in each["details"].items())
        note = "  ".join(part for part in (each["run"], details) if part)
        rows.append(TableRow((when, each["who"], each["action"]), note))
    print_table(TerminalTable(("time", "who", "action"), rows), "no changes")
