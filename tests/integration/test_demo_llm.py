"""``make demo-llm QUICK=1`` with a tiny model in place of the pretrained one, and its resumption."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import character_tokenizer, tiny_llama

pytestmark = pytest.mark.integration

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def demo(folder: Path, model: Path) -> str:
    command = [sys.executable, "-m", "examples.smollm2.demo", "--quick", "--folder", str(folder), "--model", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(900)
def test_the_demo_runs_and_continues_where_it_was(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()  # digits among few characters: a random model is right now and then
    tokenizer.chat_template = TEMPLATE
    model, folder = tiny_llama(tmp_path / "model", tokenizer=tokenizer), tmp_path / "demo"
    output = demo(folder, model)
    rows = json.loads((folder / "results.json").read_text())
    assert list(rows) == ["start", "mean", "max@8", "MaxRL"]
    assert all(row["prompts"] == 8 and row["n"] == 16 for row in rows.values())
    assert all((folder / name).exists() for name in ("pass_at_k.png", "learning_curves.png"))
    assert "samples of the last logged step" in output

    summary = folder / "MaxRL" / "summary.json"  # as if the demo had been killed in its last run
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "state": "running"}))
    again = demo(folder, model)
    assert "mean: done earlier" in again
    assert "max-at-8: done earlier" in again
    assert "MaxRL: continues after step 2" in again
    assert json.loads((folder / "results.json").read_text())["mean"] == rows["mean"]
