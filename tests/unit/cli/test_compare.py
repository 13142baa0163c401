"""`volley compare`, and what `volley eval` says of k and of the version."""

import json
from pathlib import Path

import pytest

from services.cli.models import _ks, _model_path, eval_job
from services.jobs.job_file import load_job
from services.store.folder import RunFolder
from tests.unit.cli.commands import Volley
from tests.unit.fake_api import FakeApi
from volley.errors import JobError
from volley.job import EvalJob


@pytest.fixture
def folder(tmp_path: Path, job_file: Path) -> RunFolder:
    folder = RunFolder.at(tmp_path / "runs" / "sevens-local", load_job(job_file))
    folder.write_summary({"state": "done", "problem": ""})
    folder.append("metrics", [{"step": step, "reward_mean": 0.5, "pass_at_8": 0.75, "kl_k1": 0.01} for step in (0, 1)])
    estimates = [{"k": k, "mean": k / 16, "low": k / 20, "high": k / 12} for k in (1, 8)]
    folder.append("evaluations", [{"version": version, "estimates": estimates} for version in (0, 2)])
    return folder


def test_runs_of_the_service_and_folders_stand_side_by_side(api: FakeApi, volley: Volley, folder: RunFolder) -> None:
    api.add("sevens-1", state="running", step=3, steps=9)
    code, out, _ = volley("compare", "sevens-1", str(folder.path))
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert lines[1:3] == [
        ["1", "sevens-1", "rl", "running"],
        ["2", "sevens-local", "rl", "max_at_k", "k=8", "done"],
    ]
    table = {line[0]: line[1:] for line in lines[4:] if line}
    assert table["1"] == ["2"]
    assert table["step"] == ["3/9", "2/4"]
    assert table["evaluated"] == ["version", "3", "2"]
    assert table["pass@1"] == ["0.062", "(0.05-0.08)"], "the other run has no estimate for k = 1"
    assert table["pass@8"] == ["0.500", "(0.40-0.60)", "0.500", "(0.40-0.67)"]
    assert table["reward_mean"] == ["0.25", "0.5"]
    found = json.loads(volley("compare", "sevens-1", str(folder.path), "--json")[1])
    assert [(run["id"], run["evaluation"]["version"]) for run in found] == [("sevens-1", 3), ("sevens-local", 2)]


def test_intervals_are_left_out_where_they_do_not_fit(
    api: FakeApi, volley: Volley, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    assert "(0.40-0.67)" in volley("compare", *[str(folder.path)] * 2)[1]
    out = volley("compare", *[str(folder.path)] * 4)[1]
    assert "(0.40-0.67)" not in out
    assert next(line for line in out.splitlines() if line.startswith("pass@8")).split()[1:] == ["0.500"] * 4


def test_k_above_n_is_left_out_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    assert _ks(None, 24) == [1, 2, 4, 8, 16]
    assert capsys.readouterr().err == ""
    assert _ks("1,8,32,64", 16) == [1, 8]
    assert capsys.readouterr().err == (
        "note: left out, because k = 32, 64 needs more than n = 16 samples per prompt: pass -n 64\n"
    )
    with pytest.raises(JobError, match=r"--k 32: k = 32 needs more than n = 16 samples per prompt: pass -n 32"):
        _ks("32", 16)


def test_an_evaluation_of_a_run_states_the_steps_it_was_trained_for(folder: RunFolder) -> None:
    folder.model.mkdir()
    (folder.model / "config.json").write_text("{}")
    path, version = _model_path(Path("unused"), folder, None)
    assert (path, version) == (folder.model, 2)
    job = eval_job(path, folder, {"version": version, "ks": [1]}, {})
    assert isinstance(job, EvalJob)
    assert job.version == 2
    exported = folder.path / "exports" / "step-1"
    exported.mkdir(parents=True)
    (folder.checkpoints / "step-1").mkdir()
    assert _model_path(Path("unused"), folder, 1) == (exported, 1)
    assert _model_path(folder.model, None, None) == (folder.model, None)
