"""Shared by benchmarks and reproductions: the ``--out`` option, Markdown tables, and the style of figures."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's palette, whose colours can be told apart with any colour vision.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#777777",
)


def output_folder(description: str) -> Path | None:
    """The folder given with `--out`, created if needed; None without it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="folder for the figure; without it only the table is printed")
    folder: Path | None = parser.parse_args().out
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table; floats have four significant digits."""
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    lines = [list(header), ["-" * width for width in widths], *cells]
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
    print()


def panels(count: int) -> tuple[Any, Any]:
    """A figure with one row of panels, and its axes."""
    plt.rcParams.update({"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "lines.linewidth": 1.6})
    figure, axes = plt.subplots(1, count, figsize=(3.4 * count, 2.9), layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.5)
    return figure, axes[0]


def save(figure: Any, folder: Path, name: str) -> None:
    """Write the figure as a small PNG without metadata, and print its path."""
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=130, metadata={"Software": None})
    print(f"figure: {path}")
