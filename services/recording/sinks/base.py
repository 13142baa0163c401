"""What a sink is, the rows it gets, and what it remembers in the run folder."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from volley.files import replace_text
from volley.metrics import name_part

RowKind = Literal["step", "evaluation"]


@dataclass(frozen=True, slots=True)
class SinkRow:
    """The figures of one step or of one evaluation.

    Attributes:
        number: the step, or the version that was evaluated.
        time: seconds since 1970.
        values: finite numbers by name: the names of `volley.metrics`, for an evaluation those of `evaluation_row`.
    """

    kind: RowKind
    number: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run that a sink is opened for.

    Attributes:
        folder: the run folder.
        job: the resolved job as JSON, without ``runtime_env``, ``sinks`` and ``notify``.
        step: the first step that is still to be written; what the sink has of it and of later steps is outdated.
    """

    id: str
    name: str
    folder: Path
    job: Mapping[str, Any]
    step: int


class Sink(Protocol):
    """A destination for rows. Any exception ends its process, and another process tries again."""

    def rewind(self, step: int) -> None:
        """The run returns to ``step``: that step, later ones, and evaluations of later versions will be sent again."""
        ...

    def write(self, rows: Sequence[SinkRow]) -> None:
        """Store the rows before returning. After a failure, the same rows may be sent again."""
        ...

    def close(self, end: str) -> None:
        """The run has ended: ``done``, ``stopped`` or ``failed``."""
        ...


# Weighted means in a row of evaluations.jsonl, and their names in sinks.
WEIGHTED = {
    "weighted": "weighted_pass_at_k",
    "weighted_majority": "weighted_maj_at_k",
    "weighted_picked": "weighted_best_of_k",
}


def step_row(row: Mapping[str, Any]) -> SinkRow:
    """The sink row for a row of ``metrics.jsonl``."""
    return SinkRow("step", int(row["step"]), float(row["time"]), numbers(row))


def evaluation_row(row: Mapping[str, Any], now: float) -> SinkRow:
    """The sink row for a row of ``evaluations.jsonl``: ``pass_at_<k>``, ``maj_at_<k>``, and the same per tag value.

    The values for level 5, for example, are named ``by_tag/level/5/pass_at_<k>``.
    """
    values = numbers(row) | _estimates(row)
    for each in row.get("by_tag", ()):
        where = f"by_tag/{name_part(each['tag'])}/{name_part(each['value'])}"
        values |= {f"{where}/{name}": value for name, value in (numbers(each) | _estimates(each)).items()}
    return SinkRow("evaluation", int(row["version"]), now, values)


def _estimates(row: Mapping[str, Any]) -> dict[str, float]:
    """max@k, maj@k, best-of-k and their weighted means; a row may lack all but the first."""
    named = (("pass_at", row["estimates"]), ("maj_at", row.get("majority", ())), ("best_of", row.get("picked", ())))
    values = {f"{name}_{each['k']}": float(each["mean"]) for name, found in named for each in found}
    for key, name in WEIGHTED.items():
        if row.get(key) is not None:
            values[name] = float(row[key]["mean"])
    return values


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row; those in a nested mapping are named ``<name>/<key>``."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if name in ("step", "time", "version", "weights", *WEIGHTED):
            continue
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": each for key, each in numbers(value).items()}
        elif isinstance(value, int | float) and math.isfinite(value):
            found[name] = float(value)
    return found


def prefixed(row: SinkRow) -> dict[str, float]:
    """The row's values, under names that distinguish evaluations from steps."""
    prefix = "evaluation/" if row.kind == "evaluation" else ""
    return {f"{prefix}{name}": value for name, value in row.values.items()}


class Memory:
    """A JSON file in the run folder: what a sink must know when the run is resumed.

    It serves sinks that cannot replace what they have stored: a step that is done again keeps its first figures.

    Attributes:
        about: the sink's own entries, such as the id that the server gave the run.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        known = json.loads(file.read_text()) if file.exists() else {}
        self.about: dict[str, str] = known.get("about", {})
        self._written: dict[str, int] = known.get("written", {})

    def unwritten(self, rows: Sequence[SinkRow]) -> list[SinkRow]:
        """The rows that were not written before."""
        return [row for row in rows if row.number > self._written.get(row.kind, -1)]

    def note(self, rows: Sequence[SinkRow]) -> None:
        """Remember that ``rows`` were written."""
        for row in rows:
            self._written[row.kind] = max(row.number, self._written.get(row.kind, -1))
        self.save()

    def save(self) -> None:
        """Replace the file in one step, so that an interruption leaves the old one or the new one."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self._file, json.dumps({"about": self.about, "written": self._written}))
