"""What a run has measured, as arrays. Shapes: T steps, V evaluated versions, K values of k."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from volley.errors import HostError
from volley.views import Series

if TYPE_CHECKING:
    import pandas

Floats = NDArray[np.float64]
Estimator = Literal["estimates", "majority", "picked"]
ESTIMATORS: dict[Estimator, str] = {"estimates": "pass@k", "majority": "maj@k", "picked": "best-of-k"}


@dataclass(frozen=True, slots=True, eq=False)
class Metrics(Mapping[str, Floats]):
    """Metrics by step: a mapping from names to float64 arrays [T], NaN where a step has no such value.

    Attributes:
        steps: int64 [T], increasing. Of rows that were averaged, the last step of each bucket.
        columns: the arrays by name, as docs/metrics.md defines them; a histogram has one name per bin.
    """

    steps: NDArray[np.int64]
    columns: dict[str, Floats]

    def __getitem__(self, name: str) -> Floats:
        """Raises `KeyError`, with similar names, if there is no such metric."""
        try:
            return self.columns[name]
        except KeyError:
            close = difflib.get_close_matches(name, self.columns, n=3) or sorted(self.columns)[:5]
            none = "docs/metrics.md lists them" if len(self.steps) else "there are no metrics before the first step"
            hint = f"there are {', '.join(close)}" if close else none
            raise KeyError(f"no metric {name!r}: {hint}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        """The number of metrics; ``len(metrics.steps)`` is the number of rows."""
        return len(self.columns)

    def frame(self) -> "pandas.DataFrame":
        """Return a DataFrame with one row per step and one column per metric. Raises `HostError` without pandas."""
        return _pandas().DataFrame(self.columns, index=_pandas().Index(self.steps, name="step"))


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Evaluations on held-out prompts, by version.

    Attributes:
        rows: the evaluations as the run recorded them; docs/metrics.md defines their fields.
        estimator: whose figures the arrays have: ``estimates`` is pass@k (max@k if rewards are not 0 or 1),
            ``majority`` maj@k, ``picked`` best-of-k by rank.
    """

    rows: tuple[dict[str, Any], ...]
    estimator: Estimator = "estimates"

    def of(self, estimator: Estimator) -> "Evaluations":
        """Return the same evaluations with the arrays of another estimator."""
        return Evaluations(self.rows, estimator)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def versions(self) -> NDArray[np.int64]:
        """The evaluated versions, int64 [V]: the number of steps the model was trained for."""
        return np.array([row["version"] for row in self.rows], np.int64)

    @property
    def ks(self) -> tuple[int, ...]:
        """Every k of any evaluation, increasing."""
        return tuple(sorted({each["k"] for row in self.rows for each in row.get(self.estimator) or ()}))

    @property
    def mean(self) -> Floats:
        """The means over prompts, float64 [V, K]; NaN where a version was not evaluated at a k."""
        return self._figures("mean")

    @property
    def low(self) -> Floats:
        """The lower ends of the 95% intervals, float64 [V, K]."""
        return self._figures("low")

    @property
    def high(self) -> Floats:
        """The upper ends of the 95% intervals, float64 [V, K]."""
        return self._figures("high")

    def at(self, k: int) -> Floats:
        """Return the means at ``k``, float64 [V]. Raises `KeyError` if no evaluation has this k."""
        if k not in self.ks:
            raise KeyError(f"no evaluation at k={k}: there are {', '.join(map(str, self.ks)) or 'no evaluations'}")
        return self.mean[:, self.ks.index(k)]

    def frame(self) -> "pandas.DataFrame":
        """Return a DataFrame with a row per version, estimator and k, and the columns mean, low, high, n and prompts.

        Raises:
            HostError: pandas is not installed.
        """
        columns = ("version", "estimator", "k", "mean", "low", "high", "n", "prompts")
        found = [
            (row["version"], name, each["k"], each["mean"], each["low"], each["high"], row.get("n"), row.get("prompts"))
            for row in self.rows
            for estimator, name in ESTIMATORS.items()
            for each in row.get(estimator) or ()
        ]
        return _pandas().DataFrame(found, columns=list(columns))

    def _figures(self, name: str) -> Floats:
        ks = self.ks
        figures_VK = np.full((len(self.rows), len(ks)), np.nan)
        for v, row in enumerate(self.rows):
            for each in row.get(self.estimator) or ():
                figures_VK[v, ks.index(each["k"])] = each[name]
        return figures_VK


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Part of a log, and the offset in bytes at which the next part begins."""

    text: str
    next: int


def joined(pages: Sequence[Series]) -> Metrics:
    """Put answers for successive steps together; a metric that one of them lacks has no values there."""
    names = sorted({name for page in pages for name in page.series})
    columns = {
        name: np.array([value for page in pages for value in page.series.get(name) or [None] * len(page.steps)], float)
        for name in names
    }
    return Metrics(np.array([step for page in pages for step in page.steps], np.int64), columns)


def _pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise HostError("a DataFrame needs pandas: pip install pandas, or use the arrays") from error
    return pandas
