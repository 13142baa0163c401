"""The samples of an eval or rft job on disk: written group by group as they are scored, read when the run is resumed.

``samples.jsonl`` has one object per sample, the n samples of a prompt next to each other. A prompt is done when all n
are there; samples of other prompts, which an interrupted run left behind, are removed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from services.evaluation.estimates import Sampled
from services.store.folder import RunFolder
from volley.files import replacing
from volley.records import Group, Prompt, Scores, Verdict, VerdictStatus, calls_column

NAME = "samples"


def group_rows(
    index: int, prompt: Prompt, group: Group, scores: Scores, *, token_ids: bool = False
) -> list[dict[str, Any]]:
    """One JSON object per sample, in the order they were sampled, with the keys of a training run's excerpt."""
    ends = np.cumsum(group.lengths_n)
    ids = [_ids(group, number, end) for number, end in enumerate(ends)] if token_ids else [{}] * group.n
    return [
        {
            "step": 0,
            "group": index,
            "number": number,
            "prompt": prompt.text,
            "prompt_id": prompt.id,
            "tags": dict(prompt.tags),
            **({"earlier": group.earlier[number]} if group.earlier else {}),
            **calls_column(group, number),
            "sample": group.texts[number],
            "answer": verdict.answer,
            "status": str(verdict.status),
            "reward": verdict.reward,
            **({} if verdict.rank is None else {"rank": verdict.rank}),
            "detail": verdict.detail,
            "tokens": int(group.lengths_n[number]),
            "logprob": float(group.logprobs_T[end - group.lengths_n[number] : end].sum(dtype=np.float64)),
            "stopped": bool(group.stopped_n[number]),
            **ids[number],
        }
        for number, (verdict, end) in enumerate(zip(scores.verdicts, ends, strict=True))
    ]


def _ids(group: Group, number: int, end: int) -> dict[str, list[int]]:
    """The token ids of a sample that ends before ``end``; with those of its context if a program put it there."""
    start = int(end - group.lengths_n[number])
    ids = {"token_ids": group.tokens_T[start:end].tolist()}
    if not group.calls:
        return ids
    mine_S = (group.observation_at_S >= start) & (group.observation_at_S < end)
    return {
        **ids,
        "prompt_ids": group.prompt_p.tolist(),
        "observed_ids": group.observation_S[mine_S].tolist(),
        "observed_at": (group.observation_at_S[mine_S] - start).tolist(),
    }


class SampleLog:
    """The job's samples in a run folder.

    Args:
        token_ids: also write each sample's token ids, which its text does not determine.
    """

    def __init__(self, folder: RunFolder, *, token_ids: bool = False) -> None:
        self._folder, self._token_ids = folder, token_ids

    def write(
        self, index: int, prompt: Prompt, group: Group, scores: Scores, calls_n: Sequence[int] | None = None
    ) -> None:
        """Append the samples of a prompt: all of them, or none if it raises OSError.

        Args:
            calls_n: number of calls that each episode made; the group may hold fewer. None without a program.
        """
        rows = group_rows(index, prompt, group, scores, token_ids=self._token_ids)
        if calls_n is not None:
            for row, calls in zip(rows, calls_n, strict=True):
                row["calls_made"] = calls
        self._folder.append(NAME, rows)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every sample, one after another, since the file may be larger than memory."""
        path = self._folder.path / f"{NAME}.jsonl"
        return _rows(path) if path.exists() else iter(())

    def recover(self, prompts: Sequence[Prompt], n: int, *, unscored: bool = False) -> dict[str, Sampled]:
        """The prompts that are done, by id. All other samples are removed from the file.

        Args:
            unscored: whether a prompt is also done if some of its samples could not be scored.
        """
        path = self._folder.path / f"{NAME}.jsonl"
        if not path.exists():
            return {}
        wanted = {prompt.id: prompt.text for prompt in prompts}
        found: dict[str, dict[int, _SampleRecord]] = {}
        for row in _rows(path):
            scored = unscored or row["reward"] is not None
            if wanted.get(row["prompt_id"]) == row["prompt"] and scored and row["number"] < n:
                calls = row.get("calls_made", len(row["calls"]) if "calls" in row else None)
                record = _SampleRecord(_verdict(row), row["tokens"], row["logprob"], calls)
                found.setdefault(row["prompt_id"], {})[row["number"]] = record
        done = {name: [records[i] for i in range(n)] for name, records in found.items() if len(records) == n}
        _keep_only(path, done)
        return {name: _sampled(records) for name, records in done.items()}


class _SampleRecord(NamedTuple):
    """What an evaluation needs to know of one sample."""

    verdict: Verdict
    tokens: int
    logprob: float
    calls: int | None


def _sampled(records: Sequence[_SampleRecord]) -> Sampled:
    scores = Scores.pack([each.verdict for each in records])
    calls = [each.calls for each in records if each.calls is not None]
    return Sampled(
        scores,
        sum(each.tokens for each in records),
        sum(each.logprob for each in records),
        sum(calls) if calls else None,
    )


def _verdict(row: Mapping[str, Any]) -> Verdict:
    return Verdict(
        VerdictStatus(row["status"]), row["reward"], answer=row["answer"], detail=row["detail"], rank=row.get("rank")
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of the file. A last line without a newline was cut off while it was written."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _keep_only(path: Path, done: Mapping[str, object]) -> None:
    """Rewrite the file with the samples of the prompts in ``done``."""
    with replacing(path) as file:
        file.writelines(json.dumps(row).encode() + b"\n" for row in _rows(path) if row["prompt_id"] in done)
