"""The learning rate of each method of `maze`: three rates, 40 steps, one seed.

    python -m benchmarks.reproductions.maze_rates [--at-most 4]

The best rate of a method has the highest mean of held-out pass@k over all k, evenly spaced on a logarithmic scale.
"""

import numpy as np

from benchmarks.objectives.report import print_table
from benchmarks.reproductions import maze
from benchmarks.reproductions.results import Rows
from benchmarks.reproductions.runs import Options, Runs
from benchmarks.reproductions.study import Study


def draw(name: str, wanted: Options, rows: Rows, runs: Runs) -> None:
    """Print the mean over k of each method at each rate."""
    found: dict[str, dict[str, float]] = {}
    for setting in runs:
        method, rate = setting.rsplit(" at ", 1)
        found.setdefault(method, {})[rate] = 100 * float(np.mean([each.mean for each in rows[setting]]))
    rates = next(iter(found.values()))
    lines = [
        [method, *(f"{mean:.1f}" for mean in of_rate.values()), max(of_rate, key=lambda rate: of_rate[rate])]
        for method, of_rate in found.items()
    ]
    print_table(["mean of pass@k over k, %", *rates, "best"], lines)


STUDY = Study("maze_rates", maze.task, maze.inputs, maze.warm_up, draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
