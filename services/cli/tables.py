"""Terminal tables of runs, workers, evaluations and tokens."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

COLOURS = {
    "running": "green",
    "done": "cyan",
    "failed": "red",
    "lost": "red",
    "paused": "yellow",
    "pending": "yellow",
    "stopping": "yellow",
    "stopped": "yellow",
}
HEADLINES = ("reward_mean", "live_group_fraction", "kl_k1", "samples_per_second", "seconds_step")
BARS = "▁▂▃▄▅▆▇█"


def runs(found: Sequence[Mapping[str, Any]], now: float) -> None:
    table = _table("run", "kind", "state", "step", "objective", "reward", "workers", "age", "problem")
    for each in found:
        values = [value for value in each["spark"] if value is not None]
        table.add_row(
            each["id"],
            each["kind"],
            state_text(each["state"]),
            f"{each['step']}/{each['steps']}",
            each["objective"],
            f"{sparkline(values[-12:])} {values[-1]:.3f}" if values else "",
            f"{each['actors']}+{each['reward_workers']}",
            age(now - each["created"]),
            each["problem"],
        )
    Console().print(table if found else "no runs")


def run(view: Mapping[str, Any], metrics: Mapping[str, Any], now: float) -> None:
    """Print everything that `volley show` shows."""
    console = Console(highlight=False)
    console.print(overview(view, now))
    for part in (_workers(view["observed"]["workers"]), evaluations(view.get("evaluations") or ())):
        if part.row_count:
            console.print()
            console.print(part)
    figures = {name: values[-1] for name, values in metrics["series"].items() if values and values[-1] is not None}
    if figures:
        console.print()
        console.print("newest step  " + "  ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    if view.get("ledger"):
        console.print("groups       " + "  ".join(f"{name} {count}" for name, count in view["ledger"].items()))


def overview(view: Mapping[str, Any], now: float) -> Group:
    """Summarise the state of a run in a few lines."""
    record, observed, desired = view["record"], view["observed"], view["desired"]
    lines = [
        Text.assemble((record["id"], "bold"), "  ", state_text(view["state"]), f"  {record['kind']}"),
        Text(f"step {observed['step']}/{observed['steps']}  version {observed['version']}  life {observed['life']}"),
        Text(
            f"actors {observed['actors']}/{observed['actors_wanted']}  reward workers "
            f"{observed['reward_workers']}/{observed['reward_workers_wanted']}  ranks {observed['learner_ranks']}"
        ),
    ]
    if observed["checkpointed"]:
        lines.append(Text(f"checkpoint of step {observed['checkpoint']}, {age(now - observed['checkpointed'])} ago"))
    if observed["groups"]:
        lines.append(Text("groups " + "  ".join(f"{name} {count}" for name, count in observed["groups"].items())))
    if observed["problem"]:
        lines.append(Text(observed["problem"], style="red"))
    lines += [Text(words, style="yellow") for words in observed["waiting"]]
    if desired["revision"] != observed["revision"] and view["state"] not in ("done", "failed", "stopped"):
        lines.append(
            Text(f"revision {desired['revision']} is desired, {observed['revision']} is in effect", style="dim")
        )
    if observed["updated"]:
        lines.append(Text(f"updated {age(now - observed['updated'])} ago  folder {record['folder']}", style="dim"))
    return Group(*lines)


def tokens(found: Sequence[Mapping[str, Any]]) -> None:
    table = _table("name", "scope", "created")
    for each in found:
        created = each.get("created")
        table.add_row(each["name"], str(each.get("scope", "")), age(time.time() - created) if created else "")
    Console().print(table if found else "no tokens")


def processes(found: Sequence[Mapping[str, Any]]) -> None:
    table = _table("process", "bytes")
    for each in found:
        table.add_row(each["process"], str(each["bytes"]))
    Console().print(table if found else "no logs")


def state_text(state: str) -> Text:
    return Text(state, style=COLOURS.get(state, ""))


def sparkline(values: Sequence[float]) -> str:
    """Draw one character per value, scaled between the lowest and the highest."""
    if not values:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)


def age(seconds: float) -> str:
    """Format ``seconds`` as in ``3 h``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _workers(workers: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("worker", "state", "version", "busy", "pid")
    for each in workers:
        version = "" if each["version"] is None else str(each["version"])
        table.add_row(each["name"], each["state"], version, str(each["busy"]), str(each["pid"]))
    return table


def evaluations(rows: Sequence[Mapping[str, Any]]) -> Table:
    ks = sorted({estimate["k"] for row in rows for estimate in row["estimates"]})
    weighted = ["weighted"] if any(row.get("weighted") for row in rows) else []
    table = _table("held out at version", *(f"pass@{k}" for k in ks), *weighted)
    for row in rows[-5:]:
        means = {estimate["k"]: f"{estimate['mean']:.3f}" for estimate in row["estimates"]}
        if row.get("weighted"):
            means["weighted"] = f"{row['weighted']['mean']:.3f}"
        table.add_row(str(row["version"]), *(means.get(k, "") for k in [*ks, *weighted]))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table
