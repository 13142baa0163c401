"""How often each prompt was solved so far, for schedules that adapt k to the prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from learner.records import ScoredGroup
from services.coordinator.records import ReadyGroup
from volley.job import RLJob
from volley.objectives import BestOfK, Objective, SolveRate, adaptive_k, visited
from volley.objectives.spec import ObjectiveWithK


class SolveRates:
    """Solve rates by prompt id; empty if the schedule has no ``adaptive_k``."""

    def __init__(self, job: RLJob, rates: Mapping[str, SolveRate]) -> None:
        self._rule, self._n = job.schedule.adaptive_k, job.sampling.n
        self._rates = dict(rates)

    def columns(self, batch: Sequence[ReadyGroup], objective: Objective) -> list[ScoredGroup]:
        """The batch for the learner, each group with the k of its prompt. Its own rewards count from the next batch."""
        scored = [ready.columns(ranked=isinstance(objective, BestOfK)) for ready in batch]
        if self._rule is None or not isinstance(objective, ObjectiveWithK) or objective.k is None:
            return scored
        prompts = [ready.prompt.id for ready in batch]
        ks = adaptive_k(objective, self._rule, [self._rates.get(each) for each in prompts], self._n)
        for each, group in zip(prompts, scored, strict=True):
            rewards = group.rewards_n[group.valid_n].tolist()
            self._rates[each] = visited(self._rates.get(each), rewards, self._rule)
        return [replace(group, k=int(k)) for group, k in zip(scored, ks, strict=True)]

    def state(self) -> dict[str, list[float]]:
        """The rates as JSON."""
        return {prompt: [rate.solved, rate.seen] for prompt, rate in self._rates.items()}
