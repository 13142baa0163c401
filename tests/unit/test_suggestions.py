"""A mistaken key or value of a job file is answered with what to write instead."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.jobs.job_file import load_job
from services.jobs.suggestions import MAPPINGS, OBJECTIVES, OTHER_WORDS, known_key, known_keys
from volley.errors import JobError
from volley.job import JOB

JOB_TREE: dict[str, Any] = {
    "kind": "rl",
    "name": "x",
    "steps": 1,
    "model": {"path": "m"},
    "data": {"path": "d"},
    "scorer": {"kind": "countdown"},
    "objective": {"kind": "mean"},
}


def message(tmp_path: Path, **changes: Any) -> str:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**JOB_TREE, **changes}))
    with pytest.raises(JobError) as caught:
        load_job(file)
    return str(caught.value).removeprefix(f"{file}: ")


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"stepz": 1}, "stepz: unknown key; did you mean steps?"),
        ({"temprature": 1}, "temprature: unknown key; did you mean sampling.temperature?"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature: unknown key; did you mean sampling.temperature?"),
        ({"learning_rate": 1}, "learning_rate: unknown key; did you mean optimizer.lr?"),
        ({"optimizer": {"learning_rate": 1}}, "optimizer.learning_rate: unknown key; did you mean optimizer.lr?"),
        ({"lr": 1}, "lr: unknown key; did you mean optimizer.lr?"),
        ({"num_generations": 8}, "num_generations: unknown key; did you mean sampling.n?"),
        ({"qqq": 1}, "qqq: unknown key; `volley schema` lists the known ones"),
        ({"model": "org/name"}, "model: must be a mapping, not 'org/name': write model: {path: models/NAME}"),
        ({"data": {"path": "d", "chat": True}}, "data.chat: must be a mapping, not True: write chat: {}"),
        ({"objective": "pass_at_k"}, "objective: must be a mapping, not 'pass_at_k': write objective: {kind: max_at_k"),
        (
            {"objective": {"kind": "grpo"}},
            "objective: 'grpo' has another name here: write objective: {kind: mean, norm",
        ),
        (
            {"objective": {"kind": "pass_at_k", "k": 2}},
            "objective: 'pass_at_k' has another name here: write objective",
        ),
        ({"objective": {"kind": "nonsense"}}, "objective: 'nonsense' is not known. Built in:"),
        ({"kind": "grpo"}, "kind: 'grpo' is not a kind of job: write rl, sft, rft or eval"),
        ({"sampling": {"n": "x"}}, "sampling.n: Input should be a valid integer"),
        ({"scorer": {"kind": "math", "valus": {}}}, "scorer.math.valus: unknown key; did you mean scorer.values?"),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(tmp_path: Path, changes: dict[str, Any], answer: str) -> None:
    assert message(tmp_path, **changes).startswith(answer)


def test_every_key_of_every_kind_suggests_itself_when_it_is_misspelt() -> None:
    missed = []
    for kind in ("rl", "sft", "rft", "eval"):
        for key in known_keys(kind):
            last = key.rpartition(".")[2]
            if len(last) > 5 and known_key(kind, key[:-2] + key[-1]) not in known_keys(kind):
                missed.append((kind, key))
    assert not missed


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout.taget", "rollout.target"),
        ("rollout.program.taget", "rollout.target"),
        ("rollout.tools.tols", "rollout.tools"),
        ("rollout.tools.tools.0.function.targt", "rollout.tools.target"),
        ("rollout.openenv.rest", "rollout.reset"),
        ("scorer.python.targt", "scorer.target"),
        ("rollout.values.pased", "rollout.values.passed"),
    ],
)
def test_a_key_beside_the_mistaken_one_comes_first(key: str, meant: str) -> None:
    assert known_key("rl", key) == meant


def test_other_words_stand_for_keys_that_exist() -> None:
    keys = known_keys("rl")
    assert "update.kl.coefficient" in keys
    assert set(OTHER_WORDS.values()) <= keys
    assert not set(OTHER_WORDS) & {key for key in keys if "." not in key}, "a known key needs no other word"


def test_what_is_to_be_written_is_valid() -> None:
    for name, instead in MAPPINGS.items():
        written = yaml.safe_load(instead.partition(", a folder")[0])
        assert list(written) == [name]
        assert isinstance(written[name], dict)
    for instead in OBJECTIVES.values():
        objective = yaml.safe_load(instead[: instead.index("}") + 1])
        JOB.validate_python({**JOB_TREE, "objective": objective})
