"""One workload with TRL's `GRPOTrainer`, as its documentation shows: writes the seconds of each step as JSON.

    python -m benchmarks.versus_trl.trl_side WORKLOAD FOLDER OUT.json [JUDGE_URL]

Generation is TRL's default on CPU (transformers, one padded batch) and uses both cores. The code reward runs each
sample in a ``subprocess`` with a time limit, two at a time.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.versus_trl.workloads import SAMPLES, WORKLOADS, share_of_even

Reward = Callable[..., list[float]]


def free(completions: list[str], **_: Any) -> list[float]:
    """The reward that costs nothing."""
    return [share_of_even(text) for text in completions]


def code(completions: list[str], **_: Any) -> list[float]:
    """The usual code reward with TRL: one process per program."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(_run, completions))


def _run(program: str) -> float:
    try:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (subprocess.TimeoutExpired, ValueError):
        return -1.0
    return 1.0 if done.returncode == 0 and done.stdout.strip() == "1" else -1.0


def remote_judge(url: str) -> Reward:
    """A reward that sends the whole batch to the judge in one request."""

    def judged(completions: list[str], **_: Any) -> list[float]:
        body = json.dumps({"samples": completions}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return list(json.loads(answer.read())["rewards"])

    return judged


def settings(outputs: str, **more: Any) -> GRPOConfig:
    """Trainer settings: one update per batch, no KL term, no checkpoints, no logging, on CPUs; ``more`` may differ."""
    return GRPOConfig(
        **{
            "output_dir": outputs,
            "use_cpu": True,
            "bf16": False,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing": False,
            "temperature": 1.0,
            "beta": 0.0,
            "logging_steps": 10**6,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": 0,
            **more,
        }
    )


class Clock(TrainerCallback):  # type: ignore[misc]
    """Records when each step ended."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    workload, folder, out = WORKLOADS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(2)
    rewards: dict[str, Reward] = {"free": free, "code": code}
    reward = rewards[workload.reward] if workload.reward in rewards else remote_judge(sys.argv[4])
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    clock = Clock()
    with tempfile.TemporaryDirectory() as outputs:
        batch = {"per_device_train_batch_size": workload.prompts * SAMPLES, "num_generations": SAMPLES}
        length = {"max_completion_length": workload.max_tokens, "max_steps": workload.steps}
        config = settings(outputs, **batch, **length, learning_rate=1e-6, lr_scheduler_type="constant")
        trainer = GRPOTrainer(
            model=str(folder / "model"),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
            callbacks=[clock],
        )
        trainer.train()
    out.write_text(json.dumps([end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]))


if __name__ == "__main__":
    main()
