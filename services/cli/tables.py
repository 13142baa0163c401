"""Terminal tables of runs, workers, evaluations and tokens."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from services.recording.terminal import ItemList, Sentence, TableRow, TerminalTable, headline_k, make_console

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
HEADLINES = ("live_group_fraction", "kl_k1", "loss", "samples_per_second", "seconds_step")
WORKERS = ("actors", "reward_workers", "environment_workers")
UNBROKEN: Any = {"no_wrap": True, "overflow": "ignore"}  # of a line with an id or path, which is there to be copied
BARS = "▁▂▃▄▅▆▇█"


def runs(found: Sequence[Mapping[str, Any]], now: float) -> None:
    """Print the list of runs. What a narrow terminal has no room for, `volley show` has."""
    rows = []
    for each in found:
        values = [value for value in each["spark"] if value is not None]
        cells = (
            each["id"],
            each["kind"],
            state_text(each["state"]),
            f"{each['step']}/{each['steps']}",
            each["objective"],
            f"{values[-1]:.3f}" if values else "",
            sparkline(values[-12:]),
            "+".join(str(each[role]) for role in WORKERS if role != "environment_workers" or each[role]),
            age(now - each["created"]),
        )
        rows.append(
            TableRow(cells, Text(each["problem"], style="red") if each["state"] == "failed" else each["problem"])
        )
    columns = ("run", "kind", "state", "step", "objective", "reward", "", "workers", "age")
    print_table(TerminalTable(columns, rows, ("workers", "kind", "", "age")), "no runs")


def print_table(table: TerminalTable, empty: str) -> None:
    """Print the table, or ``empty`` if it has no rows."""
    make_console().print(table if table.rows else empty, crop=False)


def run(
    view: Mapping[str, Any],
    ledger: Mapping[str, int],
    held_out: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, float],
    now: float,
) -> None:
    """Print everything that `volley show` shows.

    Args:
        metrics: numbers of the newest step.
    """
    console = make_console()
    console.print(overview(view, now), crop=False)
    for table in (_workers(view["observed"]["workers"]), evaluations(held_out)):
        if table.rows:
            console.print()
            console.print(table, crop=False)
    if figures := headlines(metrics, view["record"]["job"]):
        console.print()
        console.print(ItemList(figures, "newest step  "))
    if ledger:
        console.print(ItemList([f"{name} {count}" for name, count in ledger.items()], "groups       "))


def headlines(row: Mapping[str, Any], job: Mapping[str, Any]) -> list[str]:
    """The most telling metrics of a step, with pass@k for the job's k."""
    k = headline_k(row, job.get("objective", {}).get("k"))
    names = ["reward_mean", f"pass_at_{k}", *HEADLINES]
    return [f"{name} {row[name]:.4g}" for name in names if isinstance(row.get(name), int | float)]


def overview(view: Mapping[str, Any], now: float) -> Group:
    """Summarise the state of a run in a few lines."""
    record, observed, desired = view["record"], view["observed"], view["desired"]
    steps = observed["steps"] or record["job"].get("steps") or 0  # a driver that starts has not reported them yet
    lines: list[RenderableType] = [
        Text.assemble((record["id"], "bold"), f"  {record['kind']}  ", state_text(view["state"]), **UNBROKEN),
        Text(f"step {observed['step']}/{steps}  version {observed['version']}  life {observed['life']}"),
        Text(
            "".join(
                f"{role.replace('_', ' ')} {observed[role]}/{observed[f'{role}_wanted']}  "
                for role in WORKERS
                if role != "environment_workers" or observed[f"{role}_wanted"]
            )
            + f"ranks {observed['learner_ranks']}"
        ),
    ]
    if observed["checkpointed"]:
        lines.append(Text(f"checkpoint of step {observed['checkpoint']}, {age(now - observed['checkpointed'])} ago"))
    if observed["groups"]:
        lines.append(ItemList([f"{name} {count}" for name, count in observed["groups"].items()], "groups "))
    if observed["problem"]:
        lines.append(Sentence(observed["problem"], "red"))
    lines += [Sentence(words, "yellow") for words in observed["waiting"]]
    if desired["revision"] != observed["revision"] and view["state"] not in ("done", "failed", "stopped"):
        lines.append(
            Text(f"revision {desired['revision']} is desired, {observed['revision']} is in effect", style="dim")
        )
    if observed["updated"]:
        lines.append(Text(f"updated {age(now - observed['updated'])} ago", style="dim"))
    lines.append(Text(f"folder {record['folder']}", "dim", **UNBROKEN))
    return Group(*lines)


def tokens(found: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for each in found:
        created, limits = each.get("created"), each["limits"]
        most = ("any" if limits[name] is None else f"{limits[name]:g}" for name in ("runs", "cpus", "gpus", "priority"))
        rows.append(TableRow((each["name"], each["scope"], *most, age(time.time() - created) if created else "")))
    columns = ("name", "scope", "runs", "CPUs", "GPUs", "priority", "created")
    print_table(TerminalTable(columns, rows, ("created",)), "no tokens")


def environments(found: Sequence[tuple[str, str, str]]) -> None:
    """Print names, interpreters and requirements."""
    rows = [TableRow(each) for each in found]
    print_table(TerminalTable(("name", "python", "requirements"), rows, ("requirements",)), "no environments")


def processes(found: Sequence[Mapping[str, Any]]) -> None:
    rows = [TableRow((each["process"], "" if each["bytes"] is None else str(each["bytes"]))) for each in found]
    print_table(TerminalTable(("process", "bytes"), rows), "no logs")


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


def _workers(workers: Sequence[Mapping[str, Any]]) -> TerminalTable:
    rows = []
    for each in workers:
        version = "" if each["version"] is None else str(each["version"])
        rows.append(TableRow((each["name"], each["state"], version, str(each["busy"]), str(each["pid"]))))
    return TerminalTable(("worker", "state", "version", "busy", "pid"), rows)


def evaluations(rows: Sequence[Mapping[str, Any]]) -> TerminalTable:
    """The newest held-out evaluations: one row per version, one column per k."""
    ks = sorted({estimate["k"] for row in rows for estimate in row["estimates"]})
    weighted = ["weighted"] if any(row.get("weighted") for row in rows) else []
    shown = []
    for row in rows[-5:]:
        means = {estimate["k"]: f"{estimate['mean']:.3f}" for estimate in row["estimates"]}
        if row.get("weighted"):
            means["weighted"] = f"{row['weighted']['mean']:.3f}"
        shown.append(TableRow((str(row["version"]), *(means.get(k, "") for k in [*ks, *weighted]))))
    return TerminalTable(("held-out pass@k, version", *(f"@{k}" for k in ks), *weighted), shown)
