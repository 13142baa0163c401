"""The client submits, finds and changes runs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.client.forms import Connect
from tests.unit.fake_api import FakeApi
from volley.errors import (
    JobError,
    NotFound,
)
from volley.job import JOB


def test_a_job_is_submitted_as_a_dict_or_an_object(api: FakeApi, connect: Connect, tmp_path: Path) -> None:
    form = connect(api.url)
    tree = {
        "kind": "rl",
        "name": "tried",
        "model": {"path": tmp_path / "model"},
        "data": {"path": "prompts.jsonl"},
        "scorer": {"kind": "exact"},
        "objective": {"kind": "max_at_k", "weights": {1: 0.5, 8: 0.5}},
        "steps": 4,
    }
    run = form.call(form.client.submit, tree, tags={"who": "me"}, key="k1", folder=tmp_path)
    assert (run.id, run.url) == ("tried-1", f"{api.url}/#/runs/tried-1")
    _, path, headers, body = api.seen[-1]
    assert (path, headers["idempotency-key"], body["tags"]) == ("/v1/runs", "k1", {"who": "me"})
    assert body["job"]["data"]["path"] == str(tmp_path / "prompts.jsonl")
    assert body["job"]["model"]["path"] == str(tmp_path / "model")
    assert body["job"]["objective"]["weights"] == {"1": 0.5, "8": 0.5}
    form.call(form.client.submit, JOB.validate_python(tree), folder=tmp_path)
    sent = api.seen[-1][3]["job"]
    assert sent["data"]["path"] == str(tmp_path / "prompts.jsonl")
    assert sent["checkpoint"], "an object has every default"


def test_a_relative_path_is_relative_to_the_current_folder(
    api: FakeApi, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    form = connect(api.url)
    form.call(form.client.submit, {"name": "a", "data": [{"path": "b.jsonl"}, {"path": "s3://bucket/c"}]})
    paths = [each["path"] for each in api.seen[-1][3]["job"]["data"]]
    assert paths == [str(tmp_path / "b.jsonl"), "s3://bucket/c"]


@pytest.mark.parametrize("job", [[], "job.yaml", None, {"name": object()}, {"steps": math.nan}])
def test_what_is_no_job_is_rejected_before_it_is_sent(connect: Connect, job: Any) -> None:
    form = connect(lambda request: pytest.fail("sent"))
    with pytest.raises(JobError, match=r"a job is a dict|not JSON"):
        form.call(form.client.submit, job)


def test_a_run_is_found_by_the_beginning_of_its_id(api: FakeApi, connect: Connect) -> None:
    for run_id in ("sevens-1", "sevens-2", "tens-1", "sevens-1-again"):
        api.add(run_id, state="running")
    form = connect(api.url)
    assert form.call(form.client.run, "tens").id == "tens-1"
    assert form.call(form.client.run, "sevens-1").id == "sevens-1", "an id is no beginning"
    with pytest.raises(NotFound, match=r"several runs begin with sevens: .*write more of the id"):
        form.call(form.client.run, "sevens")
    with pytest.raises(NotFound, match="there is no run elevens"):
        form.call(form.client.run, "elevens")
    with pytest.raises(JobError, match="the id of the run is empty"):
        form.call(form.client.run, "")


def test_lists_are_read_page_by_page(api: FakeApi, connect: Connect) -> None:
    for number in range(5):
        api.add(f"run-{number}", state="running")
    form = connect(api.url)
    assert [each.id for each in form.call(form.client.runs)] == [f"run-{number}" for number in (4, 3, 2, 1, 0)]
    assert [each.id for each in form.call(form.client.runs, 3)] == ["run-4", "run-3", "run-2"]


def test_a_run_is_changed(api: FakeApi, connect: Connect) -> None:
    api.add("a", state="running")
    form = connect(api.url)
    run = form.call(form.client.run, "a")
    for method, arguments, sent in (
        (run.scale, {"actors": 0}, {"actors": 0}),
        (run.set, {"k": 4, "max_lag": 2}, {"objective": {"k": 4}, "max_lag": 2}),
        (run.set, {"objective": {"k": 4}, "center": True}, {"objective": {"k": 4, "center": True}}),
        (run.set, {"objective": None}, {"objective": None}),
        (run.pause, {}, {"paused": True}),
    ):
        form.call(method, **arguments)
        assert api.seen[-1][3] == sent
    form.call(run.set, {"objective.k": np.int64(2)})
    assert api.seen[-1][3] == {"objective": {"k": 2}}
    form.call(run.change, {"actors": 1}, revision=7)
    assert api.seen[-1][2]["if-match"] == '"7"'
    assert form.call(run.stop).desired.stopped
    assert not form.call(run.resume).desired.stopped
    with pytest.raises(JobError, match="not JSON"):
        form.call(run.set, learning_rate=math.inf)
    for method, words in ((run.scale, "nothing to scale"), (run.set, "nothing to change")):
        with pytest.raises(JobError, match=words):
            form.call(method)
    with pytest.raises(JobError, match=r"actors\.count: only objective has fields"):
        form.call(run.set, {"actors.count": 2})
