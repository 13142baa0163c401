"""Groups that were ready when a checkpoint was written, in a file: a resumed run trains on them, not on new ones.

One ``.npz`` without pickles: the arrays of all groups end to end, their lengths, and the rest as one JSON text.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from services.steps import ReadyGroup
from volley.records import Group, Prompt, Scores, Verdict, VerdictStatus

FILE = "groups.npz"
ARRAYS = ("prompt_p", "tokens_T", "logprobs_T", "versions_T", "lengths_n", "stopped_n", "shown_S", "shown_at_S")


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A ready group with its arrays; ``ready.group`` is None until somebody gives it a reference to them."""

    group: Group
    ready: ReadyGroup


def packed(groups: Sequence[KeptGroup]) -> bytes:
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


def unpacked(file: Path, prompts: Mapping[str, Prompt]) -> list[KeptGroup]:
    """The groups in ``file``, of which there are none without it; ``prompts`` by id."""
    if not file.exists():
        return []
    with np.load(file, allow_pickle=False) as columns:
        rows = json.loads(columns["rows"].tobytes())
        arrays = {
            name: np.split(columns[name], np.cumsum(columns[f"{name}_lengths"])[:-1]) if rows else [] for name in ARRAYS
        }
    return [
        _kept(row, {name: arrays[name][i] for name in ARRAYS}, prompts[row["prompt_id"]]) for i, row in enumerate(rows)
    ]


def _row(kept: KeptGroup) -> dict[str, Any]:
    group, ready = kept.group, kept.ready
    return {
        "group_id": group.group_id,
        "prompt_id": group.prompt_id,
        "texts": group.texts,
        "earlier": group.earlier,
        "actor": group.actor,
        "seconds": group.seconds,
        "verdicts": [asdict(verdict) for verdict in ready.scores.verdicts],
        "scoring": {"seconds": ready.scores.seconds, "worker": ready.scores.worker},
        "max_lag": ready.max_lag,
        "generated": ready.generated,
        "scored": ready.scored,
    }


def _kept(row: Mapping[str, Any], arrays: Mapping[str, Any], prompt: Prompt) -> KeptGroup:
    group = Group(
        group_id=row["group_id"],
        prompt_id=row["prompt_id"],
        texts=tuple(row["texts"]),
        earlier=tuple(row["earlier"]),
        actor=row["actor"],
        seconds=row["seconds"],
        **arrays,
    )
    verdicts = [Verdict(**{**verdict, "status": VerdictStatus(verdict["status"])}) for verdict in row["verdicts"]]
    ready = ReadyGroup(
        group=None,
        meta=group.meta(),
        prompt=prompt,
        scores=Scores.pack(verdicts, **row["scoring"]),
        max_lag=row["max_lag"],
        generated=tuple(row["generated"]),
        scored=row["scored"],
    )
    return KeptGroup(group, ready)


def referred(kept: KeptGroup, reference: Any) -> ReadyGroup:
    """The ready group with ``reference`` to its arrays."""
    return replace(kept.ready, group=reference)
