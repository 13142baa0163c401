"""Runs as the API would report them, computed from formulas, for the browser tests of the dashboard."""

import math
import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from volley.job import JOB
from volley.state import AuditRecord, Desired, Observed, Place, RunRecord, WorkerView

KS = (1, 2, 4, 8, 16)
EVAL_KS = (1, 2, 4, 8, 16, 32)
HOSTILE = (
    '<img src=x onerror="document.title=1337;window.hacked=true">',
    "</script><script>window.hacked=true</script>",
    '"><svg onload="window.hacked=true">',
    "<style>body{display:none}</style>{{7*7}}${window.hacked=true}",
)
STATUSES = ("passed", "wrong_answer", "no_answer", "runtime_error", "timeout")


@dataclass
class FakeRun:
    """One run with everything written about it. A run that does not move writes no further steps."""

    record: RunRecord
    desired: Desired
    observed: Observed
    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    moves: bool = True


def job(name: str, *, kind: str = "rl", steps: int = 400, k: int = 8, lr: float = 3e-4) -> dict[str, Any]:
    """A complete job, as in a run's record."""
    given: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "model": {"path": "/m/tiny"},
        "data": {"path": "/d/train.jsonl"},
    }
    if kind != "eval":
        given |= {"steps": steps, "optimizer": {"lr": lr}}
    if kind != "sft":
        given |= {"scorer": {"kind": "math"}, "actors": {"count": 2}, "reward_workers": {"count": 2}}
    if kind == "rl":
        given["objective"] = {"kind": "max_at_k", "k": k, "baseline": "loo"} if k > 1 else {"kind": "mean"}
    return JOB.validate_python(given).model_dump(mode="json")


def metrics_row(step: int, steps: int, start: float, chance: random.Random, *, strength: float = 1.0) -> dict[str, Any]:
    """The metrics of a step in a run whose pass@1 rises and then levels off."""
    done = step / steps
    single = 0.16 + 0.3 * strength * (1 - math.exp(-3.2 * done)) + chance.gauss(0, 0.022)
    single = min(max(single, 0.0), 1.0)
    passes = {f"pass_at_{k}": 1 - (1 - single) ** (k**0.8) for k in KS}
    lags = {"0": 900 + chance.randrange(300), "1": 2800 + chance.randrange(400), "2": chance.randrange(260)}
    rest = 1 - single
    return {
        "step": step,
        "version": step + 1,
        "time": start + 2 * step,
        "reward_mean": single,
        **passes,
        "live_group_fraction": min(1.0, 0.92 - 0.35 * done + chance.gauss(0, 0.03)),
        "live_sample_fraction": 0.3 - 0.1 * done,
        "verdict_passed": single,
        "verdict_wrong_answer": rest * 0.72,
        "verdict_no_answer": rest * 0.16 * (1 - 0.6 * done),
        "verdict_runtime_error": rest * 0.05,
        "verdict_timeout": rest * 0.07,
        "truncated_fraction": 0.02,
        "loss": -0.01 + chance.gauss(0, 0.01),
        "entropy": 1.4 * math.exp(-1.3 * done) + 0.2 + chance.gauss(0, 0.02),
        "grad_norm": 1.6 + chance.gauss(0, 0.35),
        "kl_k1": 0.55 * strength * done + abs(chance.gauss(0, 0.012)),
        "kl_k3": 0.7 * strength * done + abs(chance.gauss(0, 0.02)),
        "learning_rate": 3e-4,
        "tokens": 4096,
        "tokens_per_second": 8600 + chance.gauss(0, 500),
        "samples_per_second": 260 + chance.gauss(0, 18),
        "lag_histogram": lags,
        "seconds_step": 2.0,
        "seconds_wait": max(0.02, 0.8 + chance.gauss(0, 0.15)),
        "seconds_learn": 0.95 + abs(chance.gauss(0, 0.05)),
        "seconds_publish": 0.09,
        "seconds_broadcast": 0.13 + abs(chance.gauss(0, 0.02)) + (10.0 if step == 0 else 0.0),  # the actors wake up
        "groups_admitted": 32 * (step + 2),
        "groups_trained": 32 * (step + 1) - step // 40,
        "groups_dropped": step // 40,
        "groups_in_flight": 32,
        "groups_dead": 3 * step,
    }


def evaluation(version: int, single: float) -> dict[str, Any]:
    means = {k: 1 - (1 - single) ** (k**0.75) for k in EVAL_KS}
    estimates = [{"k": k, "mean": m, "low": m - 0.03, "high": min(1.0, m + 0.03)} for k, m in means.items()]
    return {"version": version, "prompts": 200, "n": 64, "distinct_answers": 9.3, "estimates": estimates}


def timeline_item(
    step: int, end: float, chance: random.Random, seconds: float = 2.0, actors: int = 2, environments: int = 0
) -> dict[str, Any]:
    """The timeline of a step of ``seconds`` seconds that ended at ``end``."""
    spans: list[list[Any]] = []
    part = seconds / 100
    begin = end - seconds
    for actor in range(actors):
        at = begin + 5 * part * chance.random()
        while at < end - 18 * part:
            length = (14 + 12 * chance.random()) * part
            spans.append([f"actor-{actor}", "generate", at, at + length])
            spans.append([f"reward-{chance.randrange(2)}", "score", at + length, at + length + 4 * part])
            at += length
        spans.append([f"actor-{actor}", "update", end - 7 * part, end - part])
    spans += [[f"environment-{i}", "environment", begin + 9 * i * part, end - 30 * part] for i in range(environments)]
    learned = begin + 88 * part
    spans += [["learner", "learn", begin + 40 * part, learned], ["learner", "publish", learned, learned + 4 * part]]
    return {"step": step, "time": end, "spans": spans}


def sample_rows(step: int, group: int, chance: random.Random, n: int = 16) -> list[dict[str, Any]]:
    """A group of ``n`` samples; those of group 0 are hostile."""
    numbers = [chance.randrange(1, 13) for _ in range(4)]
    prompt = f"Write a function that reaches {chance.randrange(10, 99)} from {numbers} with + - * and no number twice."
    rows = []
    for i in range(n):
        status = "passed" if i < 4 else chance.choice(STATUSES[1:])
        text = f"def solve(numbers):\n    a, b, c, d = numbers\n    return (a + b) * c - d  # try {i}\n"
        detail = "" if status == "passed" else f"test 3 of 8: solve({numbers}) gave {chance.randrange(99)}, expected 24"
        if group == 0:
            text, detail, prompt = HOSTILE[i % len(HOSTILE)], HOSTILE[(i + 1) % len(HOSTILE)], HOSTILE[0]
        rows.append(
            {
                "step": step,
                "group": group,
                "prompt": prompt,
                "prompt_id": f"train:{1000 + group}",
                "sample": text,
                "status": status,
                "reward": 1.0 if status == "passed" else 0.0,
                "advantage": 0.38 if status == "passed" else -0.12,
                "detail": detail,
                "tokens": 42 + i,
                "versions": [step, step + 1] if i % 5 == 0 else [step],
                "version_starts": [0, 31] if i % 5 == 0 else [0],
                "token_ids": list(range(42 + i)),
                "logprobs": [-0.1] * (42 + i),
                "stopped": i % 11 != 10,
            }
        )
    return rows


def workers(actors: int, rewards: int, version: int) -> tuple[WorkerView, ...]:
    return (
        *(
            WorkerView(name=f"actor-{i}", role="actor", state="serving", pid=4100 + i, version=version, busy=48 - i)
            for i in range(actors)
        ),
        *(
            WorkerView(name=f"reward-{i}", role="reward_worker", state="serving", pid=4200 + i, busy=i)
            for i in range(rewards)
        ),
        WorkerView(name="learner-0", role="learner_rank", state="serving", pid=4300),
    )


def make_run(name: str, state: str, *, steps: int = 400, done: int = 0, seed: int = 0, **job_fields: Any) -> FakeRun:
    """A run that has done ``done`` steps, with ``problem`` and ``tags``; other arguments are fields of the job."""
    chance = random.Random(seed)
    problem, tags = job_fields.pop("problem", ""), job_fields.pop("tags", {})
    kind = job_fields.get("kind", "rl")
    now = time.time()
    created = now - 2 * done - 40 - 60 * seed
    record = RunRecord(
        id=f"{name}-{seed:04x}",
        name=name,
        kind=kind,
        job=job(name, steps=steps, **job_fields),
        created=created,
        folder=f"/runs/{name}-{seed:04x}",
        tags=tags,
    )
    live = state in ("running", "paused", "starting")
    observed = Observed.model_validate(
        {
            "state": state,
            "problem": problem,
            "step": done,
            "steps": steps,
            "version": done,
            "life": 1,
            "actors": 2 if live else 0,
            "actors_wanted": 2,
            "reward_workers": 2 if live else 0,
            "reward_workers_wanted": 2,
            "learner_ranks": 1,
            "groups": {"generating": 24, "scoring": 3, "ready": 5, "held": 32, "slots": 64} if live else {},
            "workers": workers(2, 2, done) if live else (),
            "sandbox": "bubblewrap",
            "started": created + 12 if done else None,
            "updated": now,
            "ended": None if live or state == "queued" else now,
        }
    )
    run = FakeRun(record, Desired(paused=state == "paused"), observed)
    _history(run, done, chance, strength=1.0 if "max" in name else 0.6)
    return run


def _history(run: FakeRun, done: int, chance: random.Random, *, strength: float) -> None:
    start, steps = run.record.created, run.observed.steps
    run.rows = [metrics_row(step, steps, start, chance, strength=strength) for step in range(done)]
    if run.record.kind == "sft":
        keep = ("step", "time", "loss", "entropy", "grad_norm", "learning_rate", "tokens", "tokens_per_second")
        run.rows = [
            {**{key: row[key] for key in keep}, "loss": 2.2 * math.exp(-row["step"] / 60) + 0.4} for row in run.rows
        ]
        return
    marks = sorted({0, *range(0, done, max(1, steps // 5))} | ({done} if run.observed.state == "done" else set()))
    if done or run.observed.state == "running":
        run.evaluations = [
            evaluation(mark, 0.15 + 0.26 * strength * (1 - math.exp(-3 * mark / steps))) for mark in marks
        ]
    programs = 2 if "code" in run.record.name else 0
    run.timeline = [
        timeline_item(step, start + 2 * step, chance, environments=programs) for step in range(max(0, done - 20), done)
    ]
    for mark, row in zip(marks, run.evaluations, strict=False):
        run.events.append({"kind": "evaluation", "time": start + 2 * mark, **row})
    if done:
        run.events.insert(0, {"kind": "started", "time": start, "step": 0})
        dropped = {"group": 812, "reason": "stale", "detail": "tokens of version 3 at version 6"}
        run.events.append({"kind": "group_dropped", "time": start + done, **dropped})
        died = "actor-1 died: its process was killed; its 3 groups are generated again"
        run.events.append({"kind": "actor_died", "time": start + 1.4 * done, "problem": died})
    if run.observed.problem:
        run.events.append({"kind": "trouble", "time": start + 2 * done, "problem": run.observed.problem})
    run.events.sort(key=lambda each: float(each["time"]))
    for step in range(0, done, 10):
        for place in range(4):
            run.samples += sample_rows(step, 32 * step + place + 1, chance)


def big_run(points: int, samples: int) -> FakeRun:
    """A run as large as the dashboard must handle, with few metric names so that it is made within a second."""
    run = make_run("big", "running", steps=points, done=0, seed=9)
    run.moves = False
    chance = np.random.default_rng(0)
    noise = chance.normal(0, 0.02, points)
    curve = 0.16 + 0.3 * (1 - np.exp(-4 * np.arange(points) / points)) + noise
    run.rows = [
        {
            "step": step,
            "reward_mean": each,
            "pass_at_1": each,
            "pass_at_16": min(1.0, 2 * each),
            "kl_k1": step / points,
            "lag_histogram": {"0": 100, "1": 300},
        }
        for step, each in enumerate(curve.tolist())
    ]
    run.observed = run.observed.model_copy(update={"step": points})
    rng = random.Random(1)
    for group in range(samples // 16):
        run.samples += sample_rows(10 * (group // 4), group + 1, rng)
    return run


def sweep(name: str = "rates", seeds: int = 3) -> list[FakeRun]:
    """The runs of a sweep over two settings; of the second, the last one still runs."""
    made = []
    for at, (group, lr) in enumerate((("lr=0.0003", 3e-4), ("lr=0.0001", 1e-4))):
        for seed in range(seeds):
            live = at == 1 and seed == seeds - 1
            tags = {"sweep": name, "group": group, "seed": str(seed), "member": f"{at}-s{seed}"}
            made.append(
                make_run(
                    f"{name}-{'max' if at else 'mean'}-s{seed}",
                    "running" if live else "done",
                    steps=60,
                    done=30 if live else 60,
                    seed=20 + seeds * at + seed,
                    lr=lr,
                    tags=tags,
                )
            )
            made[-1].moves = False
    return made


def all_runs() -> list[FakeRun]:
    """One run of each kind and state."""
    no_signal = (
        "20 batches in a row had no group with a signal: lower the difficulty, raise sampling.n, or use a smaller k"
    )
    return [
        make_run("countdown-max8", "running", done=230, seed=1, tags={"team": "maths", "sweep": "k"}),
        make_run("countdown-mean", "done", done=400, seed=2, k=1, tags={"team": "maths", "sweep": "k"}),
        make_run("countdown-max4", "paused", done=120, seed=3, k=4, lr=1e-4, problem="paused by a user"),
        make_run("apps-code-max12", "failed", done=64, seed=4, k=12, problem=no_signal),
        make_run("warm-up", "done", kind="sft", steps=250, done=250, seed=5),
        make_run("heldout", "queued", kind="eval", steps=0, seed=6),
    ]


def places() -> list[Place]:
    """A queue in which one run holds resources and one waits."""
    running, waiting = "countdown-max8-0001", "heldout-0006"
    fields = {
        "submitted": time.time() - 90,
        "since": time.time() - 60,
        "resources": {"CPU": 4.5, "GPU": 1.0},
        "most": {},
    }
    reason = f"waits for 1 GPU: alice's {running} holds 1"
    return [
        Place.model_validate({**fields, "run": running, "owner": "alice", "priority": 1, "state": "admitted"}),
        Place.model_validate(
            {**fields, "run": waiting, "owner": "bob", "priority": 0, "position": 1, "reason": reason}
        ),
    ]


def audit_record() -> AuditRecord:
    """A change whose text is hostile."""
    details = {"learning_rate": 1e-6, "objective": {"kind": HOSTILE[0]}}
    return AuditRecord(time=time.time(), who="alice", action="set", run="countdown-max8-0001", details=details)
