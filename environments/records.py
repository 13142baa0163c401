"""What an environment worker gets and reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from volley.rollout import EnvironmentWorkersSpec, Rollout

Stuck = Literal["", "thread", "loop"]
FailureKind = Literal["", "raised", "timeout", "lost"]


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """Settings that all environment workers of a run share.

    Attributes:
        rollout: the program or tools, and how long an episode may take.
        workers: counts, resources and deadlines.
        log_dir: folder for ``environment-<i>.log``.
        prefix: prefix of the workers' Ray names, so that runs on one cluster do not clash.
    """

    rollout: Rollout
    workers: EnvironmentWorkersSpec
    log_dir: Path
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode's program ended.

    Attributes:
        reward: as returned; None if the job's scorer is to judge the last answer.
        answer: as returned; equal answers vote together in maj@k.
        detail: one line of explanation.
        failure: why there is no result, such as an exception; "" if the program returned.
        kind: the kind of failure; "" with one counts as ``raised``.
        seconds: how long the program ran.
        waited: how long the episode waited for room on its worker before.
        tool_errors: calls of tools that the model saw as errors; None if the tools are the program's own.
    """

    reward: float | None = None
    answer: str | None = None
    detail: str = ""
    failure: str = ""
    kind: FailureKind = ""
    seconds: float = field(default=0.0, compare=False)
    tool_errors: int | None = None
    waited: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class EpisodesDone:
    """The outcomes of a group's n episodes.

    Attributes:
        worker: name of the environment worker; "" if the episodes were lost with theirs.
        stuck: what a program that timed out still occupies: ``thread``, its own thread, or a task that swallowed its
            cancellation; ``loop``, the event loop that all async programs share. The worker must then be replaced.
        left: how many episodes have not ended of each other group on the worker, by the group's number.
    """

    outcomes: tuple[Outcome, ...]
    seconds: float
    stuck: Stuck = ""
    worker: str = ""
    left: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """How much the environment workers were used since the pool started.

    Attributes:
        episodes: episodes that ended.
        busy_seconds: the time of all episodes, summed up.
        room_seconds: the same if as many episodes had run as the workers have room for.
    """

    episodes: int = 0
    busy_seconds: float = 0.0
    room_seconds: float = 0.0

    def __sub__(self, before: "Usage") -> "Usage":
        return Usage(
            self.episodes - before.episodes,
            self.busy_seconds - before.busy_seconds,
            self.room_seconds - before.room_seconds,
        )
