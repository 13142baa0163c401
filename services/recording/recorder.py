"""Records a run: metrics, events, samples and evaluations go to the run folder, to Redis, and to the terminal."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from services.coordinator.records import FinishedStep, ReadyGroup
from services.coordinator.refill import REPLACED
from services.evaluation.estimates import Evaluation
from services.evaluation.fetch import fetched
from services.recording.disk_space import DiskGuard
from services.recording.display import Bar, Display, evaluation_words
from services.recording.episodes import episode_metrics
from services.recording.progress import Progress, passed
from services.recording.sinks.sinks import Sinks
from services.recording.terminal import headline_k
from services.recording.timeline import timeline
from services.store.folder import RunFolder
from services.store.outbox import Outbox
from volley.records import STATUSES, Group, Prompt, calls_column

PRINTED_EVENTS = frozenset({"paused", "trouble", "waiting", "actor_died", "reward_worker_died", "learner_restarted"})
EXCERPT_EVERY = 10  # steps between excerpts of samples


class RunRecorder:
    """The coordinator's `Recorder`. Writes to a full disk wait for space; writes to Redis queue up while it is down.

    Args:
        samples_kept: samples per excerpt.
        bar: advanced with every step.
        sinks: receive every step and evaluation.
        prompts: the prompts that are trained on, for figures by tag.
        k: the objective's k, for the note beside the bar.
        on_full: called with the problem when the run begins to wait for space, and with "" when it goes on.

    Attributes:
        disk: guards every write to the run folder.
    """

    def __init__(
        self,
        folder: RunFolder,
        outbox: Outbox,
        display: Display,
        samples_kept: int,
        bar: Bar | None = None,
        sinks: Sinks | None = None,
        prompts: Sequence[Prompt] = (),
        k: int | None = None,
        on_full: Callable[[str], None] | None = None,
    ) -> None:
        self.folder, self.outbox, self.display, self.bar = folder, outbox, display, bar
        self.samples_kept, self.sinks, self._k = samples_kept, sinks, k
        self.progress = Progress(prompts)
        self.disk, self._on_full = DiskGuard(self._report_disk), on_full
        self._last = time.time()

    async def step(self, finished: FinishedStep) -> None:
        now = time.time()
        row = step_row(finished, self.progress, seconds=now - self._last)
        self._last = now
        await self._append("metrics", [row])
        await self._append("ledger", ledger_rows(finished))
        self.outbox.step(row, finished.ledger)
        if self.sinks is not None:
            self.sinks.step(row)
        self.outbox.add("timeline", timeline(finished))
        if finished.step % EXCERPT_EVERY == 0:
            await self._excerpt(finished)
        if self.bar is not None:
            self.bar.advance(_note(row, self._k))

    async def supervised_step(self, row: Mapping[str, Any]) -> None:
        """Record the metrics of a step of an sft or rft job."""
        await self._append("metrics", [row])
        self.outbox.step(row, {})
        if self.sinks is not None:
            self.sinks.step(row)

    def start_clock(self, step: int) -> None:
        """Time the step numbered ``step`` from now on, not from the start of the processes before it."""
        self._last = time.time()
        self.progress.restore(self.folder.read("ledger"))
        if self.bar is not None:
            self.bar.go_to(step)
        if self.sinks is not None:
            self.sinks.begin(step)

    async def dropped(self, group_id: int, prompt_id: str, step: int, reason: str, detail: str) -> None:
        """Record that a group ended without being trained on."""
        await self._append(
            "ledger", [{"step": step, "group": group_id, "prompt_id": prompt_id, "end": f"dropped: {reason}"}]
        )
        await self.event("group_dropped", group=group_id, reason=reason, detail=detail)

    async def event(self, kind: str, **details: object) -> None:
        row = {"kind": kind, "time": time.time(), **details}
        self.outbox.add("events", row)
        if kind in PRINTED_EVENTS and details.get("problem"):
            self.display.say(f"  {kind.replace('_', ' ')}: {details['problem']}")
        await self._append("events", [row])

    async def evaluation(self, evaluation: Evaluation) -> None:
        """Record an evaluation and print it on one line."""
        row = evaluation.row()
        await self._append("evaluations", [row])
        self.outbox.add("evaluations", row)
        if self.sinks is not None:
            self.sinks.evaluation(row)
        await self.event("evaluation", **row)
        self.display.say(f"  version {evaluation.version}, held out: {evaluation_words(row)}")

    async def _excerpt(self, finished: FinishedStep) -> None:
        missing = self.samples_kept
        for ready in finished.batch.groups:
            if missing <= 0:
                break
            if ready.meta.group_id in finished.report.dropped:
                continue  # it has no advantages
            rows = sample_rows(finished, ready, await fetched(ready.group))[:missing]
            await self._append("samples", rows)
            self.outbox.add("samples", *rows)
            missing -= len(rows)

    async def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        await self.disk.write(partial(self.folder.append, name, rows))

    async def _report_disk(self, problem: str) -> None:
        """Report that the disk is full, or has space again: in Redis and on the terminal only."""
        self.outbox.add(
            "events", {"kind": "paused" if problem else "unpaused", "time": time.time(), "problem": problem}
        )
        self.display.say(f"  paused: {problem}" if problem else "  the disk has space again")
        if self._on_full is not None:
            self._on_full(problem)


def step_row(finished: FinishedStep, progress: Progress, *, seconds: float) -> dict[str, Any]:
    """The metrics of one step, whose batch is added to ``progress``. `volley.metrics` defines them."""
    batch, broadcast, times = finished.batch.groups, finished.broadcast, finished.times
    statuses = Counter(STATUSES[code] for ready in batch for code in ready.scores.status_n.tolist())
    samples, turns = (sum(getattr(ready.meta, name) for ready in batch) for name in ("n", "turns"))
    stalls = [actor.stall_seconds for actor in broadcast.actors]
    return {
        "step": finished.step,
        "version": finished.step + 1,
        "time": time.time(),
        **finished.report.metrics,
        **progress.add(batch, finished.batch.replaced),
        "lag_histogram": {str(lag): count for lag, count in sorted(finished.report.lag_histogram.items())},
        "seconds_step": seconds,
        "seconds_wait": times.waited - times.begun,
        "seconds_learn": times.learned - times.waited,
        "seconds_publish": times.gathered - times.publishing,
        "seconds_broadcast": times.published - times.gathered + broadcast.seconds,
        "seconds_stalled_max": max(stalls, default=0.0),
        "seconds_generate_mean": float(np.mean([ready.meta.seconds for ready in batch])),
        "seconds_score_mean": float(np.mean([ready.scores.seconds for ready in batch])),
        "weight_group_share": sum(actor.grouped for actor in broadcast.actors) / max(1, len(broadcast.actors)),
        "weight_bytes": finished.nbytes,
        "samples_per_second": samples / seconds,
        "truncated_fraction": sum(ready.meta.truncated for ready in batch) / samples,
        **episode_metrics(finished.episodes, seconds=seconds),
        **({"turns_mean": turns / samples} if turns > samples else {}),
        **{f"verdict_{status}": count / samples for status, count in sorted(statuses.items())},
        **{f"groups_{name}": count for name, count in finished.ledger.items()},
    }


def ledger_rows(finished: FinishedStep) -> list[dict[str, Any]]:
    """One object per group made for the batch: its prompt, how many of its samples passed, and how it ended."""
    replaced = {ready.meta.group_id: REPLACED for ready in finished.batch.replaced}
    dropped = {**finished.report.dropped, **replaced}
    return [
        {
            "step": finished.step,
            "group": ready.meta.group_id,
            "prompt_id": ready.prompt.id,
            "passed": passed(ready.scores),
            "end": f"dropped: {dropped[ready.meta.group_id]}" if ready.meta.group_id in dropped else "trained",
        }
        for ready in (*finished.batch.groups, *finished.batch.replaced)
    ]


def sample_rows(finished: FinishedStep, ready: ReadyGroup, group: Group) -> list[dict[str, Any]]:
    """One object per sample of a group, best reward first."""
    advantages = finished.report.advantages[group.group_id]
    ends = np.cumsum(group.lengths_n)
    rows = []
    for i in np.argsort(-np.nan_to_num(ready.scores.rewards_n, nan=-np.inf), kind="stable").tolist():
        verdict = ready.scores.verdicts[i]
        tokens = slice(ends[i] - group.lengths_n[i], ends[i])
        versions, starts = np.unique(group.versions_T[tokens], return_index=True)
        rows.append(
            {
                "step": finished.step,
                "group": group.group_id,
                "prompt": ready.prompt.text,
                "prompt_id": ready.prompt.id,
                **({"earlier": group.earlier[i]} if group.earlier else {}),
                **calls_column(group, i),
                "sample": group.texts[i],
                "status": str(verdict.status),
                "reward": verdict.reward,
                **({} if verdict.rank is None else {"rank": verdict.rank}),
                "advantage": float(advantages[i]),
                "detail": verdict.detail,
                "tokens": int(group.lengths_n[i]),
                "versions": versions.tolist(),
                "version_starts": starts.tolist(),
                "token_ids": group.tokens_T[tokens].tolist(),
                "logprobs": np.round(group.logprobs_T[tokens], 4).tolist(),
                "stopped": bool(group.stopped_n[i]),
            }
        )
    return rows


def _note(row: dict[str, Any], k: int | None) -> str:
    k = headline_k(row, k)
    best = f"pass@{k} {row[f'pass_at_{k}']:.3f}  " if k is not None and k > 1 else ""
    divergence = f"KL {row['kl_k1']:.3f}  " if "kl_k1" in row else ""
    speed = row["samples_per_second"]
    digits = 0 if speed >= 9.95 else 1
    return (
        f"reward {row['reward_mean']:.3f}  {best}live {row['live_group_fraction']:.2f}  "
        f"{divergence}{speed:.{digits}f} samples/s"
    )
