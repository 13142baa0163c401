"""The commands of docs/first-gpu-run.md run on a CPU, with a tiny model, before anybody has a GPU to lose time on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


def test_sections_end_with_a_table_and_the_learner_is_exact(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.learner", "exactness", "publishing", "group"]
    command += ["--device", "cpu", "--size", "tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["what"]: row["figure"] for row in json.loads((tmp_path / "learner.json").read_text())["rows"]}
    assert all(what in done.stdout and what in (tmp_path / "learner.md").read_text() for what in rows)
    apart = re.match(r"log-prob (\S+), gradients", rows["chunked log-probs against full float32 logits"])
    assert apart is not None
    assert float(apart[1]) < 1e-5
    steps = re.match(r"weights apart by (\S+) at most, moved by (\S+);", rows[STEPS])
    assert steps is not None
    assert float(steps[1]) < 0.01 * float(steps[2]), "ZeRO-3 makes the updates of plain PyTorch"
    assert any("blocked before the next step" in what for what in rows)


def test_the_whole_command_measures_engine_runs_and_trl(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.all", "generation", "whole_run", "two_devices", "versus_trl"]
    command += ["--device", "cpu", "--size", "tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert [row["section"] for row in rows] == ["generation"] * 5 + ["whole run"] * 4 + ["two devices"] * 2 + ["TRL"]
    figures = [row["figure"] for row in rows]
    apart = re.match(r"apart by (\S+) in the mean, (\S+) at most", figures[8])
    assert apart is not None
    assert float(apart[2]) < 1e-4
    assert "0% of them by the weight group" in rows[6]["what"]
    assert "100% of them by the weight group" in rows[10]["what"]
    assert re.match(r"[\d.]+ samples/s; Volley has [\d.]+ times as many", figures[11])


STEPS = "3 steps of ZeRO-3 in float32 against plain PyTorch (tiny)"


def test_a_section_that_fails_is_a_line_and_the_command_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.learner", "group", "--device", "cpu", "--size", "tiny"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--limit", "0.1"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert re.search(r"group +\| FAILED +\| no end within 0\.1 s", done.stdout)
