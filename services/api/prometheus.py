"""Metrics of the service itself and of the runs, for Prometheus."""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from services.api.index import RunCard, seen_state
from services.recording.sinks.base import evaluation_row
from volley.state import ENDED, Observed
from volley.views import SeenState

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
METHODS = frozenset({"GET", "POST", "PATCH", "DELETE", "HEAD", "OPTIONS", "PUT"})


class RunStatus(NamedTuple):
    """A run as it was last seen, with its newest rows of metrics and of evaluations, {} before the first."""

    card: RunCard
    observed: Observed
    row: Mapping[str, Any]
    evaluation: Mapping[str, Any] = MappingProxyType({})


class RunGauge(NamedTuple):
    """A gauge with one value per live run; ``value`` returns None for runs that have none."""

    name: str
    meaning: str
    value: Callable[[RunStatus], float | None]


RUN_GAUGES = (
    RunGauge("volley_run_step", "Steps done.", lambda run: run.observed.step),
    RunGauge("volley_run_steps", "Steps of the job.", lambda run: run.observed.steps or run.card.steps),
    RunGauge("volley_run_life", "Drivers the run has had.", lambda run: run.observed.life),
    RunGauge("volley_run_paused", "1 while the run is paused, else 0.", lambda run: run.observed.state == "paused"),
    RunGauge("volley_run_actors", "Actors that serve.", lambda run: run.observed.actors),
    RunGauge("volley_run_reward_workers", "Reward workers that serve.", lambda run: run.observed.reward_workers),
    RunGauge(
        "volley_run_environment_workers",
        "Environment workers that serve.",
        lambda run: run.observed.environment_workers,
    ),
    RunGauge(
        "volley_run_updated_seconds",
        "When the driver last reported, in seconds since 1970.",
        lambda run: run.observed.updated,
    ),
    RunGauge(
        "volley_run_checkpoint_seconds",
        "When the newest checkpoint was written, in seconds since 1970.",
        lambda run: run.observed.checkpointed,
    ),
    RunGauge("volley_run_reward_mean", "Mean reward of the newest step.", lambda run: run.row.get("reward_mean")),
    RunGauge(
        "volley_run_lag_mean",
        "Mean lag of the newest step's tokens, in versions.",
        lambda run: _mean_lag(run.row.get("lag_histogram")),
    ),
    RunGauge("volley_run_max_lag", "Largest lag that the job allows, in versions.", lambda run: run.card.max_lag),
)


class ServiceMetrics:
    """Request counts and latencies of one server, and gauges of the runs."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "volley_api_requests", "Requests answered.", ("method", "route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "volley_api_request_seconds",
            "Time to answer a request, in seconds; for a live view, how long it stayed open.",
            ("route",),
            buckets=SECONDS,
            registry=self._registry,
        )
        self._live = Gauge("volley_api_live_clients", "Live views open now.", registry=self._registry)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self._requests.labels(method if method in METHODS else "other", route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self, live_clients: int, runs: Iterable[RunStatus]) -> bytes:
        """Return all metrics in Prometheus's text format."""
        self._live.set(live_clients)
        registry = CollectorRegistry()
        registry.register(_RunCollector(list(runs)))
        return generate_latest(self._registry) + generate_latest(registry)


class _RunCollector:
    """Gauges of the live runs; runs that have ended only count in ``volley_runs``."""

    def __init__(self, runs: list[RunStatus]) -> None:
        self._runs = runs
        self._live = [run for run in runs if run.observed.state not in ENDED]

    def collect(self) -> Iterator[Metric]:
        yield self._states()
        for gauge in RUN_GAUGES:
            yield self._family(gauge)
        yield self._newest_metrics()
        yield self._newest_evaluation()

    def _states(self) -> Metric:
        family = GaugeMetricFamily("volley_runs", "Runs by state.", labels=["state"])
        found = Tally(seen_state(run.observed) for run in self._runs)
        for state in get_args(SeenState):  # 0 too, so that an alert sees the first run in a state
            family.add_metric([state], found[state])
        return family

    def _family(self, gauge: RunGauge) -> Metric:
        family = GaugeMetricFamily(gauge.name, gauge.meaning, labels=["run", "name"])
        for run in self._live:
            value = gauge.value(run)
            if value is not None:
                family.add_metric([run.card.id, run.card.name], value)
        return family

    def _newest_metrics(self) -> Metric:
        family = GaugeMetricFamily(
            "volley_run_metric", "Metrics of the newest step; see docs/metrics.md.", labels=["run", "name", "metric"]
        )
        for run in self._live:
            for metric, value in run.row.items():
                if isinstance(value, int | float):
                    family.add_metric([run.card.id, run.card.name, metric], value)
        return family

    def _newest_evaluation(self) -> Metric:
        family = GaugeMetricFamily(
            "volley_run_evaluation",
            "Figures of the newest evaluation on held-out prompts; see docs/metrics.md.",
            labels=["run", "name", "metric"],
        )
        for run in self._live:
            figures = evaluation_row(run.evaluation, 0.0).values if run.evaluation else {}
            for metric, value in figures.items():
                if "/" not in metric:  # those by tag may be thousands
                    family.add_metric([run.card.id, run.card.name, metric], value)
        return family


def _mean_lag(tokens_by_lag: Mapping[str, int] | None) -> float | None:
    if not tokens_by_lag:
        return None
    return sum(int(lag) * count for lag, count in tokens_by_lag.items()) / max(1, sum(tokens_by_lag.values()))
