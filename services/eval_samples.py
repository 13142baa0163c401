"""The samples of an eval or rft job on disk, written group by group as they are scored, read by a run that goes on.

``samples.jsonl`` has one object a sample, the n of a prompt next to each other. A prompt counts as done when all n are
there; what an interrupted run left of another prompt is taken out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from services.estimates import Sampled
from services.run_folder import RunFolder
from volley.errors import HostError
from volley.records import Group, Prompt, Scores, Verdict, VerdictStatus

NAME = "samples"


def group_rows(
    index: int, prompt: Prompt, group: Group, scores: Scores, *, token_ids: bool = False
) -> list[dict[str, Any]]:
    """One JSON object for each sample, in the order they were drawn; keys as in a training run's excerpt."""
    ends = np.cumsum(group.lengths_n)
    return [
        {
            "step": 0,
            "group": index,
            "number": number,
            "prompt": prompt.text,
            "prompt_id": prompt.id,
            "tags": dict(prompt.tags),
            **({"earlier": group.earlier[number]} if group.earlier else {}),
            "sample": group.texts[number],
            "answer": verdict.answer,
            "status": str(verdict.status),
            "reward": verdict.reward,
            "detail": verdict.detail,
            "tokens": int(group.lengths_n[number]),
            "logprob": float(group.logprobs_T[end - group.lengths_n[number] : end].sum(dtype=np.float64)),
            "stopped": bool(group.stopped_n[number]),
            **({"token_ids": group.tokens_T[end - group.lengths_n[number] : end].tolist()} if token_ids else {}),
        }
        for number, (verdict, end) in enumerate(zip(scores.verdicts, ends, strict=True))
    ]


class SampleLog:
    """The job's samples in a run folder.

    Args:
        token_ids: write each sample's token ids too: text alone does not tell which tokens were drawn.
    """

    def __init__(self, folder: RunFolder, *, token_ids: bool = False) -> None:
        self._folder, self._token_ids = folder, token_ids

    def write(self, index: int, prompt: Prompt, group: Group, scores: Scores) -> None:
        """Append the samples of a prompt; raises `HostError` where the disk does not take them."""
        try:
            self._folder.append(NAME, group_rows(index, prompt, group, scores, token_ids=self._token_ids))
        except OSError as error:
            raise HostError(f"{self._folder.path}: samples can not be written: {error.strerror or error}") from error

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every sample, one after another: the file may be larger than memory."""
        path = self._folder.path / f"{NAME}.jsonl"
        return _rows(path) if path.exists() else iter(())

    def take_up(self, prompts: Sequence[Prompt], n: int, *, unscored: bool = False) -> dict[str, Sampled]:
        """The prompts that are done, by id; the file keeps their samples and no others.

        Args:
            unscored: is a prompt done whose scoring failed for some samples?
        """
        path = self._folder.path / f"{NAME}.jsonl"
        if not path.exists():
            return {}
        wanted = {prompt.id: prompt.text for prompt in prompts}
        found: dict[str, dict[int, _Kept]] = {}
        for row in _rows(path):
            scored = unscored or row["reward"] is not None
            if wanted.get(row["prompt_id"]) == row["prompt"] and scored and row["number"] < n:
                kept = _Kept(_verdict(row), row["tokens"], row["logprob"])
                found.setdefault(row["prompt_id"], {})[row["number"]] = kept
        done = {name: [kept[i] for i in range(n)] for name, kept in found.items() if len(kept) == n}
        _keep(path, done)
        return {name: _sampled(kept) for name, kept in done.items()}


class _Kept(NamedTuple):
    """What an evaluation needs of one sample."""

    verdict: Verdict
    tokens: int
    logprob: float


def _sampled(kept: Sequence[_Kept]) -> Sampled:
    scores = Scores.pack([each.verdict for each in kept])
    return Sampled(scores, sum(each.tokens for each in kept), sum(each.logprob for each in kept))


def _verdict(row: Mapping[str, Any]) -> Verdict:
    return Verdict(VerdictStatus(row["status"]), row["reward"], answer=row["answer"], detail=row["detail"])


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of the file; the last one may have been cut off in its writing."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _keep(path: Path, done: Mapping[str, object]) -> None:
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("wb") as file:
        file.writelines(json.dumps(row).encode() + b"\n" for row in _rows(path) if row["prompt_id"] in done)
    aside.replace(path)
