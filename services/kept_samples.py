"""Which samples of an rft job are trained on: the correct ones, different texts, at most so many of a prompt."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.estimates import tag_values
from services.tokens import EncodedPrompt
from volley.errors import HostError, JobError
from volley.records import Prompt


@dataclass(frozen=True, slots=True)
class KeptSample:
    """A sample to train on.

    Attributes:
        text: decoded, stop token left out.
        tokens_a: int32 [a], its token ids as they were drawn; one that stopped ends with its stop token.
    """

    prompt: EncodedPrompt
    text: str
    reward: float
    tokens_a: NDArray[np.int32]

    def row(self) -> dict[str, Any]:
        """The sample as a line of ``kept.jsonl``, which an sft job can read."""
        prompt = self.prompt.prompt
        return {
            "prompt_id": prompt.id,
            "prompt": prompt.text,
            "answer": self.text,
            "reward": self.reward,
            "tags": dict(prompt.tags),
        }


@dataclass(frozen=True, slots=True)
class Kept:
    """What was kept, and of how many.

    Attributes:
        samples: in the order of their prompts, those of a prompt as they were drawn.
        drawn: samples in all.
        correct: of these, with repeated texts.
        unscored: of these, those whose scoring failed: they never count.
        best: highest reward; None where nothing was scored.
    """

    samples: tuple[KeptSample, ...]
    drawn: int
    correct: int
    unscored: int
    best: float | None


def keep(
    drawn: Iterable[Mapping[str, Any]], prompts: Sequence[EncodedPrompt], *, most: int, correct_from: float
) -> Kept:
    """Keep the first ``most`` different texts of each prompt that earned ``correct_from`` or more.

    Args:
        drawn: objects as in ``samples.jsonl``, token ids included.

    Raises:
        JobError: nothing is kept.
        HostError: nothing could be scored.
    """
    encoded = {each.prompt.id: each for each in prompts}
    kept: dict[str, dict[str, KeptSample]] = {name: {} for name in encoded}
    count = correct = unscored = 0
    best: float | None = None
    for row in drawn:
        count += 1
        reward, mine = row["reward"], kept[row["prompt_id"]]
        if reward is None:
            unscored += 1
            continue
        best = reward if best is None else max(best, reward)
        if reward < correct_from:
            continue
        correct += 1
        if len(mine) < most and row["sample"] not in mine:
            tokens_a = np.asarray(row["token_ids"], dtype=np.int32)
            mine[row["sample"]] = KeptSample(encoded[row["prompt_id"]], row["sample"], reward, tokens_a)
    found = Kept(tuple(each for mine in kept.values() for each in mine.values()), count, correct, unscored, best)
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
    """How many prompts and samples were kept, over all and by the values of each tag; JSON."""
    of: dict[str, int] = {}
    for sample in kept.samples:
        of[sample.prompt.prompt.id] = of.get(sample.prompt.prompt.id, 0) + 1
    kept_P = np.array([of.get(prompt.id, 0) for prompt in prompts])
    return {
        "samples": kept.drawn,
        "samples_correct": kept.correct,
        "samples_unscored": kept.unscored,
        "samples_kept": len(kept.samples),
        "prompts": len(prompts),
        "prompts_kept": len(of),
        "by_tag": [
            {
                "tag": tag,
                "value": value,
                "prompts": int(mine_P.sum()),
                "prompts_kept": int((kept_P[mine_P] > 0).sum()),
                "samples_kept": int(kept_P[mine_P].sum()),
            }
            for tag, value, mine_P in tag_values(prompts)
        ],
    }
