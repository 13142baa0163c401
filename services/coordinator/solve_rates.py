"""How often each prompt was solved so far, for a k that adapts to the prompt and for the selection of prompts."""

from collections.abc import Mapping
from dataclasses import replace

from learner.records import ScoredGroup
from services.coordinator.records import Batch, ReadyGroup
from volley.job import RLJob
from volley.objectives import BestOfK, Objective, SolveRate, adaptive_k, visited
from volley.objectives.spec import ObjectiveWithK


class SolveRates:
    """Solve rates by prompt id; empty if the job has neither ``schedule.adaptive_k`` nor ``sampling.selection``."""

    def __init__(self, job: RLJob, rates: Mapping[str, SolveRate]) -> None:
        self._adaptive, self._n = job.schedule.adaptive_k, job.sampling.n
        self._rule = self._adaptive or job.sampling.selection
        self._rates = dict(rates)

    def of(self, prompt_id: str) -> SolveRate | None:
        """The solve rate of a prompt; None before its first visit."""
        return self._rates.get(prompt_id)

    def k_of(self, ready: ReadyGroup, objective: Objective) -> int | None:
        """The k of a group, from earlier visits of its prompt; None if k does not adapt."""
        if self._adaptive is None or not isinstance(objective, ObjectiveWithK) or objective.k is None:
            return None
        return int(adaptive_k(objective, self._adaptive, [self.of(ready.prompt.id)], self._n)[0])

    def columns(self, batch: Batch, objective: Objective) -> list[ScoredGroup]:
        """The batch for the learner, each group with the k of its prompt. Its own rewards count from the next batch."""
        ranked = isinstance(objective, BestOfK)
        columns = [
            replace(ready.columns(ranked=ranked), k=self.k_of(ready, objective), weight=batch.weight)
            for ready in batch.groups
        ]
        for ready in sorted((*batch.groups, *batch.replaced), key=lambda each: each.meta.group_id):
            self._note(ready)
        return columns

    def _note(self, ready: ReadyGroup) -> None:
        if self._rule is not None:
            rewards = ready.scores.rewards_n[ready.scores.valid_n].tolist()
            self._rates[ready.prompt.id] = visited(self.of(ready.prompt.id), rewards, self._rule)

    def state(self) -> dict[str, list[float]]:
        """The rates as JSON."""
        return {prompt: [rate.solved, rate.seen] for prompt, rate in self._rates.items()}
