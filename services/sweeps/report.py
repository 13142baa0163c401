"""What a sweep leaves: a table for the terminal, the same as JSON, and a figure with bands."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["MPLBACKEND"] = "agg"  # see `services.recording.plots`

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.cells import cell_len

from services.recording.plots import PALETTE, STYLE
from services.recording.terminal import TableRow, TerminalTable
from services.sweeps.plan import Found
from services.sweeps.results import START, Results, figures
from services.sweeps.spec import ReportSpec, Sweep
from services.sweeps.statistics import Floats, Interval, band

MOST_BESIDE = 24  # characters of a setting's name beside its figures
LABELS = {"steps": "steps", "samples": "samples", "divergence": "divergence from the start, nats per token"}


def tables(results: Results, report: ReportSpec, width: int) -> list[TerminalTable]:
    """A row for each setting with its mean and 95% interval over seeds; several tables if one would be too wide."""
    rows = {group.name: figures(group, report) for group in results.groups}
    seeds = {group.name: str(len(group.runs)) for group in results.groups}
    if results.start:
        rows = {START: {f"pass@{k}": interval for k, interval in results.start.items()}, **rows}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    found: list[TerminalTable] = []
    longest = max((cell_len(name) for name in rows), default=0)
    room = width if longest <= MOST_BESIDE else width + longest  # a long name gets a line of its own
    while columns:
        count = len(columns)
        while (table := _table(rows, seeds, columns[:count])).width > room and count > 1:
            count -= 1
        found.append(table)
        columns = columns[count:]
    return found


def _table(
    rows: Mapping[str, Mapping[str, Interval]], seeds: Mapping[str, str], columns: Sequence[str]
) -> TerminalTable:
    lines = [
        TableRow((name, seeds.get(name, ""), *(_cell(row.get(column)) for column in columns)))
        for name, row in rows.items()
    ]
    return TerminalTable(("setting", "runs", *columns), lines)


def _cell(interval: Interval | None) -> str:
    """As in ``0.312 ±0.021``; with one seed, the value alone."""
    if interval is None:
        return ""
    if interval.low is None:
        return f"{interval.mean:.4g}"
    half = interval.mean - interval.low
    return f"{interval.mean:.3f} ±{half:.3f}" if abs(interval.mean) < 10 else f"{interval.mean:.4g} ±{half:.2g}"


def as_object(sweep: Sweep, found: Mapping[str, Found], results: Results) -> dict[str, Any]:
    """The sweep as a JSON object."""
    runs = [
        {
            **{"name": member.name, "group": member.group, "seed": member.seed},
            "state": run.state if (run := found.get(member.name)) else "missing",
            "problem": run.problem if run else "",
            "run": (run.where or None) if run else None,
        }
        for member in sweep.members
    ]
    settings = {member.group: dict(member.changes) for member in sweep.members}
    groups = [
        {
            "name": group.name,
            "set": settings[group.name],
            "seeds": group.seeds,
            "results": {column: asdict(each) for column, each in figures(group, sweep.spec.report).items()},
        }
        for group in results.groups
    ]
    start = {f"pass@{k}": asdict(interval) for k, interval in results.start.items()}
    return {"name": sweep.name, "runs": runs, "start": start, "groups": groups}


def draw(sweep: Sweep, results: Results, path: Path) -> list[Path]:
    """Draw held-out pass@k against k and each metric against the axis, with bands; as PNG and SVG.

    Args:
        path: of the files, without their suffix.
    """
    report = sweep.spec.report
    held_out = {START: results.start} if results.start else {}
    held_out |= {group.name: group.held_out(report.ks) for group in results.groups}
    panels = int(any(held_out.values())) + len(report.metrics)
    colours = {name: PALETTE[at % len(PALETTE)] for at, name in enumerate([START, *sweep.groups])}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * panels, 4.0), dpi=150, layout="constrained")
        axes = list(figure.subplots(1, panels, squeeze=False).flat)
        if any(held_out.values()):
            _pass_at_k(axes.pop(0), held_out, colours)
        for metric, each in zip(report.metrics, axes, strict=True):
            for group in results.groups:
                if (curve := group.curve(metric, report.x)) is not None:
                    _line(each, curve[0], *band(curve[1]), group.name, colours[group.name])
            each.set(title=metric, xlabel=LABELS[report.x])
        for each in figure.axes:
            _show_means(each)
        figure.axes[0].legend(loc="best")
        files = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "svg")]
        for file in files:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _pass_at_k(axes: Axes, held_out: Mapping[str, Mapping[int, Interval]], colours: Mapping[str, str]) -> None:
    for name, of_k in held_out.items():
        values_SK = np.array([interval.values for interval in of_k.values()]).T
        if of_k:
            _line(axes, np.array(list(of_k), float), *band(values_SK), name, colours[name])
    ks = sorted({k for of_k in held_out.values() for k in of_k})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set(title="pass@k on held-out prompts", xlabel="k, tries per prompt")


def _line(axes: Axes, x_X: Floats, mean_X: Floats, half_X: Floats, name: str, colour: str) -> None:
    axes.plot(x_X, mean_X, color=colour, linewidth=2, label=name)
    if np.isfinite(half_X).all():
        axes.fill_between(x_X, mean_X - half_X, mean_X + half_X, color=colour, alpha=0.15, linewidth=0)


def _show_means(axes: Axes) -> None:
    """Cut off bands far beyond the curves, which those of two seeds would flatten."""
    if not axes.lines:
        return
    means = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    least, most = np.nanmin(means), np.nanmax(means)
    room = (most - least) or 1.0
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, least - room), min(top, most + room))
