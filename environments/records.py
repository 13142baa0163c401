"""What an environment worker gets and reports."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from volley.rollout import EnvironmentWorkersSpec, ProgramRollout

Stuck = Literal["", "thread", "loop"]


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """Settings that all environment workers of a run share.

    Attributes:
        rollout: the program, and how long an episode may take.
        workers: counts, resources and deadlines.
        log_dir: folder for ``environment-<i>.log``.
        prefix: prefix of the workers' Ray names, so that runs on one cluster do not clash.
    """

    rollout: ProgramRollout
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
    """

    reward: float | None = None
    answer: str | None = None
    detail: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class EpisodesDone:
    """The outcomes of a group's n episodes.

    Attributes:
        stuck: what a program that timed out still occupies: its thread, or the event loop that all async programs
            share; the worker must then be replaced.
    """

    outcomes: tuple[Outcome, ...]
    seconds: float
    stuck: Stuck = ""
