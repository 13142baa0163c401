"""The command line: quick help, one clear line for bad input, exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

VOLLEY = str(Path(sys.executable).parent / "volley")
# The example plug-in's job needs the plug-in installed; tests/unit/plugins checks it.
STUDIES = set(Path("benchmarks/reproductions").glob("*.yaml")) - {Path("benchmarks/reproductions/job.yaml")}
SWEEPS = sorted([*Path("examples").rglob("sweep.yaml"), *Path("examples").rglob("rates.yaml"), *STUDIES])
SHIPPED = sorted(set(Path("examples").rglob("*.yaml")) - set(Path("examples/plugin").rglob("*")) - set(SWEEPS))


def volley(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([VOLLEY, *arguments], capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


def test_help_answers_in_under_half_a_second() -> None:
    def seconds() -> float:
        """CPU seconds, which other load on the machine changes little."""
        before = os.times()
        assert "submit" in volley("--help").stdout
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    assert min(seconds() for _ in range(3)) < 0.5


def test_doctor_reports_the_host() -> None:
    done = volley("doctor")
    assert "vllm" in done.stdout
    assert "embedded Redis" in done.stdout


def test_schema_is_json_schema_of_every_kind() -> None:
    schema = json.loads(volley("schema").stdout)
    assert set(schema["discriminator"]["mapping"]) == {"rl", "sft", "rft", "eval"}


@pytest.mark.parametrize("file", SHIPPED, ids=str)
def test_every_shipped_job_file_parses(file: Path) -> None:
    from services.jobs.job_file import load_job

    assert load_job(file).name


@pytest.mark.parametrize("file", SWEEPS, ids=str)
def test_every_shipped_sweep_parses(file: Path) -> None:
    from services.sweeps.spec import load_sweep

    assert load_sweep(file).members


@pytest.mark.parametrize("file", sorted(set(Path("examples").rglob("*.yaml")) - set(SWEEPS)), ids=str)
def test_every_shipped_job_file_says_where_to_get_its_model(file: Path) -> None:
    head, job = file.read_text().split("\nkind:", 1)
    place = re.search(r"model: *\{?\s*path: (\S+?)[,}\s]", job)
    assert place is not None
    folder, source = {
        "countdown": ("demo", "`make demo`"),
        "smollm2": ("demo-llm", "`make demo-llm`"),
        "tool_use": ("demo-tools", "`make demo-tools`"),
    }.get(file.parts[1], ("models", "hf download "))
    assert place[1].startswith(f"../../{folder}/")
    assert source in head


def test_check_prints_the_preparation_comment_if_a_file_is_missing(job: Path) -> None:
    file = job / "job.yaml"
    file.write_text("# `make x` makes the data.\n#   or so\n" + file.read_text() + "# the end\n")
    there = volley("check", str(file))
    assert "train.jsonl:2" in there.stderr
    assert "make x" not in there.stderr
    (job / "train.jsonl").unlink()
    gone = volley("check", str(file))
    assert gone.returncode == 1
    assert gone.stderr.endswith("job.yaml begins:\n# `make x` makes the data.\n#   or so\n")


def test_job_files_exist() -> None:
    assert len(SHIPPED) >= 4


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 2=", "numbers": [1, 2], "target": 3}\n{"prompt": }\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump(
            {
                "kind": "rl",
                "name": "x",
                "steps": 1,
                "model": {"path": "model"},
                "data": {"path": "train.jsonl"},
                "scorer": {"kind": "countdown"},
                "objective": {"kind": "mean"},
            }
        )
    )
    return tmp_path


def failed(job: Path, *arguments: str) -> str:
    """The error line of a ``volley run`` that fails before it starts anything."""
    done = volley("run", "job.yaml", *arguments, cwd=job)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    assert not (job / "runs").exists()
    return done.stderr.strip()


def test_a_malformed_row_is_reported_and_nothing_starts(job: Path) -> None:
    error = failed(job)
    assert f"{job}/train.jsonl:2: not JSON" in error
    assert len(error.splitlines()) == 1


def test_invalid_jobs_are_reported_before_anything_starts(job: Path) -> None:
    (job / "train.jsonl").write_text('{"prompt": "1 2=", "numbers": [1, 2], "target": 3}\n')
    assert "no config.json there" in failed(job)
    assert "No such file" in failed(job, "--set", "data.path=nowhere.jsonl")
    assert "unknown key" in failed(job, "--set", "stepz=3")
    assert "k" in failed(job, "--set", "objective.kind=max_at_k", "--set", "objective.k=99")


def test_a_row_that_the_scorer_cannot_use_is_reported(job: Path) -> None:
    (job / "train.jsonl").write_text('{"prompt": "1 2=", "target": 3}\n')
    assert "train:1" in failed(job)


def test_an_empty_folder_is_no_model_and_no_run(tmp_path: Path) -> None:
    done = volley("eval", str(tmp_path), "--data", "x.jsonl", "--scorer", "math")
    assert done.returncode == 1
    assert done.stderr.endswith("is neither a model folder (no config.json) nor a run folder (no job.yaml)\n")


def test_chat_is_about_the_data_given(tmp_path: Path) -> None:
    done = volley("eval", str(tmp_path), "--chat")
    assert done.returncode == 1
    assert "--chat applies to the prompts of --data: pass --data" in done.stderr


def test_eval_says_what_it_checks_of_a_job_with_a_program(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    program = "rollout={kind: program, target: 'my_agent:solve'}"
    done = volley("eval", str(tmp_path), "--data", "x.jsonl", "--scorer", "math", "--set", program)
    assert "checking the job, its data, tokenizer, program and scorer" in done.stderr
    assert "No such file" in done.stderr


def test_the_version_is_printed() -> None:
    assert re.fullmatch(r"volley \d+\.\d+\.\d+\n", volley("--version").stdout)
