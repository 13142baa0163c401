"""What a step's row says of its batch besides the update: lengths, answers, prompts ever solved; by tag too."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from services.coordinator.records import ReadyGroup
from services.evaluation.estimates import distinct
from volley.metrics import name_part
from volley.records import STATUS_CODE, Prompt, Scores, VerdictStatus

MAX_VALUES = 16  # a tag with more values has no figures per value in the rows of steps


class Progress:
    """Which prompts were met and which were solved since the run began, and the figures of each batch.

    A prompt is solved once one of its samples has passed.

    Args:
        prompts: the data set, for its tags.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        values: dict[str, set[str]] = defaultdict(set)
        for prompt in prompts:
            for tag, value in prompt.tags.items():
                values[tag].add(value)
        few = {tag for tag, found in values.items() if len(found) <= MAX_VALUES}
        self._labels = {
            prompt.id: [f"{name_part(tag)}/{name_part(value)}" for tag, value in prompt.tags.items() if tag in few]
            for prompt in prompts
        }
        self._reset()

    def _reset(self) -> None:
        self._met: set[str] = set()
        self._solved: set[str] = set()
        self._met_by_label: Counter[str] = Counter()
        self._solved_by_label: Counter[str] = Counter()

    def restore(self, ledger: Iterable[Mapping[str, Any]]) -> None:
        """Start again from the rows of ``ledger.jsonl``."""
        self._reset()
        for row in ledger:
            if "passed" in row:
                self._note(row["prompt_id"], row["passed"])

    def add(self, batch: Sequence[ReadyGroup], replaced: Sequence[ReadyGroup] = ()) -> dict[str, Any]:
        """Count the batch and the groups replaced for it; return the batch's part of the step's row."""
        for ready in (*batch, *replaced):
            self._note(ready.prompt.id, passed(ready.scores))
        return {
            **_figures(batch),
            "prompts_met": len(self._met),
            "prompts_solved": len(self._solved),
            "cumulative_solve_rate": len(self._solved) / len(self._met),
            **self._by_tag(batch),
        }

    def _note(self, prompt_id: str, passed: int) -> None:
        labels = self._labels_of(prompt_id)
        if prompt_id not in self._met:
            self._met.add(prompt_id)
            self._met_by_label.update(labels)
        if passed and prompt_id not in self._solved:
            self._solved.add(prompt_id)
            self._solved_by_label.update(labels)

    def _by_tag(self, batch: Sequence[ReadyGroup]) -> dict[str, dict[str, float]]:
        """``<metric>_by_tag``: the batch's figures for each tag value in it. The solve rate covers every value met."""
        groups: dict[str, list[ReadyGroup]] = defaultdict(list)
        for ready in batch:
            for label in self._labels_of(ready.prompt.id):
                groups[label].append(ready)
        tables: dict[str, dict[str, float]] = defaultdict(dict)
        for label, labelled in sorted(groups.items()):
            for name, value in {**_figures(labelled), **_learner_figures(labelled)}.items():
                tables[f"{name}_by_tag"][label] = value
        for label, met in sorted(self._met_by_label.items()):
            tables["cumulative_solve_rate_by_tag"][label] = self._solved_by_label[label] / met
        return dict(tables)

    def _labels_of(self, prompt_id: str) -> Sequence[str]:
        return self._labels.get(prompt_id, ())


def passed(scores: Scores) -> int:
    """How many samples of a group passed."""
    return int((scores.status_n == STATUS_CODE[VerdictStatus.PASSED]).sum())


def _figures(batch: Sequence[ReadyGroup]) -> dict[str, float]:
    tokens, samples = sum(ready.meta.sample_tokens for ready in batch), sum(ready.meta.n for ready in batch)
    answers = distinct(np.stack([ready.scores.answers_n for ready in batch]))
    return {"length_mean": tokens / samples, **({} if answers is None else {"distinct_answers": answers})}


def _learner_figures(batch: Sequence[ReadyGroup]) -> dict[str, float]:
    """The figures that the learner's report has for the whole batch, but not by tag."""
    rewards_N = np.concatenate([ready.scores.rewards_n[ready.scores.valid_n] for ready in batch])
    tokens = sum(ready.meta.sample_tokens for ready in batch)
    logprob = sum(ready.meta.logprob_sum for ready in batch)
    return {"reward_mean": float(rewards_N.mean()), **({"entropy": -logprob / tokens} if tokens else {})}
