"""Metrics of the service itself and of the runs, for Prometheus."""

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from services.api.index import Card, seen_state
from services.state import ENDED, Observed

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
METHODS = frozenset({"GET", "POST", "PATCH", "DELETE", "HEAD", "OPTIONS", "PUT"})

Seen = tuple[Card, Observed, Mapping[str, Any]]  # the last one is the newest row of metrics, {} before the first


class ServiceMetrics:
    """Counts of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "volley_api_requests", "Requests answered.", ("method", "route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "volley_api_request_seconds",
            "Time to answer, in seconds; of a live view, how long it was watched.",
            ("route",),
            buckets=SECONDS,
            registry=self._registry,
        )
        self._live = Gauge("volley_api_live_clients", "Live views at this moment.", registry=self._registry)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """One request was answered."""
        self._requests.labels(method if method in METHODS else "other", route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self, live_clients: int, runs: Iterable[Seen]) -> bytes:
        """The exposition."""
        self._live.set(live_clients)
        registry = CollectorRegistry()
        registry.register(_Runs(list(runs)))
        return generate_latest(self._registry) + generate_latest(registry)


class _Runs:
    """Gauges of runs as they were seen; of the ones that ended, their number only."""

    def __init__(self, runs: list[Seen]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("volley_runs", "Runs by state.", labels=["state"])
        for state, count in sorted(Tally(seen_state(observed) for _, observed, _ in self._runs).items()):
            states.add_metric([state], count)
        yield states
        live = [each for each in self._runs if each[1].state not in ENDED]
        values: dict[str, tuple[str, list[tuple[Card, float]]]] = {
            "volley_run_step": ("Steps done.", [(card, seen.step) for card, seen, _ in live]),
            "volley_run_steps": ("Steps of the job.", [(card, seen.steps or card.steps) for card, seen, _ in live]),
            "volley_run_life": ("Drivers the run has had.", [(card, seen.life) for card, seen, _ in live]),
            "volley_run_actors": ("Actors that serve.", [(card, seen.actors) for card, seen, _ in live]),
            "volley_run_reward_workers": (
                "Reward workers that serve.",
                [(card, seen.reward_workers) for card, seen, _ in live],
            ),
            "volley_run_updated_seconds": (
                "When the driver last reported, seconds since 1970.",
                [(card, seen.updated) for card, seen, _ in live],
            ),
            "volley_run_checkpoint_seconds": (
                "When the newest checkpoint was written, seconds since 1970.",
                [(card, seen.checkpointed) for card, seen, _ in live if seen.checkpointed is not None],
            ),
            "volley_run_reward_mean": (
                "Mean reward of the newest step.",
                [(card, row["reward_mean"]) for card, _, row in live if "reward_mean" in row],
            ),
            "volley_run_lag_mean": (
                "Mean lag of the newest step's tokens, in versions.",
                [(card, _mean_lag(row["lag_histogram"])) for card, _, row in live if row.get("lag_histogram")],
            ),
            "volley_run_max_lag": (
                "Versions a token may be old, as the job says.",
                [(card, card.max_lag) for card, _, _ in live if card.max_lag is not None],
            ),
        }
        for name, (meaning, samples) in values.items():
            family = GaugeMetricFamily(name, meaning, labels=["run", "name"])
            for card, value in samples:
                family.add_metric([card.id, card.name], value)
            yield family
        newest = GaugeMetricFamily(
            "volley_run_metric", "The newest step's metrics; docs/metrics.md.", labels=["run", "name", "metric"]
        )
        for card, _, row in live:
            for metric, value in row.items():
                if isinstance(value, int | float):
                    newest.add_metric([card.id, card.name, metric], value)
        yield newest


def _mean_lag(tokens: Mapping[str, int]) -> float:
    """Over a histogram of tokens by lag."""
    return sum(int(lag) * count for lag, count in tokens.items()) / max(1, sum(tokens.values()))
