"""A job's runtime environment: read, checked for secrets, and passed to `ray.init`."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from reward_servers.scorers import check_scorer
from services.api.jobs import refusals
from services.api.settings import ApiSettings
from services.jobs.job_file import dump_job, load_job
from services.jobs.runtime_env import code_is_here, for_ray, make_importable
from volley.errors import JobError
from volley.job import RLJob
from volley.runtime_env import RuntimeEnvSpec
from volley.scoring import PythonScorer

JOB: dict[str, Any] = {
    "kind": "rl",
    "name": "small",
    "steps": 2,
    "model": {"path": "model"},
    "data": {"path": "train.jsonl"},
    "scorer": {"kind": "python", "target": "rewards_of_mine:score"},
    "objective": {"kind": "mean"},
}


def job_with(folder: Path, **runtime_env: Any) -> RLJob:
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "runtime_env": runtime_env}))
    job = load_job(folder / "job.yaml")
    assert isinstance(job, RLJob)
    return job


def test_folders_are_relative_to_the_job_file_and_uris_are_unchanged(tmp_path: Path) -> None:
    job = job_with(tmp_path, working_dir="code", py_modules=["lib/mine", "https://host/a.zip"], pip=["emoji==2.0"])
    assert for_ray(job.runtime_env) == {
        "working_dir": str(tmp_path / "code"),
        "py_modules": [str(tmp_path / "lib/mine"), "https://host/a.zip"],
        "pip": ["emoji==2.0"],
    }
    (tmp_path / "again.yaml").write_text(dump_job(job))
    assert load_job(tmp_path / "again.yaml") == job
    assert for_ray(None) == {}


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "db_password", "AUTH", "AWS_SECRET_ACCESS_KEY"])
def test_a_secret_is_rejected_with_advice_where_to_put_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"env_vars.{name} looks like a secret.*environment of the cluster"):
        RuntimeEnvSpec(env_vars={name: "x"})


def test_names_that_only_resemble_secrets_are_accepted() -> None:
    env_vars = {"TOKENIZERS_PARALLELISM": "false", "MONKEY": "1", "AUTHOR": "me"}
    assert for_ray(RuntimeEnvSpec(env_vars=env_vars)) == {"env_vars": env_vars}


@pytest.mark.parametrize(
    "spec", [{"pip": ["git+https://me:pass@host/x"]}, {"working_dir": "https://token@host/code.zip"}]
)
def test_a_password_in_a_uri_is_rejected(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="user name or password"):
        RuntimeEnvSpec.model_validate(spec)


def test_folders_are_importable_when_the_job_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "rewards_of_mine.py").write_text("def score(sample, row):\n    return 1.0\n")
    job = job_with(tmp_path, working_dir="code")
    assert job.scorer is not None
    with pytest.raises(JobError, match="does not import"):
        check_scorer(job.scorer, [])
    make_importable(job.runtime_env)
    check_scorer(job.scorer, [], code_is_here=code_is_here(job.runtime_env))
    sys.modules.pop("rewards_of_mine")


def test_code_installed_later_is_not_looked_for_beforehand(tmp_path: Path) -> None:
    job = job_with(tmp_path, working_dir="s3://bucket/code.zip")
    make_importable(job.runtime_env)
    assert not code_is_here(job.runtime_env)
    check_scorer(PythonScorer(target="nowhere_yet:score"), [], code_is_here=False)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="code is not a folder on this machine; write one that the driver can see"):
        make_importable(job_with(tmp_path, working_dir="code").runtime_env)


def test_a_server_accepts_a_runtime_environment_only_if_all_code_is_allowed(tmp_path: Path) -> None:
    tree = job_with(tmp_path, pip=["emoji"]).model_dump(mode="json")
    assert [
        each.pointer for each in refusals(tree, ApiSettings(redis_url="redis://x", allow_code=("rewards_of_mine",)))
    ] == ["/job/runtime_env"]
    assert list(refusals(tree, ApiSettings(redis_url="redis://x", allow_code=("*",)))) == []


def test_a_rejected_scorer_names_the_option_that_allows_it() -> None:
    scorer = {"scorer": {"kind": "python", "target": "my_scores:reward"}}
    (refused,) = refusals(scorer, ApiSettings(redis_url="redis://x"))
    assert refused.detail.endswith("start the service with: volley up --import-from DIR --allow-code my_scores")
