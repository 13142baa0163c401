"""A copy of a configuration with some fields changed is validated like a new one."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from services.jobs.job_file import load_job
from volley.base import replaced
from volley.job import ActorsSpec, RLJob

JOBS = sorted([*Path("examples/jobs").glob("*.yaml"), *Path("deploy/jobs").glob("*.yaml")])


@pytest.mark.parametrize("path", JOBS, ids=str)
def test_a_copy_without_changes_is_equal_and_serializes_equally(path: Path) -> None:
    job = load_job(path)
    copy = replaced(job)
    assert copy == job
    assert copy.model_dump(mode="json", exclude_unset=True) == job.model_dump(mode="json", exclude_unset=True)


def test_changes_affect_only_the_copy() -> None:
    spec = ActorsSpec(cpus=2)
    copy = replaced(spec, count=3)
    assert (copy.count, copy.cpus) == (3, 2)
    assert spec.count == 1
    assert copy.model_fields_set == {"count", "cpus"}


def test_invalid_values_and_unknown_fields_are_rejected() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        replaced(ActorsSpec(), count=0)
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        replaced(ActorsSpec(), counts=2)


def test_rules_between_fields_are_checked() -> None:
    job = load_job(next(path for path in JOBS if isinstance(load_job(path), RLJob)))
    assert isinstance(job, RLJob)
    with pytest.raises(ValidationError, match="ranks"):
        replaced(job, learner=replaced(job.learner, ranks=job.prompts_per_step + 1))
