"""Results of a study's runs over seeds: held-out pass@k and training curves, as tables, plots and JSON.

Shapes: S seeds, T steps.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.objectives.report import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    print_table,
)
from benchmarks.reproductions.runs import Planned, Runs
from services.recording.plots import smooth
from services.store.folder import RunFolder

Floats = NDArray[np.float64]
Rows = Mapping[str, Sequence["PassAtK"]]  # by method
# Steps in a moving mean: plots against steps use the short one, plots against the noisier divergence the long one.
WINDOW, LONG_WINDOW = 25, 60
KEPT = ("pass_at_1", "pass_at_16", "kl_k1")  # metrics whose curves are saved as numbers
COLOURS = (GREY, RED, SKY, BLUE, GREEN, ORANGE, PURPLE, "#000000")


@dataclass(frozen=True, slots=True)
class PassAtK:
    """Held-out pass@k of one method.

    Attributes:
        seeds: one value per seed.
        low, high: 95% bootstrap interval over prompts, averaged over the seeds, which all have the same prompts.
    """

    k: int
    seeds: tuple[float, ...]
    low: float
    high: float

    @property
    def mean(self) -> float:
        return float(np.mean(self.seeds))


def heldout(runs: Sequence[Planned], *, at: int = -1, of: str = "estimates") -> list[PassAtK]:
    """pass@k (or maj@k with ``of="majority"``) from each run's last evaluation, or its first with ``at=0``."""
    evaluations = [RunFolder(run.path).read("evaluations")[at][of] for run in runs]
    found = []
    for of_k in zip(*evaluations, strict=True):
        low, high = (float(np.mean([each[name] for each in of_k])) for name in ("low", "high"))
        found.append(PassAtK(of_k[0]["k"], tuple(each["mean"] for each in of_k), low, high))
    return found


def curve(runs: Sequence[Planned], name: str, window: int = WINDOW) -> Floats:
    """A training metric as a moving mean, [S, T]. Steps that lack it have that of the steps around them."""
    return np.stack([smooth(filled(RunFolder(run.path).read("metrics"), name), window) for run in runs])


def filled(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The metric of each row; those without it, as of episodes when no group ended in a step, are interpolated."""
    has = [at for at, row in enumerate(rows) if name in row]
    return np.interp(range(len(rows)), has, [rows[at][name] for at in has]).tolist()  # type: ignore[no-any-return]


def at_kl(runs: Sequence[Planned], name: str, grid_X: Floats) -> Floats:
    """A metric when the divergence from the start first reaches each value, [S, X]; nan if it never does."""
    kl_ST = np.maximum.accumulate(curve(runs, "kl_k1", LONG_WINDOW), axis=-1)
    pairs = zip(kl_ST, curve(runs, name, LONG_WINDOW), strict=True)
    return np.array([np.interp(grid_X, kl_T, y_T, left=np.nan, right=np.nan) for kl_T, y_T in pairs])


def print_pass_at_k(rows: Rows) -> None:
    """Print in percent: the mean over seeds, the range over seeds, and the interval over prompts."""
    first = next(iter(rows.values()))
    lines = []
    for name, estimates in rows.items():
        lines.append([name, *(f"{100 * each.mean:.1f}" for each in estimates)])
        if len(estimates[0].seeds) > 1:
            lines.append(
                ["  seeds", *(f"{_percent(min(each.seeds))}-{_percent(max(each.seeds))}" for each in estimates)]
            )
        lines.append(["  95%", *(f"{_percent(each.low)}-{_percent(each.high)}" for each in estimates)])
    print_table(["held-out prompts, %", *(f"pass@{each.k}" for each in first)], lines)


def draw_pass_at_k(axis: Any, rows: Rows) -> None:
    """Plot held-out pass@k against k. Bands are the range over seeds or, with one seed, the 95% interval."""
    for colour, (name, estimates) in zip(COLOURS, rows.items(), strict=False):
        ks = [each.k for each in estimates]
        bands = [(min(e.seeds), max(e.seeds)) if len(e.seeds) > 1 else (e.low, e.high) for e in estimates]
        axis.plot(ks, [100 * each.mean for each in estimates], color=colour, label=name, marker="o", markersize=3)
        lows, highs = zip(*bands, strict=True)
        axis.fill_between(ks, 100 * np.array(lows), 100 * np.array(highs), color=colour, alpha=0.2, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, [str(k) for k in ks])
    axis.set(xlabel="k, tries", ylabel="pass@k, % of held-out prompts")


def draw_curves(axis: Any, runs: Runs, name: str, label: str, *, skip: int = 1, scale: float = 100) -> None:
    """Plot a metric against steps: mean and range over seeds. The first ``skip`` colours are not used."""
    for colour, (method, of_method) in zip(COLOURS[skip:], runs.items(), strict=False):
        y_ST = scale * curve(of_method, name)
        steps = np.arange(y_ST.shape[1])
        axis.plot(steps, y_ST.mean(axis=0), color=colour, label=method)
        axis.fill_between(steps, y_ST.min(axis=0), y_ST.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    axis.set(xlabel="step", ylabel=label)


def draw_at_kl(axis: Any, runs: Runs, name: str, label: str, *, skip: int = 1) -> None:
    """Plot a metric against the divergence from the start, up to the value that every seed reached."""
    for colour, (method, of_method) in zip(COLOURS[skip:], runs.items(), strict=False):
        kl_ST = curve(of_method, "kl_k1", LONG_WINDOW)
        grid_X = np.linspace(kl_ST[:, 0].max(), kl_ST.max(axis=-1).min(), 100)
        y_SX = 100 * at_kl(of_method, name, grid_X)
        axis.plot(grid_X, y_SX.mean(axis=0), color=colour, label=method)
        axis.fill_between(grid_X, y_SX.min(axis=0), y_SX.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    axis.set(xlabel="divergence from the start, nats per token", ylabel=label)


def write_numbers(path: Path, rows: Rows, runs: Runs, **about: Any) -> None:
    """Save the numbers behind table and figure as JSON, curves at every tenth step."""
    curves = {
        method: {name: curve(of_method, name)[:, ::10].round(4).tolist() for name in KEPT}
        for method, of_method in runs.items()
    }
    estimates = {name: [_rounded(each) for each in of_name] for name, of_name in rows.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in (about | {"heldout": estimates}).items()]
    lines.append('"training": ' + json.dumps(curves))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"numbers: {path}")


def _rounded(each: PassAtK) -> dict[str, Any]:
    seeds = [round(value, 4) for value in each.seeds]
    return {"k": each.k, "seeds": seeds, "low": round(each.low, 4), "high": round(each.high, 4)}


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"
