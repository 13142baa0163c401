"""Writes down what happens in a run: metrics, events, samples, evaluations; to the folder, to Redis, to the display."""

import asyncio
import time
from collections import Counter
from typing import Any

import numpy as np

from services.coordinator import FinishedStep, ReadyGroup
from services.display import Bar, Display
from services.evaluate import Evaluation
from services.run_folder import RunFolder
from services.store import RunStore
from volley.records import STATUSES, Group

EXCERPT_EVERY = 10  # steps between excerpts of samples


class RunRecorder:
    """The coordinator's `Recorder`.

    Args:
        samples_kept: samples written at each excerpt.
    """

    def __init__(self, folder: RunFolder, store: RunStore, display: Display, samples_kept: int) -> None:
        self.folder, self.store, self.display = folder, store, display
        self.samples_kept = samples_kept
        self.bar: Bar | None = None
        self._last = time.monotonic()

    async def step(self, finished: FinishedStep) -> None:
        now = time.monotonic()
        row = step_row(finished, seconds=now - self._last)
        self._last = now
        self.folder.append("metrics", [row])
        self.folder.append("ledger", ledger_rows(finished))
        await self.store.add_step(row, finished.ledger)
        if finished.step % EXCERPT_EVERY == 0:
            await self._excerpt(finished)
        if self.bar is not None:
            self.bar.advance(_note(row))

    def start_clock(self) -> None:
        """The first step begins here, not with the processes it waited for."""
        self._last = time.monotonic()

    async def dropped(self, group_id: int, prompt_id: str, step: int, reason: str, detail: str) -> None:
        """Write down that a group ended untrained."""
        self.folder.append(
            "ledger", [{"step": step, "group": group_id, "prompt_id": prompt_id, "end": f"dropped: {reason}"}]
        )
        await self.event("group_dropped", group=group_id, reason=reason, detail=detail)

    async def event(self, kind: str, **details: Any) -> None:
        self.folder.append("events", [{"kind": kind, "time": time.time(), **details}])
        await self.store.add_event(kind, **details)

    async def evaluation(self, evaluation: Evaluation) -> None:
        """Write one evaluation and say it in one line."""
        row = evaluation.row()
        self.folder.append("evaluations", [row])
        await self.event("evaluation", **row)
        values = "  ".join(f"@{e.k} {e.mean:.3f}" for e in evaluation.estimates)
        self.display.say(f"  version {evaluation.version}, held out: pass{values}")
        self._last = time.monotonic()

    async def _excerpt(self, finished: FinishedStep) -> None:
        room = self.samples_kept
        for ready in finished.batch:
            if room <= 0:
                break
            if ready.meta.group_id in finished.report.dropped:
                continue  # it has no advantages
            group: Group = await asyncio.wait_for(_value(ready.group), 30)
            rows = sample_rows(finished, ready, group)[:room]
            self.folder.append("samples", rows)
            room -= len(rows)


async def _value(reference: Any) -> Any:
    return await reference


def step_row(finished: FinishedStep, *, seconds: float) -> dict[str, Any]:
    """The metrics of one step; names, units and definitions in `volley.metrics`."""
    batch, broadcast = finished.batch, finished.broadcast
    statuses = Counter(STATUSES[code] for ready in batch for code in ready.scores.status_n.tolist())
    samples = sum(ready.meta.n for ready in batch)
    stalls = [actor.stall_seconds for actor in broadcast.actors]
    return {
        "step": finished.step,
        "version": finished.step + 1,
        "time": time.time(),
        **finished.report.metrics,
        "lag_histogram": {str(lag): count for lag, count in sorted(finished.report.lag_histogram.items())},
        "seconds_step": seconds,
        "seconds_wait": finished.waited,
        "seconds_learn": finished.learned,
        "seconds_publish": finished.published,
        "seconds_broadcast": broadcast.seconds,
        "seconds_stalled_max": max(stalls, default=0.0),
        "seconds_generate_mean": float(np.mean([ready.meta.seconds for ready in batch])),
        "seconds_score_mean": float(np.mean([ready.scores.seconds for ready in batch])),
        "weight_bytes": finished.nbytes,
        "samples_per_second": samples / seconds,
        "truncated_fraction": sum(ready.meta.truncated for ready in batch) / samples,
        **{f"verdict_{status}": count / samples for status, count in sorted(statuses.items())},
        **{f"groups_{name}": count for name, count in finished.ledger.items()},
    }


def ledger_rows(finished: FinishedStep) -> list[dict[str, Any]]:
    """One object for each group of the batch: which prompt it was of, and how it ended."""
    dropped = finished.report.dropped
    return [
        {
            "step": finished.step,
            "group": ready.meta.group_id,
            "prompt_id": ready.prompt.id,
            "end": f"dropped: {dropped[ready.meta.group_id]}" if ready.meta.group_id in dropped else "trained",
        }
        for ready in finished.batch
    ]


def sample_rows(finished: FinishedStep, ready: ReadyGroup, group: Group) -> list[dict[str, Any]]:
    """One object for each sample of a group, best reward first."""
    advantages = finished.report.advantages[group.group_id]
    ends = np.cumsum(group.lengths_n)
    rows = []
    for i in np.argsort(-np.nan_to_num(ready.scores.rewards_n, nan=-np.inf), kind="stable").tolist():
        verdict = ready.scores.verdicts[i]
        versions = group.versions_T[ends[i] - group.lengths_n[i] : ends[i]]
        rows.append(
            {
                "step": finished.step,
                "group": group.group_id,
                "prompt": ready.prompt.text,
                "prompt_id": ready.prompt.id,
                "sample": group.texts[i],
                "status": str(verdict.status),
                "reward": verdict.reward,
                "advantage": float(advantages[i]),
                "detail": verdict.detail,
                "tokens": int(group.lengths_n[i]),
                "versions": sorted({int(version) for version in versions}),
                "stopped": bool(group.stopped_n[i]),
            }
        )
    return rows


def _note(row: dict[str, Any]) -> str:
    divergence = f"KL {row['kl_k1']:.3f}  " if "kl_k1" in row else ""
    return (
        f"reward {row['reward_mean']:.3f}  live {row['live_group_fraction']:.2f}  "
        f"{divergence}{row['samples_per_second']:.0f} samples/s"
    )
