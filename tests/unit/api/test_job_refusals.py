"""Which jobs the API refuses although they are valid: rules name options, and never a user's own keys."""

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from services.api.jobs import parse, refusals
from services.api.problems import Problem
from services.api.settings import ApiSettings
from tests.unit.api.job_tree import job_tree
from volley.base import Spec
from volley.job_paths import absolute_paths

SERVER = ApiSettings(redis_url="redis://x")
OWN = {"path": "meta.text", "python": "code", "runtime_env": "a", "tracking_uri": "http://x", "deepspeed": "b"}


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"path": "/d.jsonl", "fields": OWN}},
        {"data": {"path": "/d.jsonl", "chat": {"options": {**OWN, "notify": ["x"], "engine": {"model": "x"}}}}},
        {"data": {"path": "/d.jsonl", "filters": [{"field": "a", "op": "==", "value": {**OWN, "kind": "http"}}]}},
        {"data": {"sources": [{"name": "s", "weight": 1, "path": "/d.jsonl", "fields": OWN}]}},
        {"data": {"generator": "reasoning_gym", "size": 1, "sets": [{"name": "x", "config": OWN}]}},
        {"actors": {"resources": {"engine": 1, "deepspeed": 1, "runtime_env": 1, "path": 1}}},
    ],
)
def test_a_users_own_keys_are_no_options(changes: dict[str, Any]) -> None:
    assert parse(job_tree(**changes), SERVER).name == "a"


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"model": {"path": "m"}}, "/job/model/path"),
        ({"data": {"path": "d.jsonl", "fields": OWN}}, "/job/data/path"),
        ({"data": {"sources": [{"name": "s", "weight": 1, "path": "d"}]}}, "/job/data/sources/0/path"),
        ({"evaluation": {"data": {"path": "../d"}, "every": 1, "ks": [1]}}, "/job/evaluation/data/path"),
        ({"sinks": [{"kind": "tensorboard", "path": "t"}]}, "/job/sinks/0/path"),
        ({"sinks": [{"kind": "mlflow", "tracking_uri": "http://evil.example"}]}, "/job/sinks/0/tracking_uri"),
        ({"notify": [{"url": "http://evil.example"}]}, "/job/notify/0/url"),
        ({"scorer": {"kind": "python", "target": "os:system"}}, "/job/scorer/target"),
        (
            {"scorer": {"kind": "sum", "terms": [{"scorer": {"kind": "python", "target": "os:system"}, "weight": 1}]}},
            "/job/scorer/terms/0/scorer/target",
        ),
        ({"scorer": {"kind": "http", "url": "http://x", "token_env": "HOME"}}, "/job/scorer/token_env"),
        ({"actors": {"engine": {"worker_cls": "os.x"}}}, "/job/actors/engine/worker_cls"),
        ({"learner": {"deepspeed": {"csv_monitor": {}}}}, "/job/learner/deepspeed/csv_monitor"),
        ({"runtime_env": {"pip": ["x"]}}, "/job/runtime_env"),
    ],
)
def test_options_that_the_server_does_not_allow_are_refused(changes: dict[str, Any], pointer: str) -> None:
    with pytest.raises(Problem) as refused:
        parse(job_tree(**changes), SERVER)
    assert [each.pointer for each in refused.value.errors] == [pointer]


class Inner(Spec):
    kind: Literal["python"] = "python"
    target: str


class Wrapper(Spec):
    """The spec of a plug-in, which may hold parts of a job in any form."""

    kind: Literal["wrapper"] = "wrapper"
    inner: Inner | None = None
    inners: dict[str, Any] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("wrapper", "pointer"),
    [
        (Wrapper(inner=Inner(target="os:system")), "/job/scorer/inner/target"),
        (Wrapper(inners={"a": {"kind": "python", "target": "os:system"}}), "/job/scorer/inners/a/target"),
        (Wrapper(inners={"a": [{"path": "x"}]}), "/job/scorer/inners/a/0/path"),
        (Wrapper(inners={"a": Inner(target="os:system")}), "/job/scorer/inners/a/target"),
    ],
)
def test_what_a_plug_in_holds_is_looked_through(wrapper: Wrapper, pointer: str) -> None:
    assert [each.pointer for each in refusals({"scorer": wrapper}, SERVER)] == [pointer]


def test_a_field_that_is_called_path_is_no_path() -> None:
    tree = {"data": {"path": "d.jsonl", "fields": {"path": "meta.path"}}}
    assert absolute_paths(tree, Path("/jobs")) == {"data": {"path": "/jobs/d.jsonl", "fields": {"path": "meta.path"}}}
