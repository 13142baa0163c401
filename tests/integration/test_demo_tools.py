"""``make demo-tools QUICK=1`` with a tiny model in place of the pretrained one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chat_models import chat_tokenizer
from tests.models import tiny_llama

pytestmark = pytest.mark.integration


@pytest.mark.timeout(900)
def test_the_demo_runs_all_its_jobs(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    model = tiny_llama(tmp_path / "model", tokenizer=chat_tokenizer(), max_position_embeddings=1024)
    options = ["--quick", "--folder", str(folder), "--model", str(model)]
    command = [sys.executable, "-m", "examples.tool_use.demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((folder / "results.json").read_text())
    assert list(results) == ["pretrained", "trained"]
    for row in results.values():
        assert (row["prompts"], row["n"]) == (4, 8)
    mean, low, high = results["trained"]["calling"]
    assert 0 <= low <= mean <= high <= 1
    assert (folder / "learning_curves.png").exists()

    def first_sample(run: str) -> dict[str, Any]:
        first: dict[str, Any] = json.loads((folder / run / "samples.jsonl").read_text().splitlines()[0])
        return first

    assert "Tools:" in first_sample("eval-trained")["calls"][0]["context"]  # the template is exported with the model
    assert "calls" not in first_sample("eval-pretrained")
