"""Pictures of runs, as PNG files; no display is needed."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A service started from a notebook inherits the backend of its kernel, which may not be installed here.
os.environ["MPLBACKEND"] = "agg"

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from services.recording.terminal import headline_k
from services.store.folder import RunFolder

HELD_OUT = "held-out prompts"
INK, FAINT = "#1b1f24", "#d8dee4"
PALETTE = ("#8c959f", "#d1495b", "#1f77b4", "#2a9d8f", "#edae49", "#6f4e9c")
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": "white",
    "legend.frameon": False,
}


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """A centred moving mean, over fewer values at the ends."""
    kernel = np.ones(max(1, min(window, len(values))))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def learning_curves(folder: RunFolder, k: int | None = None) -> Path:
    """``plots/learning_curves.png`` of one rl run.

    Args:
        k: the objective's; see `compare_runs`.
    """
    return compare_runs({folder.run_id: folder}, folder.plots / "learning_curves.png", k=k)


def loss_curves(folder: RunFolder) -> Path:
    """``plots/learning_curves.png`` of an sft or rft run: loss and gradient norm."""
    rows, path = folder.read("metrics"), folder.plots / "learning_curves.png"
    panels = (("loss", "Loss", "nats per answer token"), ("grad_norm", "Gradient norm", "before clipping"))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 3.4), dpi=150, layout="constrained")
        for axes, (key, title, unit) in zip(figure.subplots(1, 2).flat, panels, strict=True):
            _curve(axes, rows, key, folder.run_id, PALETTE[1])
            _name(axes, title, unit)
        figure.savefig(path)
    return path


def compare_runs(
    runs: Mapping[str, RunFolder], path: Path, colours: Mapping[str, str] | None = None, *, k: int | None = None
) -> Path:
    """Curves of several runs in one picture: mean reward, pass@k, entropy and KL; held-out evaluations are dashed.

    Runs of episodes have two more: calls of the model, and sampled tokens.

    Args:
        k: of pass@k within groups; without one, or where rows lack it, the largest in the rows.
    """
    rows = {name: folder.read("metrics") for name, folder in runs.items()}
    shown = max((headline_k(run[0], k) or 1 for run in rows.values() if run), default=1)
    panels: list[tuple[str, int | None, str, str]] = [
        ("reward_mean", 1, "Mean reward", "pass@1"),
        (f"pass_at_{shown}", shown, f"pass@{shown}", f"share of prompts solved by one of {shown}"),
        ("entropy", None, "Entropy", "nats per token"),
        ("kl_k1", None, "KL to the start", "nats per token"),
    ]
    if any("calls_mean" in row for run in rows.values() for row in run):
        panels += [
            ("calls_mean", None, "Calls of the model", "per episode"),
            ("length_mean", None, "Length", "sampled tokens per episode"),
        ]
    columns = len(panels) // 2
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.25 * columns, 6.2), dpi=150, layout="constrained")
        for axes, (key, held_out_k, title, unit) in zip(figure.subplots(2, columns).flat, panels, strict=True):
            for index, (name, run) in enumerate(rows.items()):
                colour = (colours or {}).get(name) or PALETTE[(index + 1) % len(PALETTE)]
                _curve(axes, run, key, name if len(rows) > 1 else "training prompts", colour)
                if held_out_k is not None:
                    _held_out(axes, runs[name].read("evaluations"), held_out_k, colour)
            _name(axes, title, unit)
        if len(figure.axes[0].get_lines()) > 2:  # each training curve is two lines
            figure.axes[0].legend(loc="best")
        figure.savefig(path)
    return path


def pass_at_k(
    evaluations: Mapping[str, Mapping[str, Any]],
    path: Path,
    *,
    title: str = "pass@k on held-out prompts",
    colours: Mapping[str, str] | None = None,
) -> Path:
    """pass@k against k with 95% bands, one line per named evaluation row."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 4.8), dpi=150, layout="constrained")
        axes = figure.subplots()
        ends: list[tuple[float, str, str]] = []
        for index, (name, row) in enumerate(evaluations.items()):
            colour = (colours or {}).get(name) or PALETTE[index % len(PALETTE)]
            ks, means, lows, highs = (
                [estimate[key] for estimate in row["estimates"]] for key in ("k", "mean", "low", "high")
            )
            axes.fill_between(ks, lows, highs, color=colour, alpha=0.15, linewidth=0)
            axes.plot(ks, means, color=colour, linewidth=2.2, marker="o", markersize=4.5)
            ends.append((means[-1], name, colour))
        ks = sorted({estimate["k"] for row in evaluations.values() for estimate in row["estimates"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.set_xlabel("k, tries per prompt")
        axes.set_ylabel("share of prompts solved by one of k")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_title(title)
        _label_ends(axes, ends, ks[-1])
        figure.savefig(path)
    return path


def _curve(axes: Axes, rows: Sequence[Mapping[str, Any]], key: str, name: str, colour: str) -> None:
    points = [(row["step"], row[key]) for row in rows if key in row]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=colour, alpha=0.22, linewidth=0.8)
    axes.plot(steps, smooth(values, max(1, len(values) // 20)), color=colour, linewidth=2, label=name)


def _held_out(axes: Axes, evaluations: Sequence[Mapping[str, Any]], k: int, colour: str) -> None:
    """Held-out pass@k by version, with its interval; the first such curve is named in the legend."""
    points = [(row["version"], each) for row in evaluations for each in row["estimates"] if each["k"] == k]
    if not points:
        return
    versions, means = [version for version, _ in points], [each["mean"] for _, each in points]
    lows, highs = ([each[end] for _, each in points] for end in ("low", "high"))
    label = "_" if any(line.get_label() == HELD_OUT for line in axes.get_lines()) else HELD_OUT
    axes.plot(versions, means, color=colour, linestyle="--", marker="o", markersize=4.5, label=label)
    axes.fill_between(versions, lows, highs, color=colour, alpha=0.12, linewidth=0)


def _name(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_ylabel(unit, fontsize=8.5)
    axes.set_xlabel("step", fontsize=8.5)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], k: float) -> None:
    """Write the names at the right end of the lines, moved down where they would overlap."""
    height = np.inf
    for value, name, colour in sorted(ends, reverse=True):
        height = min(value, height - 0.05)
        axes.annotate(
            name,
            (k, height),
            xytext=(8, 0),
            textcoords="offset points",
            annotation_clip=False,
            color=colour,
            va="center",
            fontweight="bold",
        )
