"""The benchmark regression check: what it flags, what it saves, and its exit code."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import quick
from benchmarks.versus_trl.others import run_beside_others
from benchmarks.versus_trl.workloads import WORKLOADS, write_inputs
from tests.chat_models import chat_tokenizer
from tests.models import tiny_llama


def run_quick(monkeypatch: pytest.MonkeyPatch, baseline: Path, ratios: dict[str, float], *options: str) -> None:
    monkeypatch.setattr(quick, "measured", ratios.__getitem__)
    monkeypatch.setattr(sys, "argv", ["quick", *ratios, "--baseline", str(baseline), *options])
    quick.main()


def test_a_loss_over_15_percent_fails_and_is_flagged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = tmp_path / "baseline.json"
    run_quick(monkeypatch, baseline, {"learner": 2.0, "sandbox": 4.0}, "--save")
    assert json.loads(baseline.read_text()) == {"learner": 2.0, "sandbox": 4.0}
    run_quick(monkeypatch, baseline, {"learner": 1.71, "sandbox": 9.0, "objectives": 1.0})
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run_quick(monkeypatch, baseline, {"learner": 1.69, "sandbox": 4.0})
    assert end.value.code == 1
    lost, kept = capsys.readouterr().out.splitlines()[1:]
    assert "LOST" in lost
    assert lost.startswith("learner")
    assert "LOST" not in kept


def test_the_cheapest_ratio_can_be_measured() -> None:
    assert quick.measured("objectives") > 1.2


@pytest.mark.parametrize(("program", "code"), [("print('here')", 0), ("raise SystemExit(3)", 3)])
def test_run_beside_others_returns_the_exit_code(tmp_path: Path, program: str, code: int) -> None:
    log = tmp_path / "log"
    ended, others = run_beside_others([sys.executable, "-c", program], log, 30)
    assert ended == code
    assert others >= 0
    assert log.read_text().strip() == ("here" if code == 0 else "")


def test_a_run_that_does_not_end_is_killed(tmp_path: Path) -> None:
    ended, _ = run_beside_others([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", 0.6)
    assert ended == -9


def test_a_pretrained_model_is_asked_in_its_own_template(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "pretrained", tokenizer=chat_tokenizer())
    folder = tmp_path / "sums"
    folder.mkdir()
    write_inputs(WORKLOADS["sums"], folder, model=model)
    assert (folder / "model").resolve() == model
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert len(set(prompts)) > 32
    assert all("<|im_start|>user" in each and each.endswith("assistant\n") for each in prompts)
