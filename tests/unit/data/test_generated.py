"""Tasks from reasoning-gym: mixed by weight, graded by level, the same in every process, others for another seed."""

from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from services.data.prompts import read_prompts
from volley.data import DataSpec
from volley.errors import HostError, JobError
from volley.job import JOB


def spec(sets: list[dict[str, Any]], size: int = 30, **more: Any) -> DataSpec:
    return DataSpec.model_validate({"generator": "reasoning_gym", "sets": sets, "size": size, **more})


def test_sets_are_mixed_by_weight_and_levels_in_equal_parts() -> None:
    sets: list[dict[str, Any]] = [
        {"name": "chain_sum", "weight": 2, "levels": [0, 2]},
        {"name": "gcd", "config": {"max_value": 30}},
    ]
    prompts = read_prompts(spec(sets))
    assert Counter(prompt.tags["set"] for prompt in prompts) == {"chain_sum": 20, "gcd": 10}
    assert Counter(prompt.tags.get("level") for prompt in prompts) == {"0": 10, "2": 10, None: 10}
    assert Counter(prompt.tags["set"] for prompt in prompts[:6]) == {"chain_sum": 4, "gcd": 2}
    assert len({prompt.id for prompt in prompts}) == 30
    assert all(prompt.text and prompt.reference["answer"] for prompt in prompts)
    length = {
        level: max(
            prompt.text.count("+") + prompt.text.count("-") for prompt in prompts if prompt.tags.get("level") == level
        )
        for level in ("0", "2")
    }
    assert length["0"] < length["2"]  # a level has only its own difficulty


def test_tasks_are_the_same_every_time_and_others_for_another_seed() -> None:
    unsteady = [{"name": name} for name in ("isomorphic_strings", "ransom_note", "word_ladder")]  # depend on hashing
    first, again, other = (read_prompts(spec(unsteady, size=60, seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert not {prompt.text for prompt in first} & {prompt.text for prompt in other}


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([{"name": "chain_sums"}], "no set is called 'chain_sums'; did you mean chain_sum"),
        ([{"name": "composite"}], "no set is called 'composite'"),
        ([{"name": "chain_sum", "config": {"terms": 3}}], "chain_sum: .*unexpected keyword argument 'terms'"),
        ([{"name": "chain_sum", "config": {"min_terms": 0}}], "chain_sum: min_terms must be positive"),
        ([{"name": "chain_sum", "levels": [99]}], "chain_sum at level 99: it has the levels 0 to 10"),
        ([{"name": "gsm_symbolic", "levels": [0]}], "gsm_symbolic has no levels: set its config"),
    ],
)
def test_what_reasoning_gym_refuses(sets: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(JobError, match=says):
        read_prompts(spec(sets))


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError(\"No module named 'reasoning_gym'\")")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(HostError, match=r"pip install 'volley-rl\[reasoning-gym\]'"):
        read_prompts(spec([{"name": "gcd"}]))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"generator": "reasoning_gym", "size": 3}, "a generator needs sets and size"),
        ({"generator": "reasoning_gym", "sets": [{"name": "gcd"}]}, "a generator needs sets and size"),
        ({"path": "a.jsonl", "size": 3}, "write generator: reasoning_gym"),
        ({"path": "a.jsonl", "generator": "reasoning_gym"}, "only one of path, hub and generator"),
        ({"generator": "reasoning_gym", "sets": [{"name": "gcd", "config": {"seed": 1}}], "size": 3}, "beside sets"),
        ({"generator": "reasoning_gym", "sets": [{"name": "gcd"}], "size": 3, "recipe": "math"}, "remove them"),
        ({}, "exactly one of path, hub, generator and sources"),
    ],
)
def test_specs_that_contradict_themselves(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        DataSpec.model_validate(data)


def test_evaluation_needs_another_seed() -> None:
    data = {"generator": "reasoning_gym", "sets": [{"name": "gcd"}], "size": 3}
    job = {"kind": "rl", "name": "j", "model": {"path": "m"}, "scorer": {"kind": "reasoning_gym"}, "steps": 1}
    job |= {"objective": {"kind": "mean"}, "data": data}
    with pytest.raises(ValidationError, match="gcd has the same tasks in both: write another seed, such as seed: 1"):
        JOB.validate_python({**job, "evaluation": {"data": data}})
    JOB.validate_python({**job, "evaluation": {"data": {**data, "seed": 1}}})
