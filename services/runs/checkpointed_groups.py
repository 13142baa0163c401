"""Groups that were ready when a checkpoint was written, in a file: a resumed run trains on them, not on new ones.

The file is one ``.npz`` without pickles: the arrays of all groups end to end, their lengths, and everything else as
one JSON text.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from services.coordinator.records import ReadyGroup
from volley.errors import JobError
from volley.records import Group, ModelCall, Prompt, Scores, Verdict, VerdictStatus
from volley.refs import Ref

FILE = "groups.npz"
ARRAYS = (
    "prompt_p",
    "tokens_T",
    "logprobs_T",
    "versions_T",
    "lengths_n",
    "stopped_n",
    "observation_S",
    "observation_at_S",
)


@dataclass(frozen=True, slots=True)
class CheckpointedGroup:
    """A `ReadyGroup`, whose fields these are, with its arrays in place of a reference to them."""

    group: Group
    prompt: Prompt
    scores: Scores
    max_lag: int
    generated: tuple[float, float]
    scored: float

    @classmethod
    def of(cls, ready: ReadyGroup, group: Group) -> Self:
        """``ready`` with its arrays, which the caller has fetched."""
        return cls(group, ready.prompt, ready.scores, ready.max_lag, ready.generated, ready.scored)

    def ready(self, reference: Ref[Group]) -> ReadyGroup:
        """The group as the coordinator takes it, with a ``reference`` to its arrays in the object store."""
        return ReadyGroup(
            group=reference,
            meta=self.group.meta(),
            prompt=self.prompt,
            scores=self.scores,
            max_lag=self.max_lag,
            generated=self.generated,
            scored=self.scored,
        )


def pack(groups: Sequence[CheckpointedGroup]) -> bytes:
    """The content of `FILE`."""
    columns: dict[str, Any] = {}
    for name in ARRAYS:
        parts = [getattr(each.group, name) for each in groups]
        columns[name] = np.concatenate(parts) if parts else np.zeros(0)
        columns[f"{name}_lengths"] = np.array([len(part) for part in parts], dtype=np.int64)
    rows = [_row(each) for each in groups]
    columns["rows"] = np.frombuffer(json.dumps(rows).encode(), dtype=np.uint8)
    file = io.BytesIO()
    np.savez(file, **columns)
    return file.getvalue()


def unpack(file: Path, prompts: Mapping[str, Prompt]) -> list[CheckpointedGroup]:
    """The groups in ``file``, or none if it does not exist; ``prompts`` by id.

    Raises:
        JobError: the data no longer has the prompt of a group.
    """
    if not file.exists():
        return []
    with np.load(file, allow_pickle=False) as columns:
        rows = json.loads(columns["rows"].tobytes())
        arrays = {
            name: np.split(columns[name], np.cumsum(columns[f"{name}_lengths"])[:-1]) if rows else [] for name in ARRAYS
        }
    if removed := sorted({row["prompt_id"] for row in rows} - prompts.keys()):
        others = f" and {len(removed) - 1} more" if len(removed) > 1 else ""
        raise JobError(
            f"data: the checkpoint has samples of prompt {removed[0]}{others}, which the data no longer has: put back "
            f"what was removed, or delete {file} to sample other prompts in their place"
        )
    return [
        _group(row, {name: arrays[name][i] for name in ARRAYS}, prompts[row["prompt_id"]]) for i, row in enumerate(rows)
    ]


def _row(each: CheckpointedGroup) -> dict[str, Any]:
    group, scores = each.group, each.scores
    return {
        "group_id": group.group_id,
        "prompt_id": group.prompt_id,
        "texts": group.texts,
        "earlier": group.earlier,
        "calls": [[asdict(call) for call in calls] for calls in group.calls],
        "actor": group.actor,
        "seconds": group.seconds,
        "verdicts": [asdict(verdict) for verdict in scores.verdicts],
        "scoring": {"seconds": scores.seconds, "worker": scores.worker},
        "max_lag": each.max_lag,
        "generated": each.generated,
        "scored": each.scored,
    }


def _group(row: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], prompt: Prompt) -> CheckpointedGroup:
    group = Group(
        group_id=row["group_id"],
        prompt_id=row["prompt_id"],
        texts=tuple(row["texts"]),
        earlier=tuple(row["earlier"]),
        calls=tuple(tuple(ModelCall(**call) for call in calls) for calls in row.get("calls", ())),
        actor=row["actor"],
        seconds=row["seconds"],
        **arrays,
    )
    verdicts = [Verdict(**{**verdict, "status": VerdictStatus(verdict["status"])}) for verdict in row["verdicts"]]
    return CheckpointedGroup(
        group=group,
        prompt=prompt,
        scores=Scores.pack(verdicts, **row["scoring"]),
        max_lag=row["max_lag"],
        generated=tuple(row["generated"]),
        scored=row["scored"],
    )
