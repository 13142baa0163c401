"""Which prompt a group gets: the next of the order, or the next that is worth its samples.

position:   0   1   2   3   4   5 ...      of `services.data.mixture.PromptOrder`
prompt:     c   a   b   a   c   b
taken:      x       x           x          each with its own chance, drawn for its position
group id:   0       1           2

Without ``sampling.selection`` every prompt is taken, and a group's id is its position.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from services.coordinator.records import SelectionState
from services.coordinator.solve_rates import SolveRates
from services.data.mixture import order_of
from services.data.tokens import EncodedPrompt
from volley.job import RLJob
from volley.objectives import Objective
from volley.objectives.signal import PromptSignal

_STREAM = 7  # of random numbers, apart from those of the order and the samples


class PromptSelection:
    """Takes or skips the prompts of an order, by what their recorded solve rates promise.

    A prompt is taken with the chance ``floor + (1 - floor) * share`` when its turn comes, where ``share`` is
    `PromptSignal.share`. The draws depend only on the job's seed and the position, and the rates only on groups that
    were trained on, so a run without lag selects the same prompts when it is repeated or resumed.

    Raises:
        JobError: see `order_of`.

    Args:
        prompts: by row of the data.
        rates: what the run knows of each prompt.
    """

    def __init__(self, job: RLJob, prompts: Sequence[EncodedPrompt], rates: SolveRates, resume: SelectionState) -> None:
        self._spec, self._seed, self._n = job.sampling.selection, job.seed, job.sampling.n
        self._prompts, self._rates = [each.prompt for each in prompts], rates
        self._order = order_of(job.data, self._prompts, seed=job.seed)
        self._position, self._rows = resume.position, dict(resume.rows)
        self._signal: tuple[Objective, PromptSignal] | None = None

    def row(self, group_id: int, objective: Objective) -> int:
        """The row of the data for a group: the one it already has, or the next that is taken under ``objective``."""
        if self._spec is None:
            return self._order[group_id]
        while group_id not in self._rows:
            row = self._order[self._position]
            if self._takes(row, objective):
                self._rows[group_id] = row
            self._position += 1
        return self._rows[group_id]

    def state(self, open_groups: Iterable[int]) -> dict[str, Any]:
        """What a resumed run must know, as JSON. Groups that are not open are forgotten."""
        self._rows = {
            group_id: row for group_id in sorted(open_groups) if (row := self._rows.get(group_id)) is not None
        }
        return {"position": self._position, "rows": {str(group_id): row for group_id, row in self._rows.items()}}

    def _takes(self, row: int, objective: Objective) -> bool:
        assert self._spec is not None
        if self._signal is None or self._signal[0] != objective:
            self._signal = objective, PromptSignal(objective, self._n)
        share = self._signal[1].share(self._rates.of(self._prompts[row].id))
        chance = self._spec.floor + (1 - self._spec.floor) * share
        return bool(np.random.default_rng([self._seed, _STREAM, self._position]).random() < chance)
