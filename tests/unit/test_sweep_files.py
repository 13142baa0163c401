"""Sweep files: which runs they mean, and what mistakes in them are answered with."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from services.sweeps.spec import Setting, Sweep, load_sweep, slug
from tests.unit.cli.commands import JOB
from volley.errors import JobError
from volley.job import RLJob


def write(folder: Path, **sweep: Any) -> Path:
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({"base": "job.yaml", **sweep}, sort_keys=False))
    return file


def jobs(sweep: Sweep) -> dict[str, RLJob]:
    return {each.name: each.job for each in sweep.members if isinstance(each.job, RLJob)}


def test_a_grid_is_every_combination_with_every_seed_first_seed_first(tmp_path: Path) -> None:
    sweep = load_sweep(write(tmp_path, grid={"optimizer.lr": [0.1, 0.2], "objective.k": [2, 4]}, seeds=[3, 5]))
    found = jobs(sweep)
    assert list(found) == [
        f"lr-{lr}-k-{k}-s{seed}" for seed in (3, 5) for lr, k in ((0.1, 2), (0.1, 4), (0.2, 2), (0.2, 4))
    ]
    job = found["lr-0.2-k-4-s5"]
    assert (job.optimizer.lr, getattr(job.objective, "k", None), job.seed) == (0.2, 4, 5)
    assert job.name == "sweep-lr-0.2-k-4-s5"
    assert list(sweep.groups) == ["lr=0.1 k=2", "lr=0.1 k=4", "lr=0.2 k=2", "lr=0.2 k=4"]
    assert job.model.path == tmp_path / "model", "paths are relative to the job file"


def test_keys_with_the_same_last_part_are_named_in_full(tmp_path: Path) -> None:
    grid = {"sampling.max_tokens": [8], "objective.k": [2], "actors.count": [1, 2], "reward_workers.count": [1]}
    (group, _) = load_sweep(write(tmp_path, grid=grid)).groups
    assert group == "max_tokens=8 k=2 actors.count=1 reward_workers.count=1"


def test_settings_share_nothing_that_one_of_them_changes(tmp_path: Path) -> None:
    """A key within a mapping is set after the mapping, whatever their order, and in this setting alone."""
    mapping = {"kind": "max_at_k", "k": 2}
    grid = {"objective.k": [4, 8], "objective": [mapping]}
    found = jobs(load_sweep(write(tmp_path, grid=grid, seeds=[0])))
    assert [getattr(job.objective, "k", None) for job in found.values()] == [4, 8]


def test_overrides_apply_to_all_and_a_settings_own_keys_win(tmp_path: Path) -> None:
    file = write(tmp_path, list=[{"name": "a"}, {"name": "b", "set": {"steps": 9}}], seeds=[0])
    found = jobs(load_sweep(file, {"steps": 6}))
    assert [job.steps for job in found.values()] == [6, 9]
    assert [each.seed for each in load_sweep(file, seeds=(7,)).members] == [7, 7]


def test_the_start_is_evaluated_by_the_first_run_alone(tmp_path: Path) -> None:
    evaluation = {"data": {"path": "heldout.jsonl"}}
    file = write(tmp_path, grid={"optimizer.lr": [0.1, 0.2]}, start_once=True)
    found = jobs(load_sweep(file, {"evaluation": evaluation}))
    assert [job.evaluation.at_start for job in found.values() if job.evaluation] == [True, *[False] * 5]


def test_a_run_is_named_by_its_own_setting_whatever_else_the_file_has(tmp_path: Path) -> None:
    few = load_sweep(write(tmp_path, list=[{"name": "mean"}, {"name": "max@8"}], seeds=[0]))
    many = load_sweep(write(tmp_path, list=[{"name": name} for name in ("x", "max@8", "mean")], seeds=[4, 0]))
    assert {each.name for each in few.members} == {"mean-s0", "max-8-s0"} <= {each.name for each in many.members}


@given(st.text(min_size=1, max_size=200))
def test_every_name_gives_a_folder_and_a_name_of_a_job(name: str) -> None:
    job = RLJob.model_validate({**JOB, "name": f"{'s' * 24}-{slug(Setting(name=name))}-s999999"})
    assert not slug(Setting(name=name)).startswith(".")
    assert "/" not in job.name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "write either grid: {"),
        ({"grid": {"steps": [1]}, "list": [{"name": "a"}]}, "write either grid: {"),
        ({"grid": {"optimizer.lrr": [1]}}, "unknown key; did you mean optimizer.lr?"),
        ({"grid": {"learning_rate": [1]}}, "unknown key; did you mean optimizer.lr?"),
        ({"grid": {"steps": ["many"]}}, "steps: Input should be a valid integer"),
        ({"grid": {"steps": []}}, "grid.steps: List should have at least 1 item"),
        ({"grid": {"seed": [1, 2]}}, "seed cannot be a key of a setting: write seeds: [0, 1, 2]"),
        ({"grid": {"steps": [1, 1]}}, "the settings 'steps=1' and 'steps=1' would share a folder"),
        ({"list": [{"name": "a b"}, {"name": "a@b"}]}, "the settings 'a b' and 'a@b' would share a folder"),
        ({"grid": {"steps": [1]}, "seeds": [1, 1]}, "seeds: a seed is there twice"),
        ({"grid": {"steps": list(range(1, 5002))}}, "15003 runs are more than 10000"),
        ({"grid": {"steps": [1]}, "seedz": [1]}, "seedz: unknown key; did you mean seeds?"),
        ({"grid": {"steps": [1]}, "optimizer": {"lr": 1}}, "optimizer: is a key of the job: write it into the base"),
        ({"grid": {"steps": [1]}, "report": {"xaxis": "steps"}}, "report.xaxis: unknown key; there are ks, metrics, x"),
        ({"grid": {"steps": [1]}, "name": "a b"}, "name: 'a b' must be at most 24 letters, digits"),
        ({"list": [{"name": "a", "sett": {}}]}, "list.0.sett: unknown key; did you mean set?"),
        ({"grid": {"steps": [1]}, "base": "no.yaml"}, "no.yaml: No such file"),
        ({"grid": {"steps": [1]}, "report": {"x": "divergence"}}, ""),
        (
            {"grid": {"update.kl.logged": [False]}, "report": {"x": "divergence"}},
            "report.x: divergence needs the divergence to be logged: write update.kl.logged: true",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = write(tmp_path, **change)
    if not words:
        assert load_sweep(file).members
        return
    with pytest.raises(JobError) as error:
        load_sweep(file)
    assert words in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("seeds", "given"),
    [
        *((["a"], "'a'"), ([1.5], "1.5"), ([10**6], "1000000"), ([-1], "-1"), ([0, "a", "b"], "'a'"), ([True], "True")),
        *(([], "[]"), (3, "3"), ("a", "'a'"), ({"a": 1}, "{'a': 1}"), (None, "None"), ([[1]], "[1]")),
    ],
    ids=str,
)
def test_wrong_seeds_get_one_sentence(tmp_path: Path, seeds: object, given: str) -> None:
    file = write(tmp_path, grid={"steps": [1]}, seeds=seeds)
    with pytest.raises(JobError) as error:
        load_sweep(file)
    assert str(error.value) == f"{file}: seeds: write whole numbers from 0 to 999999, as in [0, 1, 2], not {given}"


def test_the_same_mistake_is_said_once_and_each_other_one_too(tmp_path: Path) -> None:
    with pytest.raises(JobError) as error:
        load_sweep(write(tmp_path, grid={"objective.k": [2, 99, 3], "sampling.n": [4, 8]}))
    assert len(str(error.value).splitlines()) == 2


def test_a_missing_base_says_what_to_write(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("grid: {steps: [1]}")
    with pytest.raises(JobError, match=r"base: required, but missing: write base: job\.yaml"):
        load_sweep(file)
