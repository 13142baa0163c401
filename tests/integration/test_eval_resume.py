"""A killed evaluation resumes with the remaining prompts, and a finished one is not repeated."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.store.folder import RunFolder
from tests.integration.jobs import SEVENS, write_inputs

pytestmark = pytest.mark.integration

VOLLEY = str(Path(sys.executable).parent / "volley")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path.cwd())}
PROMPTS, N = 32, 4


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose process was killed after it had drawn some samples."""
    inputs = tmp_path_factory.mktemp("inputs")
    write_inputs(inputs)
    (inputs / "job.yaml").write_text(
        yaml.safe_dump(
            {
                "kind": "eval",
                "name": "sevens",
                "model": {"path": "model"},
                "data": {"path": "prompts.jsonl"},
                "scorer": {"kind": "python", "target": SEVENS},
                "sampling": {"n": N, "max_tokens": 400},
                "ks": [1, 4],
                "actors": {"max_num_seqs": N},  # two prompts at a time
            }
        )
    )
    runs = inputs / "runs"
    command = [VOLLEY, "run", str(inputs / "job.yaml"), "--out", str(runs), "--quiet"]
    process = subprocess.Popen(command, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 240
        while not (found := list(runs.glob("*/samples.jsonl"))) or found[0].read_bytes().count(b"\n") < 3 * N:
            assert process.poll() is None, process.returncode
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    return found[0].parent


def resume(folder: Path, code: int = 0) -> str:
    """Resume, which ends with ``code``; returns what it printed."""
    done = subprocess.run(
        [VOLLEY, "resume", str(folder)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return RunFolder(folder).read(name)


def whole(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of prompts that have all their samples."""
    counts = Counter(row["prompt_id"] for row in samples)
    return [row for row in samples if counts[row["prompt_id"]] == N]


def test_existing_samples_are_kept_and_only_the_rest_is_drawn(killed: Path) -> None:
    before = whole(rows(killed, "samples"))
    assert 3 * N <= len(before) < PROMPTS * N
    assert not (killed / "evaluations.jsonl").exists()
    resume(killed)
    after = rows(killed, "samples")
    assert after[: len(before)] == before
    assert Counter((row["prompt_id"], row["number"]) for row in after) == Counter(
        {(f"prompts:{line}", number): 1 for line in range(1, PROMPTS + 1) for number in range(N)}
    )
    (evaluation,) = rows(killed, "evaluations")
    mean = sum(row["reward"] for row in after) / len(after)
    assert evaluation["estimates"][0]["mean"] == pytest.approx(mean)
    assert (evaluation["prompts"], evaluation["n"]) == (PROMPTS, N)


def test_a_finished_evaluation_is_not_resumed_and_keeps_what_it_has(killed: Path) -> None:
    samples, evaluations = ((killed / f"{name}.jsonl").read_bytes() for name in ("samples", "evaluations"))
    (killed / "logs" / "actor-0.log").unlink()
    assert f"{killed} is done" in resume(killed, code=4)
    assert (killed / "samples.jsonl").read_bytes() == samples
    assert (killed / "evaluations.jsonl").read_bytes() == evaluations
    assert not (killed / "logs" / "actor-0.log").exists()
