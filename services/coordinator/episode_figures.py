"""What is known of episodes besides their samples: where their time went and how they ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.gateway.groups import EpisodeReport
from environments.records import Outcome, Usage
from services.coordinator.records import EpisodesOfStep
from services.coordinator.roles import Environments

Span = tuple[float, float]  # start and end


@dataclass(frozen=True, slots=True)
class EpisodeFigures:
    """Figures of a group's n episodes.

    Attributes:
        actor, worker: names of the actor and the environment worker.
        opened: when the sessions were opened, seconds since 1970.
        begun: when the environment worker got the episodes.
        seconds_n: how long each program ran.
        waited_n: how long each waited for room on the worker before; () if none did.
        ends_n: how each ended: "" if its program returned, otherwise as in the metrics ``episodes_<end>``.
        tool_errors_n: calls of tools that the model saw as errors; None where that is not known.
    """

    actor: str
    worker: str
    opened: float
    begun: float
    seconds_n: tuple[float, ...]
    ends_n: tuple[str, ...]
    reports: tuple[EpisodeReport, ...]
    tool_errors_n: tuple[int | None, ...] = ()
    waited_n: tuple[float, ...] = ()

    @property
    def environment_seconds(self) -> float:
        """Time of the episodes outside of the model's answers, summed up."""
        calling = sum(report.calling_seconds for report in self.reports)
        return max(0.0, sum(self.seconds_n) - calling)

    def model_spans(self) -> list[Span]:
        """When the model was answering at least one of the episodes, seconds since 1970."""
        return _union([span for report in self.reports for span in self._answering(report)])

    def environment_spans(self) -> list[Span]:
        """When at least one of the episodes was not waiting for the model."""
        found: list[Span] = []
        waited_n = self.waited_n or (0.0,) * len(self.seconds_n)
        for waited, seconds, report in zip(waited_n, self.seconds_n, self.reports, strict=True):
            at = self.begun + waited
            end = at + seconds
            for start, until in self._answering(report):
                found.append((at, min(start, end)))
                at = max(at, until)
            found.append((at, end))
        return _union(found)

    def _answering(self, report: EpisodeReport) -> list[Span]:
        return [(self.opened + start, self.opened + end) for start, end in report.calling]


def _union(spans: Sequence[Span]) -> list[Span]:
    """The time that the spans cover, as spans that do not overlap."""
    found: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def end_of(outcome: Outcome, report: EpisodeReport) -> str:
    """How an episode ended. What the gateway saw comes first: after the end of its session, a program can only fail."""
    if report.end is not None:
        return str(report.end)
    if outcome.failure:
        return outcome.kind or "raised"
    return "" if report.calls else "no_call"


class EpisodeLog:
    """Collects the episodes between two steps.

    Args:
        environments: the environment workers; None if the job has no program.
    """

    def __init__(self, environments: Environments | None) -> None:
        self._environments = environments
        self._figures: list[EpisodeFigures] = []
        self._before = Usage() if environments is None else environments.usage()

    def note(self, figures: EpisodeFigures | None) -> dict[str, object]:
        """Take the episodes of one more group; returns its `troubles_of`, for an event."""
        if figures is None:
            return {}
        self._figures.append(figures)
        return troubles_of(figures.reports)

    def take(self) -> EpisodesOfStep | None:
        """What was collected since the last call; None without a program."""
        if self._environments is None:
            return None
        usage, before = self._environments.usage(), self._before
        self._before = usage
        figures, self._figures = tuple(self._figures), []
        return EpisodesOfStep(figures, usage - before)


def troubles_of(reports: Sequence[EpisodeReport]) -> dict[str, object]:
    """What went wrong between programs and gateway, as the details of an event; {} if nothing did."""
    counts = {
        name: sum(getattr(report, name) for report in reports) for name in ("rewrites", "parse_failures", "abandoned")
    }
    first = next((report.rewrite for report in reports if report.rewrite), "")
    found: dict[str, object] = {name: count for name, count in counts.items() if count}
    return {**found, "first_rewrite": first} if first else found
