"""A small rl job on a random model, for the sections that need the whole stack."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import Setting
from benchmarks.startup import LAUNCH
from services.store.folder import RunFolder
from tests.models import character_tokenizer

WARM = 3  # steps that are not timed
STEPS = 8


def coin(sample: str, row: dict[str, Any]) -> float:
    """A reward by chance, since the samples of a random model are all alike."""
    return float(random.random() < 0.5)


def shape(setting: Setting) -> dict[str, int]:
    """Prompts per step, samples per prompt, tokens per sample."""
    return {"prompts": 4, "n": 4, "tokens": 16} if setting.small else {"prompts": 16, "n": 8, "tokens": 256}


def inputs(setting: Setting) -> tuple[Path, Path]:
    """The model with a tokenizer, and a file of prompts."""
    model, prompts = setting.model(), setting.folder / "prompts.jsonl"
    if not prompts.exists():
        character_tokenizer().save_pretrained(model)
        prompts.write_text("".join(json.dumps({"prompt": f"{i}+{7 * i}="}) + "\n" for i in range(256)))
    return model, prompts


def run_job(setting: Setting, name: str, *, gpus: tuple[float, float], **changes: Any) -> RunFolder:
    """Run the job with `volley run`; returns its run folder.

    Args:
        gpus: for the actor and for the learner's rank.

    Raises:
        RuntimeError: the run failed.
    """
    model, prompts = inputs(setting)
    sizes = shape(setting)
    job = {
        "kind": "rl",
        "name": name,
        "model": {"path": str(model), "dtype": "bfloat16" if setting.cuda else "float32"},
        "data": {"path": str(prompts)},
        "scorer": {"kind": "python", "target": "benchmarks.gpu.jobs:coin"},
        "objective": {"kind": "max_at_k", "k": 4},
        "steps": STEPS,
        "prompts_per_step": sizes["prompts"],
        "sampling": {"n": sizes["n"], "max_tokens": sizes["tokens"]},
        "optimizer": {"lr": 1e-6},
        "actors": {"gpus": gpus[0], "kv_cache_gb": 8 if setting.cuda else 0.2},
        "learner": {"gpus_per_rank": gpus[1], "verify_weights": True},
        "checkpoint": {"every": None},
        "samples_kept": 0,
        **changes,
    }
    file = setting.folder / f"{name}.json"
    file.write_text(json.dumps(job))
    runs = setting.folder / f"{name}-runs"
    done = subprocess.run([*LAUNCH, "run", str(file), "--out", str(runs), "--quiet"], check=False)
    if done.returncode:
        problems = [json.loads(summary.read_text())["problem"] for summary in runs.glob("*/summary.json")]
        raise RuntimeError(f"volley run ended with {done.returncode}: {' '.join(problems) or 'the job was refused'}")
    (folder,) = runs.iterdir()
    return RunFolder.open(folder)[0]


def mean(rows: list[dict[str, Any]], metric: str) -> float:
    """Over the steps after those that warm up."""
    timed = rows[WARM:]
    return sum(float(row[metric]) for row in timed) / len(timed)


def speed(rows: list[dict[str, Any]]) -> float:
    """Samples per second, whole steps, after those that warm up."""
    samples_s = [float(row["samples_per_second"]) for row in rows[WARM:]]
    return len(samples_s) / sum(1 / each for each in samples_s)
