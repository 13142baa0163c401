"""The metrics of a step's episodes. `volley.metrics` defines them."""

from collections import Counter

from services.coordinator.records import EpisodesOfStep


def episode_metrics(episodes: EpisodesOfStep | None, *, seconds: float) -> dict[str, float]:
    """Figures of the episodes between two steps, ``seconds`` apart; {} without any."""
    if episodes is None:
        return {}
    usage, groups = episodes.usage, episodes.figures
    busy = {"environment_busy_share": usage.busy_seconds / usage.room_seconds} if usage.room_seconds else {}
    rate = {"episodes_per_second": usage.episodes / seconds, **busy}
    reports = [report for group in groups for report in group.reports]
    if not reports:
        return rate
    spent = sum(sum(group.seconds_n) for group in groups)
    environment = sum(group.environment_seconds for group in groups)
    ends = Counter(end for group in groups for end in group.ends_n if end)
    errors = [count for group in groups for count in group.tool_errors_n if count is not None]
    count = len(reports)
    return {
        **rate,
        "calls_mean": sum(report.calls for report in reports) / count,
        "observation_tokens_mean": sum(report.observed for report in reports) / count,
        "seconds_episode_mean": spent / count,
        "seconds_environment_mean": environment / count,
        **({"environment_share": environment / spent} if spent else {}),
        "rewrites": sum(report.rewrites for report in reports),
        "parse_failures": sum(report.parse_failures for report in reports),
        **({"tool_errors_mean": sum(errors) / len(errors)} if errors else {}),
        **{f"episodes_{end}": number / count for end, number in sorted(ends.items())},
    }
