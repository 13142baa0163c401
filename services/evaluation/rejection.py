"""Which samples of an rft job are trained on: correct ones with different texts, up to a limit per prompt."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from learner.records import SFTRow
from services.data.tokens import EncodedPrompt
from services.evaluation.estimates import tag_values
from volley.errors import HostError, JobError
from volley.records import Prompt


@dataclass(frozen=True, slots=True)
class KeptSample:
    """A sample to train on.

    Attributes:
        text: the decoded sample without its stop token; of an episode, the answer to its last call.
        tokens: the token ids as they were sampled; a sample that was not truncated ends with a stop token.
        calls: the calls of an episode, as in ``samples.jsonl``.
    """

    prompt: EncodedPrompt
    text: str
    reward: float
    tokens: SFTRow
    calls: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, row: Mapping[str, Any], prompt: EncodedPrompt) -> Self:
        """The sample of a row of ``samples.jsonl``. Programs make prompts of their own, which are in the row."""
        found = {name: np.asarray(row[key], np.int32) for name, key in _IDS.items() if key in row}
        tokens = SFTRow(**{"prompt_p": prompt.tokens_p, **found})
        return cls(prompt, row["sample"], row["reward"], tokens, row.get("calls", ()))

    def row(self) -> dict[str, Any]:
        """The sample as a line of ``kept.jsonl``, which an sft job can read unless it is an episode."""
        prompt = self.prompt.prompt
        return {
            "prompt_id": prompt.id,
            "prompt": prompt.text,
            "answer": self.text,
            "reward": self.reward,
            "tags": dict(prompt.tags),
            **({"calls": self.calls} if self.calls else {}),
        }


_IDS = {"prompt_p": "prompt_ids", "answer_a": "token_ids", "observed_s": "observed_ids", "observed_at_s": "observed_at"}


def _said(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What the model said in a sample; samples that say the same count once."""
    return tuple(call["answer"] for call in row.get("calls", ())) or (row["sample"],)


@dataclass(frozen=True, slots=True)
class Kept:
    """The samples to train on, and how many there were to choose from.

    Attributes:
        samples: in the order of their prompts, those of one prompt in the order they were sampled.
        drawn: number of samples in all.
        correct: how many of them were correct, repeated texts included.
        unscored: how many of them could not be scored; these are never correct.
        best: the highest reward; None if nothing was scored.
    """

    samples: tuple[KeptSample, ...]
    drawn: int
    correct: int
    unscored: int
    best: float | None


def keep(
    drawn: Iterable[Mapping[str, Any]], prompts: Sequence[EncodedPrompt], *, per_prompt: int, correct_from: float
) -> Kept:
    """Keep the first ``per_prompt`` different texts of each prompt that earned ``correct_from`` or more.

    Args:
        drawn: rows of ``samples.jsonl``, token ids included.

    Raises:
        JobError: nothing is kept.
        HostError: nothing could be scored.
    """
    encoded = {each.prompt.id: each for each in prompts}
    kept: dict[str, dict[tuple[str, ...], KeptSample]] = {name: {} for name in encoded}
    count = correct = unscored = 0
    best: float | None = None
    for row in drawn:
        count += 1
        reward, kept_here = row["reward"], kept[row["prompt_id"]]
        if reward is None:
            unscored += 1
            continue
        best = reward if best is None else max(best, reward)
        if reward < correct_from:
            continue
        correct += 1
        if len(kept_here) < per_prompt and (said := _said(row)) not in kept_here:
            kept_here[said] = KeptSample.of(row, encoded[row["prompt_id"]])
    samples = tuple(sample for by_text in kept.values() for sample in by_text.values())
    found = Kept(samples, count, correct, unscored, best)
    _check(found, len(prompts), correct_from)
    return found


def _check(kept: Kept, prompts: int, correct_from: float) -> None:
    if kept.best is None:
        raise HostError(f"none of {kept.drawn} samples could be scored: see the details in samples.jsonl")
    if not kept.samples:
        lost = f", and {kept.unscored} could not be scored" if kept.unscored else ""
        raise JobError(
            f"no sample was correct: of {kept.drawn} samples of {prompts} prompts the best earned {kept.best:g}, "
            f"correct_from is {correct_from:g}{lost}. Raise sampling.n, take easier prompts, warm the model up with an "
            "sft job, or lower correct_from"
        )


def counts(kept: Kept, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """How many prompts and samples were kept, overall and for each value of each tag; JSON."""
    per_prompt: dict[str, int] = {}
    for sample in kept.samples:
        per_prompt[sample.prompt.prompt.id] = per_prompt.get(sample.prompt.prompt.id, 0) + 1
    kept_P = np.array([per_prompt.get(prompt.id, 0) for prompt in prompts])
    return {
        "samples": kept.drawn,
        "samples_correct": kept.correct,
        "samples_unscored": kept.unscored,
        "samples_kept": len(kept.samples),
        "prompts": len(prompts),
        "prompts_kept": len(per_prompt),
        "by_tag": [
            {
                "tag": tag,
                "value": value,
                "prompts": int(chosen_P.sum()),
                "prompts_kept": int((kept_P[chosen_P] > 0).sum()),
                "samples_kept": int(kept_P[chosen_P].sum()),
            }
            for tag, value, chosen_P in tag_values(prompts)
        ],
    }
