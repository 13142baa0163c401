"""`volley sweep`: what it checks, prints and writes; the runs are those of a stand-in for the service."""

import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.jobs.job_file import load_job
from services.store.folder import RunFolder
from services.sweeps.spec import load_sweep
from tests.unit.cli.commands import JOB, Volley
from tests.unit.fake_api import FakeApi

EVALUATION = {"data": {"path": "heldout.jsonl"}}


@pytest.fixture
def file(tmp_path: Path, job_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    job_file.write_text(yaml.safe_dump({**JOB, "evaluation": EVALUATION}))
    file = tmp_path / "ks.yaml"
    sweep = {"base": job_file.name, "grid": {"objective.k": [2, 4]}, "seeds": [0, 1], "at_once": 2}
    file.write_text(yaml.safe_dump(sweep))
    return file


def finish(file: Path, folder: Path, *, leave_out: int = 0, state: str = "done") -> None:
    """Write the run folders of a sweep as finished runs leave them."""
    members = load_sweep(file).members
    for place, member in enumerate(members[: len(members) - leave_out]):
        run = RunFolder.at(folder / "ks" / member.name, member.job)
        run.write_summary({"state": state if place == 0 else "done", "problem": "out of memory"})
        better = 0.1 * ("4" in member.group)
        run.append(
            "metrics",
            [{"step": step, "reward_mean": 0.1 * step + better + 0.01 * member.seed} for step in range(4)],
        )
        for version in (0, 4):
            estimates = [{"k": k, "mean": 0.1 * k + 0.02 * member.seed + better * (version > 0)} for k in (1, 8)]
            run.append("evaluations", [{"version": version, "estimates": estimates}])


def test_a_sweep_that_is_complete_prints_its_table_and_writes_all(volley: Volley, file: Path, tmp_path: Path) -> None:
    finish(file, tmp_path / "runs")
    code, out, err = volley("sweep", str(file))
    assert (code, err) == (0, "")
    table = [line.split() for line in out.splitlines() if line.startswith(("setting", "start", "k="))]
    half = 12.706 * 0.01  # t for one degree of freedom, times the standard error of two seeds 0.02 apart
    assert table == [
        ["setting", "runs", "pass@1", "pass@8", "reward_mean"],
        ["start", "0.110", "±0.018", "0.810", "±0.018"],
        ["k=2", "2", "0.110", f"±{half:.3f}", "0.810", f"±{half:.3f}", "0.155", "±0.064"],
        ["k=4", "2", "0.210", f"±{half:.3f}", "0.910", f"±{half:.3f}", "0.255", "±0.064"],
    ]
    folder = tmp_path / "runs" / "ks"
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "figure.svg").read_text()[:1000]
    assert max(map(len, (folder / "table.txt").read_text().splitlines())) <= 80
    code, out, _ = volley("sweep", str(file), "--json")
    found = json.loads(out)
    assert found == json.loads((folder / "results.json").read_text())
    assert [(group["name"], group["set"], group["seeds"]) for group in found["groups"]] == [
        ("k=2", {"objective.k": 2}, [0, 1]),
        ("k=4", {"objective.k": 4}, [0, 1]),
    ]
    assert found["groups"][1]["results"]["pass@1"]["values"] == pytest.approx([0.2, 0.22])
    assert [run["state"] for run in found["runs"]] == ["done"] * 4


def test_failed_runs_are_listed_and_the_others_compared(volley: Volley, file: Path, tmp_path: Path) -> None:
    finish(file, tmp_path / "runs", state="failed")
    code, out, _ = volley("sweep", str(file))
    assert code == 1
    assert "4 runs: 3 done, 0 to resume, 0 to start, 1 failed" in out
    assert "failed: k-2-s0: out of memory" in out
    assert "--retry makes failed runs again" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("k=")] == [["k=2", "1"], ["k=4", "2"]]


def test_many_columns_and_long_names_fit_80_columns(
    volley: Volley, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "a setting with a name of many words that says everything"
    ks = [1, 2, 4, 8, 16, 32, 64]
    for name in ("short", long):
        sweep = yaml.safe_load(file.read_text()) | {"list": [{"name": name}], "name": f"w{len(name)}"}
        sweep.pop("grid", None)
        file.write_text(yaml.safe_dump(sweep))
        for member in load_sweep(file).members:
            run = RunFolder.at(tmp_path / "runs" / load_sweep(file).name / member.name, member.job)
            run.write_summary({"state": "done", "problem": ""})
            run.append("metrics", [{"step": 0, "reward_mean": 0.1}])
            run.append("evaluations", [{"version": 4, "estimates": [{"k": k, "mean": 0.1} for k in ks]}])
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "80")
        code, out, _ = volley("sweep", str(file), "--quiet")
        assert code == 0
        text = (tmp_path / "runs" / load_sweep(file).name / "table.txt").read_text()
        assert max(map(len, text.splitlines())) <= 80
        assert all(f"pass@{k}" in out and f"pass@{k}" in text for k in ks)


def test_a_check_starts_nothing_and_says_which_setting_is_wrong(volley: Volley, file: Path, tmp_path: Path) -> None:
    code, _, err = volley("sweep", str(file), "--check")
    assert code == 1
    assert f"volley: {file}: k=2: " in err
    assert "heldout.jsonl" in err or "train.jsonl" in err or "model" in err
    assert not list((tmp_path / "runs" / "ks").glob("*/job.yaml"))
    code, _, err = volley("sweep", str(file), "--set", "stepz=3")
    assert code == 1
    assert "stepz: unknown key; did you mean steps?" in err


def submitted(api: FakeApi) -> list[dict[str, Any]]:
    return [body for method, path, _, body in api.seen if (method, path) == ("POST", "/v1/runs")]


def test_the_service_makes_the_runs_and_a_repeated_sweep_finds_them(api: FakeApi, volley: Volley, file: Path) -> None:
    api.ends = {each.job.name: "done" for each in load_sweep(file).members} | {"ks-k-4-s1": "failed"}
    code, out, err = volley("sweep", str(file), "--submit")
    assert (code, err) == (1, "")
    assert "failed: k-4-s1: no signal" in out
    tags = [body["tags"] for body in submitted(api)]
    assert {(each["sweep"], each["group"], each["seed"], each["member"]) for each in tags} == {
        ("ks", f"k={k}", str(seed), f"k-{k}-s{seed}") for k in (2, 4) for seed in (0, 1)
    }
    keys = [
        headers["idempotency-key"] for method, path, headers, _ in api.seen if (method, path) == ("POST", "/v1/runs")
    ]
    assert len(set(keys)) == 4
    assert "0.500" in out, "pass@8, as the service gave it"
    code, out, _ = volley("sweep", str(file), "--submit")
    assert "4 runs: 3 done, 0 to resume, 0 to start, 1 failed" in out
    assert len(submitted(api)) == 4
    assert volley("sweep", str(file), "--submit", "--retry")[0] == 0
    assert len(submitted(api)) == 4
    assert "/v1/runs/ks-k-4-s1-1/resume" in [path for _, path, _, _ in api.seen]


def test_an_interruption_says_that_the_runs_of_a_service_go_on(
    api: FakeApi, volley: Volley, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(work: Coroutine[Any, Any, None], stop: object) -> None:
        work.close()
        raise KeyboardInterrupt

    monkeypatch.setattr("services.signals.run_in_foreground", interrupted)
    words = "volley: interrupted: repeat the command to continue"
    code, _, err = volley("sweep", str(file), "--submit")
    assert (code, err.splitlines()[0]) == (130, f"{words}; the runs that it submitted go on in the service")
    assert volley("sweep", str(file))[2].splitlines()[0] == words


def test_runs_of_another_job_in_the_service_are_not_taken_for_the_sweeps(
    api: FakeApi, volley: Volley, file: Path, job_file: Path
) -> None:
    member = load_sweep(file).members[0]
    other = load_job(job_file, {"steps": 9, "name": member.job.name, "objective.k": 2})
    view = api.add("other-1", state="running")
    view["record"] |= {"job": other.model_dump(mode="json"), "tags": {"sweep": "ks", "member": member.name}}
    code, _, err = volley("sweep", str(file), "--submit")
    assert code == 1
    assert "k-2-s0: steps was 9, is 4" in err
    assert submitted(api) == []
