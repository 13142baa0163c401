"""Dashboards and alerts use exported metrics and labels that these metrics have."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from reward_servers.http import metric_lines
from reward_servers.sandbox.health import SandboxReport
from services.api.index import RunCard
from services.api.prometheus import RunStatus, ServiceMetrics
from volley.metrics import family
from volley.state import Observed

HERE = Path("deploy/monitoring")
DASHBOARD = json.loads((HERE / "grafana.json").read_text())
RULE_FILES = ["alerts.yaml", "notify.yaml"]
RULES = [
    rule
    for name in RULE_FILES
    for group in yaml.safe_load((HERE / name).read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]] + [rule["expr"] for rule in RULES]


class _Slots:
    """A stand-in for the slots that the HTTP front exports metrics of."""

    def __init__(self) -> None:
        self.ready, self.waiting = True, 0
        self.reports = [SandboxReport("A", (), 40, 40)]
        self.counts = {"passed": 1}


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """By name, the labels of each exported sample."""
    card = RunCard("run-1", "run", "rl", 0.0, {}, 10, {"kind": "mean"}, 1)
    row = {"reward_mean": 0.5, "lag_histogram": {"0": 3, "1": 1}}
    service = ServiceMetrics()
    service.observe("GET", "/v1/runs", 200, 0.01)
    evaluation = {"version": 0, "estimates": [{"k": 1, "mean": 0.5}]}
    text = service.text(1, [RunStatus(card, Observed(state="running", checkpointed=1.0), row, evaluation)]).decode()
    text += "\n".join(metric_lines(_Slots())) + "\n"  # type: ignore[arg-type]
    families = text_string_to_metric_families(text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics in an expression, with the labels they are selected by."""
    for name, picked in re.findall(r"\b(volley_\w+|up)\b(?:\{([^}]*)\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)", picked))


def test_every_metric_used_is_exported_with_its_labels(exported: dict[str, set[str]]) -> None:
    brought = {"job", "instance"}  # added by Prometheus
    for expression in EXPRESSIONS:
        named = list(selectors(expression))
        assert named, expression
        for name, labels in named:
            if name != "up":
                assert name in exported, expression
                assert labels <= exported[name] | brought, expression
    (variable,) = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "run"]
    assert re.fullmatch(r"label_values\((\w+), run\)", variable["query"]["query"])


def test_step_metrics_are_in_the_table_of_metrics() -> None:
    named = {text for expression in EXPRESSIONS for text in re.findall(r'metric=~?"([^"]+)"', expression)}
    assert len(named) > 8
    for text in named:
        for name in _spelled_out(text):
            assert family(name.replace(".*", "1")), name


def _spelled_out(pattern: str) -> list[str]:
    """The names that a pattern with at most one alternation matches."""
    choice = re.search(r"\((.*)\)", pattern)
    return [pattern.replace(choice[0], one) for one in choice[1].split("|")] if choice else [pattern]


def test_step_metrics_are_exported_as_reported() -> None:
    card = RunCard("run-1", "run", "rl", 0.0, {}, 10, {"kind": "mean"}, 2)
    row = {"step": 7, "reward_mean": 0.5, "lag_histogram": {"0": 3, "2": 1}, "pass_at_4": 0.75}
    live, over = Observed(state="paused", step=8, updated=time.time()), Observed(state="done")
    estimates = [{"k": 4, "mean": 0.25, "low": 0.2, "high": 0.3}]
    tagged = {"tag": "level", "value": "5", "estimates": estimates}
    evaluation = {"version": 5, "prompts": 9, "estimates": estimates, "by_tag": [tagged]}
    other = RunCard("run-2", "run", "rl", 0.0, {}, 10, {"kind": "mean"})
    text = ServiceMetrics().text(0, [RunStatus(card, live, row, evaluation), RunStatus(other, over, {})]).decode()
    samples = [each for metric in text_string_to_metric_families(text) for each in metric.samples]
    of_runs = {(each.name, each.labels.get("metric")): each.value for each in samples if "run" in each.labels}
    assert of_runs["volley_run_lag_mean", None] == 0.5
    assert of_runs["volley_run_max_lag", None] == 2
    assert of_runs["volley_run_reward_mean", None] == 0.5
    assert of_runs["volley_run_metric", "pass_at_4"] == 0.75
    assert of_runs["volley_run_paused", None] == 1
    evaluated = {metric: value for (name, metric), value in of_runs.items() if name == "volley_run_evaluation"}
    assert evaluated == {"pass_at_4": 0.25, "prompts": 9}
    states = {each.labels["state"]: each.value for each in samples if each.name == "volley_runs"}
    assert (states["paused"], states["done"], states["failed"], states["lost"]) == (1, 1, 0, 0)
    assert {each.labels["run"] for each in samples if "run" in each.labels} == {"run-1"}


def test_groupings_use_labels_that_exist(exported: dict[str, set[str]]) -> None:
    for expression in EXPRESSIONS:
        there = {"instance", "job"}.union(*(exported.get(name, set()) for name, _ in selectors(expression)))
        for grouping in re.findall(r"by \(([^)]*)\)", expression):
            assert {label.strip() for label in grouping.split(",")} <= there, expression


def test_alerts_have_a_summary_and_an_action() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "action"}
    guide = Path("docs/operations.md").read_text()
    assert [name for name in names if f"`{name}`" not in guide] == []


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    every: list[dict[str, Any]] = DASHBOARD["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    cells: set[tuple[int, int]] = set()
    for panel in every:
        at = panel["gridPos"]
        own = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not own & cells, panel["title"]
        cells |= own


def test_prometheus_reads_the_alerts_and_scrapes_the_right_jobs() -> None:
    config = yaml.safe_load((HERE / "prometheus.yaml").read_text())
    assert config["rule_files"] == RULE_FILES
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    for expression in EXPRESSIONS:
        for name in re.findall(r'job="([^"]+)"', expression):
            assert name in jobs
