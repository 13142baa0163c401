"""What each setting of a sweep gave: figures over seeds, from the runs that are done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.jobs.job_file import Job
from services.recording.plots import smooth
from services.sweeps.plan import Found, Records, Runner
from services.sweeps.spec import Axis, Member, ReportSpec, Sweep
from services.sweeps.statistics import SMOOTHED, Floats, Interval, axis_of, on_one_axis
from volley.base import Spec, replaced
from volley.job import RLJob

START = "start"


@dataclass(frozen=True, slots=True)
class Group:
    """The runs of one setting that are done.

    Attributes:
        name: the setting's.
        runs: with what they have measured.
    """

    name: str
    runs: tuple[tuple[Member, Records], ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(member.seed for member, _ in self.runs)

    @property
    def n(self) -> int:
        """Samples per prompt."""
        return int(getattr(getattr(self.runs[0][0].job, "sampling", None), "n", 1))

    def held_out(self, ks: Sequence[int] | None = None) -> dict[int, Interval]:
        """pass@k of the newest evaluations, for each k (None for all) that all runs have."""
        newest = [records.evaluations[-1] for _, records in self.runs if records.evaluations]
        return _over_seeds(newest, ks) if len(newest) == len(self.runs) else {}

    def late(self, metric: str, last: int) -> Interval | None:
        """A metric's mean over the last steps; None if a run lacks it."""
        found = [records.metrics.columns.get(metric) for _, records in self.runs]
        values = [values[-last:][np.isfinite(values[-last:])] for values in found if values is not None]
        if len(values) < len(self.runs) or not all(map(len, values)):
            return None
        return Interval.of([float(each.mean()) for each in values])

    def curve(self, metric: str, axis: Axis) -> tuple[Floats, Floats] | None:
        """A metric as moving means: the axis [X], and a curve for each seed [S, X]. None if a run lacks it."""
        xs, ys = [], []
        for _, records in self.runs:
            values = records.metrics.columns.get(metric)
            if values is None or not (measured := np.isfinite(values)).any():
                return None
            xs.append(axis_of(records.metrics, axis, self.n)[measured])
            ys.append(smooth(values[measured].tolist(), len(values) // SMOOTHED))
        return on_one_axis(xs, ys)


@dataclass(frozen=True, slots=True)
class Results:
    """What a sweep gave.

    Attributes:
        groups: settings of which at least one run is done, in the order of the file.
        start: pass@k before training, over all evaluations of it; empty without one.
    """

    groups: tuple[Group, ...]
    start: Mapping[int, Interval]


async def gather(sweep: Sweep, found: Mapping[str, Found], runner: Runner) -> Results:
    """Read what the runs that are done have measured."""
    groups = []
    for name, members in sweep.groups.items():
        done = [each for each in members if each.name in found and found[each.name].state == "done"]
        if done:
            runs = [(member, await runner.records(member, found[member.name])) for member in done]
            groups.append(Group(name, tuple(runs)))
    rows = [records.evaluations for group in groups for _, records in group.runs]
    starts = [row for evaluations in rows for row in evaluations if row.get("version") == 0]
    trained = any(row.get("version") for evaluations in rows for row in evaluations)
    shown = starts and trained and _start_alike([each.job for each in sweep.members])
    return Results(tuple(groups), _over_seeds(starts, sweep.spec.report.ks) if shown else {})


def _start_alike(jobs: Sequence[Job]) -> bool:
    """Whether all jobs evaluate the same model in the same way before they train; new adapters change nothing."""
    first, *others = [_start(job) for job in jobs]
    return all(other == first for other in others)


def _start(job: Job) -> tuple[Spec, Spec | None]:
    evaluation = job.evaluation if isinstance(job, RLJob) else None
    return replaced(job.model, lora=None), evaluation and replaced(evaluation, at_start=True)


def figures(group: Group, report: ReportSpec) -> dict[str, Interval]:
    """The figures of a setting's row in the table, by column."""
    found = {f"pass@{k}": interval for k, interval in group.held_out(report.ks).items()}
    late = {metric: group.late(metric, report.last) for metric in report.metrics}
    return found | {metric: interval for metric, interval in late.items() if interval is not None}


def _over_seeds(evaluations: Sequence[Mapping[str, Any]], ks: Sequence[int] | None) -> dict[int, Interval]:
    means = [{each["k"]: each["mean"] for each in row["estimates"]} for row in evaluations]
    common = [k for k in means[0] if all(k in of_run for of_run in means) and (ks is None or k in ks)]
    return {k: Interval.of([of_run[k] for of_run in means]) for k in sorted(common)}
