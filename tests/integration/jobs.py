"""A job that real stacks learn within seconds, and how tests run jobs."""

import json
from pathlib import Path
from typing import Any

import yaml

from services.jobs.job_file import load_job
from services.recording.display import Display
from services.runs.run import Result, prepare, run_on
from services.stack.ephemeral import Stack
from services.store.folder import RunFolder
from tests.models import tiny_llama

SEVENS = "tests.integration.scorers:share_of_sevens"
SLOW_SEVENS = "tests.integration.scorers:slow_share_of_sevens"
PROMPTS = 2  # of each step of an unhurried job


def rl_job(folder: Path, **changes: Any) -> dict[str, Any]:
    """Learn to write sevens: an untrained model can, within a few steps."""
    return {
        "kind": "rl",
        "name": "sevens",
        "seed": 5,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl")},
        "scorer": {"kind": "python", "target": SEVENS},
        "objective": {"kind": "max_at_k", "k": 4},
        "steps": 16,
        "prompts_per_step": 8,
        "max_lag": 0,
        "sampling": {"n": 8, "max_tokens": 8, "seeded": True},
        "optimizer": {"lr": 3e-3},
        "actors": {"max_num_seqs": 64},
        "learner": {"verify_weights": True},
        "evaluation": {
            "data": {"path": str(folder / "prompts.jsonl")},
            "sampling": {"n": 8, "max_tokens": 8},
            "ks": [1, 8],
        },
        **changes,
    }


def unhurried_job(folder: Path, **changes: Any) -> dict[str, Any]:
    """Four small steps a second, for a test that needs the run to go on while other things happen to it.

    At its own speed the run would take the cores from what the test waits for.
    """
    settings = {
        "prompts_per_step": PROMPTS,
        "scorer": {"kind": "python", "target": SLOW_SEVENS},
        "max_lag": 1,
        "evaluation": None,
        "optimizer": {"lr": 1e-6},
    }
    return rl_job(folder, **{**settings, **changes})


def write_inputs(folder: Path) -> None:
    """A model and prompts for `rl_job`."""
    tiny_llama(folder / "model")
    rows = [{"prompt": f"{a} {b}="} for a in range(1, 9) for b in range(1, 5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


async def run_job(stack: Stack, parent: Path, job: dict[str, Any]) -> Result:
    """Run the job on the stack, in a folder of its own in ``parent / "runs"``."""
    file = parent / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    spec = load_job(file)
    return await run_on(stack, prepare(spec), RunFolder.create(parent / "runs", spec), Display(quiet=True))
