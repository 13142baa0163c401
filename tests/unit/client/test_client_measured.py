"""The client reads what a run has measured."""

import dataclasses
import sys
from typing import Any

import httpx
import numpy as np
import pytest

from tests.unit.client.forms import Connect, Handler, type_of
from tests.unit.fake_api import FakeApi
from volley.client import Metrics
from volley.client import routes as client_routes
from volley.errors import (
    HostError,
    NotFound,
)


def series(rows: dict[int, float]) -> Handler:
    """Answer as `GET /metrics` does, for one metric by step."""

    def answer(request: httpx.Request) -> httpx.Response:
        params = request.url.params
        last, points = int(params.get("to", 1 << 40)), int(params["points"])
        found = [step for step in sorted(rows) if int(params["from"]) <= step <= last]
        buckets = np.array_split(found, min(points, max(1, len(found))))
        means = [float(np.mean([rows[int(step)] for step in bucket])) for bucket in buckets if len(bucket)]
        ends = [int(bucket[-1]) for bucket in buckets if len(bucket)]
        body = {"steps": ends, "series": {"a": means} if means else {}, "total": len(found), "names": ["a"]}
        return httpx.Response(200, json=body)

    return answer


@pytest.mark.parametrize("steps", [range(0), range(3), range(4, 9), range(10), range(11), range(0, 95, 3), [2, 90]])
def test_every_row_is_read_however_many_there_are(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, steps: range | list[int]
) -> None:
    monkeypatch.setattr(client_routes, "POINTS", 10)
    form = connect(series({step: step / 2 for step in steps}))
    run = type_of(form)(form.client, "a")
    found = form.call(run.metrics)
    assert found.steps.tolist() == list(steps)
    assert list(found) == [] if not len(steps) else found["a"].tolist() == [step / 2 for step in steps]
    some = form.call(run.metrics, first=5, last=40)
    assert some.steps.tolist() == [step for step in steps if 5 <= step <= 40]
    assert len(form.call(run.metrics, points=4).steps) == min(4, len(steps))


def test_metrics_are_arrays_with_nan_and_a_data_frame(connect: Connect) -> None:
    body = {"steps": [1, 2], "series": {"loss": [None, 0.5], "kl_k1": [1, 2]}, "total": 2, "names": []}
    form = connect(lambda request: httpx.Response(200, json=body))
    metrics = form.call(type_of(form)(form.client, "a").metrics)
    assert (metrics.steps.dtype, metrics["loss"].dtype) == (np.int64, np.float64)
    np.testing.assert_array_equal(metrics["loss"], [np.nan, 0.5])
    assert (list(metrics), len(metrics)) == (["kl_k1", "loss"], 2)
    with pytest.raises(KeyError, match=r"no metric 'nope': docs/metrics\.md lists them"):
        Metrics(np.array([1, 2]), {})["nope"]
    with pytest.raises(KeyError, match="no metric 'los': there are loss"):
        metrics["los"]
    frame = metrics.frame()
    assert frame.index.tolist() == [1, 2]
    assert frame.loc[2].to_dict() == {"kl_k1": 2.0, "loss": 0.5}


def test_evaluations_are_arrays_and_a_data_frame(connect: Connect) -> None:
    def row(version: int, ks: tuple[int, ...], **more: Any) -> dict[str, Any]:
        estimates = [{"k": k, "mean": k / 10 + version, "low": 0.0, "high": 1.0} for k in ks]
        return {"version": version, "n": 8, "prompts": 5, "estimates": estimates, "majority": [], **more}

    majority = [{"k": 4, "mean": 0.25, "low": 0.0, "high": 0.5}]
    rows = [row(0, (1, 4)), row(10, (1, 8), majority=majority)]
    form = connect(lambda request: httpx.Response(200, json={"items": rows}))
    found = form.call(type_of(form)(form.client, "a").evaluations)
    assert (found.versions.tolist(), found.ks, len(found)) == ([0, 10], (1, 4, 8), 2)
    np.testing.assert_allclose(found.mean, [[0.1, 0.4, np.nan], [10.1, np.nan, 10.8]])
    np.testing.assert_allclose(found.at(1), [0.1, 10.1])
    assert (found.low.shape, found.high.shape) == ((2, 3), (2, 3))
    assert (found.of("majority").ks, found.of("majority").at(4).tolist()[1]) == ((4,), 0.25)
    with pytest.raises(KeyError, match="no evaluation at k=2: there are 1, 4, 8"):
        found.at(2)
    frame = found.frame()
    assert frame["estimator"].tolist() == ["pass@k"] * 4 + ["maj@k"]
    assert frame[frame.k == 8]["mean"].tolist() == [10.8]


def test_without_pandas_a_data_frame_says_what_to_install(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    form = connect(lambda request: httpx.Response(200, json={"items": []}))
    found = form.call(type_of(form)(form.client, "a").evaluations)
    with pytest.raises(HostError, match="pip install pandas"):
        found.frame()


def test_logs_and_what_a_run_counts(api: FakeApi, connect: Connect) -> None:
    api.add("a", state="running")
    form = connect(api.url)
    run = form.call(form.client.run, "a")
    assert form.call(run.logs, tail=5) == "there"
    assert dataclasses.astuple(form.call(run.log_piece, "driver", 5, 0)) == ("hello", 5)
    assert [each.process for each in form.call(run.processes)] == ["driver", "actor-0"]
    assert form.call(run.ledger) == {"admitted": 8, "trained": 8}
    with pytest.raises(NotFound, match="no log of nobody"):
        form.call(run.logs, "nobody")
