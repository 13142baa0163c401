"""One training run on countdown, by TRL's `GRPOTrainer` or by Volley: pass@k of each step and when it ended, as JSON.

    python -m benchmarks.versus_trl.learning_sides trl|mean|max@8 TASK STEPS OUT.json

Both sides: the same start, prompts, scorer, samples, learning rate with the same rise, one update a batch. ``trl`` and
``mean`` divide by the group's standard deviation, as GRPO does. TASK is a folder of `benchmarks.reproductions`.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reproductions.countdown import EXAMPLES, OBJECTIVES, RISING

PROMPTS, SAMPLES, KS = 32, 16, (1, 8)
RATE = 6e-5
GRPO = {"kind": "mean", "center": True, "normalize": "std"}
Row = dict[str, float]


def main() -> None:
    side, task, steps, out = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    rows = trl(task, steps) if side == "trl" else volley(task, steps, GRPO if side == "mean" else OBJECTIVES[side])
    out.write_text(json.dumps(rows))


def longest(task: Path) -> int:
    """Tokens of a sample: every number, the signs between them, parentheses, its end."""
    return 2 * len(json.loads((task / "data" / "train.jsonl").open().readline())["numbers"]) + 2


def volley(task: Path, steps: int, objective: dict[str, Any]) -> list[Row]:
    """The whole stack, one thread each for generation and learning."""
    from services.display import Display
    from services.foreground import run_in_foreground
    from services.job_file import load_job
    from services.run import prepare, run_alone
    from services.run_folder import RunFolder

    settings: dict[str, Any] = {
        "model.path": str(task / "warm-up" / "model"),
        "data.path": str(task / "data" / "train.jsonl"),
        "objective": objective,
        "steps": steps,
        "prompts_per_step": PROMPTS,
        "sampling.max_tokens": longest(task),
        "optimizer": {"lr": RATE, "warmup_steps": RISING},
        "samples_kept": 0,
        "evaluation": None,
    }
    job = load_job(EXAMPLES / "max8.yaml", settings)
    with tempfile.TemporaryDirectory() as runs:
        run = RunFolder.create(Path(runs), job)
        run_in_foreground(run_alone(job, run, Display(quiet=True), prepared=prepare(job)))
        return [{"time": row["time"], **{f"pass@{k}": row[f"pass_at_{k}"] for k in KS}} for row in run.read("metrics")]


def trl(task: Path, steps: int) -> list[Row]:
    """TRL as its users write it, on both cores."""
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
    """The countdown scorer as a reward function of TRL's; each batch's pass@k is appended to ``rows``."""
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
