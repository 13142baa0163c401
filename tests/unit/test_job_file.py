from pathlib import Path
from typing import Any

import pytest
import yaml

from services.jobs.job_file import dump_job, load_job, parse_overrides
from volley.errors import JobError
from volley.job import JOB, RLJob

SMALL: dict[str, Any] = {
    "kind": "rl",
    "name": "small",
    "steps": 2,
    "model": {"path": "model"},
    "data": {"path": "train.jsonl"},
    "scorer": {"kind": "countdown"},
    "objective": {"kind": "max_at_k", "k": 8},
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return path


def test_paths_are_taken_from_the_job_file_and_the_resolved_job_reads_back(tmp_path: Path) -> None:
    job = load_job(write(tmp_path))
    assert isinstance(job, RLJob)
    assert job.model.path == tmp_path / "model"
    assert job.slots == 64
    assert JOB.validate_python(yaml.safe_load(dump_job(job))) == job


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stepz": 3}, "stepz: unknown key; did you mean steps?"),
        ({"learner": {"rank": 2}}, "learner.rank: unknown key; did you mean learner.ranks?"),
        ({"objective": {"kind": "max_at_k", "k": 17}}, "k"),
        ({"sampling": {"n": 4}}, "k"),
        ({"learner": {"ranks": 64}}, "a group is never split over ranks"),
        (
            {"learner": {"ranks": 128, "sequence_parallel": 2}},
            "learner.ranks 128 / sequence_parallel 2 > prompts_per_step",
        ),
        ({"objective": {"kind": "max_at_k", "k": 8, "companion_weights": "exact"}}, "{kind: sequence}"),
        ({"objective": {"kind": "max_at_k", "k": 8, "companion_weights": "exact", "center": True}}, "center: false"),
        (
            {
                "objective": {"kind": "mean"},
                "update": {"value_model": {}},
                "schedule": {"stages": [{"at": 5, "set": {"kind": "maxrl"}}]},
            },
            "value_model: null",
        ),
        ({"steps": 0}, "steps: Input should be greater than or equal to 1, got 0"),
        ({"kind": "magic"}, "kind"),
        ({"scorer": {"kind": "nobody"}}, "scorer"),
        ({"name": "../x"}, "name"),
        (
            {"evaluation": {"data": {"path": "x"}, "sampling": {"n": 8}, "ks": [1, 16]}},
            "raise sampling.n to 16 or remove them",
        ),
        (
            {"evaluation": {"data": {"path": "x"}, "sampling": {"n": 8}, "ks": [1], "weights": {1: 1, 16: 1}}},
            "weights [16] of evaluation are not in 1..n=8: raise sampling.n to 16 or remove them",
        ),
        (
            {"evaluation": {"data": {"path": "x"}, "weights": "harmonic"}},
            "evaluation.weights: 'harmonic' is not a mapping of weights: write a mapping",
        ),
        (
            {
                "objective": {"kind": "max_at_k", "weights": "harmonic", "order": 12},
                "evaluation": {"data": {"path": "x"}, "sampling": {"n": 8}, "ks": [1]},
            },
            "the objective's weights reach k=12, but evaluation.sampling.n is 8: raise it to 12 or write "
            "evaluation.weights",
        ),
        ({"objective": {"kind": "max_at_k", "k": 8, "weights": {1: 0.5}}}, "remove k, or write k: 8 without weights"),
        ({"objective": {"kind": "max_at_k", "weights": {1: 0.5, 99: 1}}}, "remove the weights above n or raise n"),
        ({"objective": {"kind": "best_of_k", "k": 8}}, "scorer kind: countdown gives none: write kind: max_at_k, or"),
        (
            {
                "objective": {"kind": "best_of_k", "k": 8},
                "scorer": {"kind": "sum", "terms": [{"scorer": {"kind": "exact"}}, {"scorer": {"kind": "code"}}]},
            },
            "scorer kind: sum gives none",
        ),
        (
            {
                "objective": {"kind": "best_of_k", "k": 8},
                "scorer": None,
                "rollout": {"kind": "program", "target": "a:b"},
            },
            "a job without scorer gives none: write kind: max_at_k, or a scorer of kind python",
        ),
        ({"objective": {"kind": "maj_at_k", "k": 8}, "scorer": {"kind": "code"}}, "kind: code extracts no answers"),
        (
            {
                "objective": {"kind": "maj_at_k", "k": 8},
                "scorer": {"kind": "sum", "terms": [{"scorer": {"kind": "http", "url": "http://judge/"}}]},
            },
            "kind: sum extracts no answers: write kind: max_at_k, or a scorer such as exact",
        ),
        ({"actors": {"max_count": 10**9}}, "actors.max_count"),
        ({"learner": {"ranks": 10**6}}, "learner.ranks"),
        ({"actors": {"cpus": 1e308}}, "actors.cpus"),
        ({"actors": {"resources": {"node": 1e308}}}, "actors.resources"),
        ({"notify": [{"url": "https://example.com/"}] * 17}, "notify"),
        ({"scorer": {"kind": "http", "url": "http://localhost:80a/"}}, "write http://HOST:PORT/PATH"),
        ({"scorer": {"kind": "http", "url": "http://"}}, "write http://HOST:PORT/PATH"),
        (
            {"scorer": {"kind": "sum", "terms": [{"scorer": {"kind": "length", "start": 9, "end": 9}}]}},
            "end 9 is not above start 9: raise it to 10 or more",
        ),
        (
            {"scorer": {"kind": "sum", "terms": [{"scorer": {"kind": "exact"}}], "minimum": 1, "maximum": 0}},
            "minimum 1 is not below maximum 0",
        ),
        (
            {"objective": {"kind": "best_of_k", "k": 8, "companion_weights": "exact"}, "scorer": {"kind": "code"}},
            "{kind: sequence}",
        ),
    ],
)
def test_an_invalid_job_is_rejected_with_the_name_of_the_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_answers_to_vote_on_come_from_the_scorer_or_from_a_program(tmp_path: Path) -> None:
    voting = {"objective": {"kind": "maj_at_k", "k": 8}}
    program = {"rollout": {"kind": "program", "target": "a:b"}}
    for fitting in (
        {"scorer": {"kind": "exact"}},
        {"scorer": {"kind": "code"}, **program},
        {"scorer": None, **program},
    ):
        assert load_job(write(tmp_path, **voting, **fitting)).kind == "rl"


def test_the_evaluation_weighs_k_as_the_objective_unless_it_has_weights(tmp_path: Path) -> None:
    evaluation: dict[str, Any] = {"data": {"path": "x"}}
    for objective, own, expected in (
        ({"kind": "max_at_k", "weights": {8: 0.5, 1: 0.5, 2: 0}}, None, ((1, 0.5), (8, 0.5))),
        ({"kind": "maj_at_k", "weights": "harmonic", "order": 2}, None, ((1, 1.0), (2, 0.5))),
        ({"kind": "max_at_k", "weights": {8: 1}}, {2: 1.0, 1: 3.0}, ((1, 3.0), (2, 1.0))),
        ({"kind": "max_at_k", "k": 8}, {4: 1.0}, ((4, 1.0),)),
        ({"kind": "max_at_k", "k": 8}, None, ()),
        ({"kind": "mean"}, None, ()),
    ):
        job = load_job(write(tmp_path, objective=objective, evaluation={**evaluation, "weights": own}))
        assert isinstance(job, RLJob)
        assert job.evaluated_terms == expected
        assert JOB.validate_python(yaml.safe_load(dump_job(job))) == job


def test_a_missing_key_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in SMALL.items() if key != "model"}))
    with pytest.raises(JobError, match="model: required, but missing"):
        load_job(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "kind: rl\noptimizer:\n  lr: 1\n  eps: 2\n  lr: 3\n",
            "job.yaml, line 5: key 'lr' is already in line 3",
        ),
        ("kind: rl\noptimizer: {lr: 1, lr: 2}\n", "job.yaml, line 2: key 'lr' is already in line 2"),
        ("a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, x: 3, <<: *a}\n", "line 3: key '<<' is already"),
    ],
)
def test_a_duplicate_key_is_rejected_with_its_lines(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert message in str(caught.value)


def test_keys_of_a_merged_anchor_can_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    small = {**SMALL, "optimizer": "HERE"}
    text = yaml.safe_dump(small).replace("HERE", "{<<: &a {lr: 1.0, eps: 0.5}, eps: 0.25}")
    path.write_text(text)
    job = load_job(path)
    assert isinstance(job, RLJob)
    assert (job.optimizer.lr, job.optimizer.eps) == (1.0, 0.25)


@pytest.mark.parametrize(("text", "message"), [("a: [", "is not YAML"), ("- 1", "must be a mapping"), ("", "mapping")])
def test_files_that_are_not_jobs_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobError, match=message):
        load_job(path)
    with pytest.raises(JobError, match="No such file"):
        load_job(tmp_path / "none.yaml")


def test_overrides(tmp_path: Path) -> None:
    job = load_job(write(tmp_path), parse_overrides(["learner.ranks=2", "max_lag=0", "optimizer.lr=1e-3"]))
    assert isinstance(job, RLJob)
    assert (job.learner.ranks, job.max_lag, job.optimizer.lr) == (2, 0, 1e-3)
    with pytest.raises(JobError, match="write key=value"):
        parse_overrides(["learner"])
    with pytest.raises(JobError, match="'name' holds a value"):
        load_job(write(tmp_path), {"name.x": 1})
