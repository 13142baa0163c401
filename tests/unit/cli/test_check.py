"""`volley check` and the start of `volley run`: a scorer function is called once, and something is said at once."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from services.cli import local
from services.recording.display import Display
from services.runs.run import prepare
from tests.models import tiny_llama
from tests.unit.cli.commands import Volley
from volley.job import JOB

SCORER = """
import os

def reward(sample, row):
    if sample == "pid": return os.getpid()
    if sample == "first": return ord(sample[99])
    return float(sample == row["anser"])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("check") / "model")


@pytest.fixture
def job(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_checked_scores.py").write_text(SCORER)
    monkeypatch.delitem(sys.modules, "my_checked_scores", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    tree = {
        **{"kind": "rl", "name": "x", "steps": 1, "model": {"path": str(model)}, "data": {"path": "rows.jsonl"}},
        "scorer": {"kind": "python", "target": "my_checked_scores:reward"},
        **{"objective": {"kind": "mean"}, "sampling": {"n": 2, "max_tokens": 4}},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "job.yaml"


def test_a_function_that_raises_is_reported_with_its_traceback(volley: Volley, job: Path) -> None:
    code, out, errors = volley("check", str(job))
    assert code == 1
    assert out == ""
    assert "with prompt rows:1 and an empty answer: my_checked_scores:reward raised KeyError: 'anser' (line 7" in errors
    assert """return float(sample == row["anser"])""" in errors


def test_the_call_is_described_and_made_in_another_process(volley: Volley, job: Path) -> None:
    (job.parent / "my_checked_scores.py").write_text(SCORER.replace("anser", "answer"))
    code, out, errors = volley("check", str(job))
    assert code == 0
    assert errors.splitlines()[0] == f"{job}: checking the job, its data, tokenizer and scorer"
    assert out.splitlines()[0].endswith("was called once: an empty answer to prompt rows:1 gets reward 0")
    (call,) = json.loads(volley("check", str(job), "--answer", "3", "--json")[1])["calls"]
    assert (call["reward"], call["answer"], call["prompt"]) == (1.0, "3", "rows:1")
    (call,) = json.loads(volley("check", str(job), "--answer", "pid", "--json")[1])["calls"]
    assert call["reward"] != os.getpid()


def test_a_run_warns_of_a_function_that_raises(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = yaml.safe_load(job.read_text())
    run = prepare(JOB.validate_python({**tree, "data": {"path": str(job.parent / "rows.jsonl")}}))
    local.warn_of_scorer(run, Display())
    told = capsys.readouterr().out
    assert "warning: scorer: called with prompt rows:1 and an empty answer" in told
    assert "Traceback" in told
