"""One training run on countdown with TRL's `GRPOTrainer` or Volley: writes each step's pass@k and end time as JSON.

    python -m benchmarks.versus_trl.learning_sides trl|mean|max@8 TASK STEPS OUT.json

Both sides have the same start, prompts, scorer, number of samples, learning rate with warm-up, and one update per
batch. ``trl`` and ``mean`` divide by the group's standard deviation, as GRPO does. TASK is a task folder of
`benchmarks.reproductions`.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reproductions.tasks import EXAMPLES, RISING

PROMPTS, SAMPLES, KS = 32, 16, (1, 8)
RATE = 6e-5
OBJECTIVES = {
    "mean": {"kind": "mean", "center": True, "normalize": "std"},
    "max@8": {"kind": "max_at_k", "k": 8, "center": True},
}
Row = dict[str, float]


def main() -> None:
    side, task, steps, out = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    rows = trl(task, steps) if side == "trl" else volley(task, steps, OBJECTIVES[side])
    out.write_text(json.dumps(rows))


def longest(task: Path) -> int:
    """The most tokens of a sample: all numbers, the signs between them, parentheses and the end of text."""
    return 2 * len(json.loads((task / "data" / "train.jsonl").open().readline())["numbers"]) + 2


def volley(task: Path, steps: int, objective: dict[str, Any]) -> list[Row]:
    """Train with Volley's whole stack, with one thread each for generation and learning."""
    from services.jobs.job_file import load_job
    from services.recording.display import Display
    from services.runs.run import prepare, run_alone
    from services.signals import run_in_foreground
    from services.store.folder import RunFolder

    settings: dict[str, Any] = {
        "model.path": str(task / "warm-up" / "model"),
        "data.path": str(task / "data" / "train.jsonl"),
        "objective": objective,
        "steps": steps,
        "prompts_per_step": PROMPTS,
        "sampling.max_tokens": longest(task),
        "optimizer": {"lr": RATE, "warmup_steps": RISING, "clip_norm": 1.0},
        "samples_kept": 0,
        "evaluation": None,
    }
    job = load_job(EXAMPLES / "max8.yaml", settings)
    with tempfile.TemporaryDirectory() as runs:
        run = RunFolder.create(Path(runs), job)
        run_in_foreground(run_alone(prepare(job), run, Display(quiet=True)))
        return [{"time": row["time"], **{f"pass@{k}": row[f"pass_at_{k}"] for k in KS}} for row in run.read("metrics")]


def trl(task: Path, steps: int) -> list[Row]:
    """Train with TRL as its documentation shows, on both cores."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    from benchmarks.versus_trl.trl_side import settings

    torch.set_num_threads(2)
    rows: list[Row] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            rows[-1]["time"] = time.time()

    with tempfile.TemporaryDirectory() as outputs:
        batch = {"per_device_train_batch_size": PROMPTS * SAMPLES, "num_generations": SAMPLES}
        rate = {"learning_rate": RATE, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": RISING}
        config = settings(outputs, **batch, **rate, max_completion_length=longest(task), max_steps=steps)
        with (task / "data" / "train.jsonl").open() as lines:
            dataset = Dataset.from_list([json.loads(line) for line in lines])
        GRPOTrainer(
            model=str(task / "warm-up" / "model"),
            reward_funcs=rewards(rows),
            args=config,
            train_dataset=dataset,
            callbacks=[Clock()],
        ).train()
    return rows


def rewards(rows: list[Row]) -> Callable[..., list[float]]:
    """The countdown scorer as a TRL reward function, which appends each batch's pass@k to ``rows``."""
    from reward_servers.scorers.countdown import Countdown
    from volley.objectives import pass_at_k
    from volley.records import Prompt
    from volley.scoring import CountdownScorer, RewardValues

    scorer = Countdown(CountdownScorer(values=RewardValues(passed=1.0, failed=0.0)))

    def scored(completions: list[str], numbers: list[Any], target: list[int], **_: Any) -> list[float]:
        found: list[float] = []
        for i in range(0, len(completions), SAMPLES):
            prompt = Prompt(id=str(i), text="", reference={"numbers": numbers[i], "target": target[i]})
            found += [float(verdict.reward or 0.0) for verdict in scorer.score(prompt, completions[i : i + SAMPLES])]
        right_B = np.reshape(found, (-1, SAMPLES)).astype(int).sum(axis=1)
        rows.append({f"pass@{k}": float(np.mean(pass_at_k(SAMPLES, right_B, k))) for k in KS})
        return found

    return scored


if __name__ == "__main__":
    main()
