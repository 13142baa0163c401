"""What a sink is, what it is told, and what it remembers in the run folder."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from volley.metrics import name_part

RowKind = Literal["step", "evaluation"]


@dataclass(frozen=True, slots=True)
class SinkRow:
    """Figures of one step, or of one evaluation.

    Attributes:
        number: of the step, or the version that was evaluated.
        time: seconds since 1970.
        values: finite numbers by name; the names of `volley.metrics`, and of an evaluation those of `evaluation_row`.
    """

    kind: RowKind
    number: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run a sink is opened for.

    Attributes:
        folder: the run folder.
        job: the resolved job, JSON, without what it ships to the cluster.
        step: the steps from here on are about to be written; what a sink has of them is outdated.
    """

    id: str
    name: str
    folder: Path
    job: Mapping[str, Any]
    step: int


class Sink(Protocol):
    """One place that rows go to. Whatever it raises ends its process, and another one tries again."""

    def rewind(self, step: int) -> None:
        """The run goes back: steps from ``step`` on, and evaluations of later versions, will come again."""
        ...

    def write(self, rows: Sequence[SinkRow]) -> None:
        """Returns when the rows are where they belong. Rows may come again after a failure."""
        ...

    def close(self, end: str) -> None:
        """The run is over: ``done``, ``stopped`` or ``failed``."""
        ...


def step_row(row: Mapping[str, Any]) -> SinkRow:
    """Of a row of ``metrics.jsonl``."""
    return SinkRow("step", int(row["step"]), float(row["time"]), numbers(row))


def evaluation_row(row: Mapping[str, Any], now: float) -> SinkRow:
    """Of a row of ``evaluations.jsonl``: ``pass_at_<k>``, ``maj_at_<k>``, and these of each tag's values.

    Those of level 5 are named ``by_tag/level/5/pass_at_<k>``.
    """
    values = numbers(row) | _estimates(row)
    for each in row.get("by_tag", ()):
        where = f"by_tag/{name_part(each['tag'])}/{name_part(each['value'])}"
        values |= {f"{where}/{name}": value for name, value in (numbers(each) | _estimates(each)).items()}
    return SinkRow("evaluation", int(row["version"]), now, values)


def _estimates(row: Mapping[str, Any]) -> dict[str, float]:
    """max@k and maj@k; a row may lack the second."""
    named = (("pass_at", row["estimates"]), ("maj_at", row.get("majority", ())))
    return {f"{name}_{each['k']}": float(each["mean"]) for name, found in named for each in found}


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row; those of a mapping in it are named ``<name>/<key>``."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if name in ("step", "time", "version"):
            continue
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": each for key, each in numbers(value).items()}
        elif isinstance(value, int | float) and math.isfinite(value):
            found[name] = float(value)
    return found


def prefixed(row: SinkRow) -> dict[str, float]:
    """The row's values under names that tell evaluations from steps."""
    prefix = "evaluation/" if row.kind == "evaluation" else ""
    return {f"{prefix}{name}": value for name, value in row.values.items()}


class Memory:
    """A JSON file in the run folder: what a sink must know when the run is taken up again.

    Such a sink can not take back what it has, so a step that is done again keeps the figures of its first time.

    Attributes:
        about: the sink's own, such as the id the server gave the run.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        known = json.loads(file.read_text()) if file.exists() else {}
        self.about: dict[str, str] = known.get("about", {})
        self._written: dict[str, int] = known.get("written", {})

    def fresh(self, rows: Sequence[SinkRow]) -> list[SinkRow]:
        """Those of ``rows`` that were not written before."""
        return [row for row in rows if row.number > self._written.get(row.kind, -1)]

    def note(self, rows: Sequence[SinkRow]) -> None:
        """``rows`` are written."""
        for row in rows:
            self._written[row.kind] = max(row.number, self._written.get(row.kind, -1))
        self.save()

    def save(self) -> None:
        """The file is the old one or the new one, whatever happens."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        aside = self._file.with_suffix(".partial")
        aside.write_text(json.dumps({"about": self.about, "written": self._written}))
        aside.replace(self._file)
