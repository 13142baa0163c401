"""What the coordinator needs of the three roles. The pools satisfy these protocols; tests use small fakes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from actors.config import BroadcastReport, EpisodesRequest, GenerateRequest, OpenedSessions
from actors.gateway.groups import EpisodeReport
from environments.records import EpisodesDone, Usage
from learner.records import ScoredGroup, StepReport
from services.coordinator.devices import Devices
from volley.objectives import Objective
from volley.records import Group, GroupMeta, Prompt, Scores, WeightUpdate
from volley.refs import Ref

T = TypeVar("T")


class Actors(Protocol):
    """`actors.pool.ActorPool`."""

    @property
    def version(self) -> int:
        """The oldest version that any live actor serves."""
        ...

    async def generate(self, request: GenerateRequest) -> tuple[Ref[Group], GroupMeta]: ...

    async def broadcast(self, update: WeightUpdate) -> BroadcastReport: ...


class RewardWorkers(Protocol):
    """`reward_servers.pool.RewardPool`."""

    async def score(self, group: Ref[Group], prompt: Prompt) -> Scores: ...


class Sessions(Protocol):
    """`actors.pool.ActorPool`, for episodes."""

    async def episodes(
        self, request: EpisodesRequest, run: Callable[[OpenedSessions], Awaitable[T]]
    ) -> tuple[T, Ref[Group], GroupMeta, tuple[EpisodeReport, ...]]: ...


class Environments(Protocol):
    """`environments.pool.EnvironmentPool`."""

    async def run(self, prompt: Prompt, base_url: str, keys: tuple[str, ...]) -> EpisodesDone: ...

    def usage(self) -> Usage: ...


class Learner(Protocol):
    """`learner.pool.LearnerPool`."""

    async def step(
        self,
        batch: Sequence[ScoredGroup],
        *,
        version: int,
        objective: Objective | None = None,
        learning_rate: float | None = None,
        max_lag: int | None = None,
    ) -> StepReport: ...

    async def begin_publish(self, version: int) -> None:
        """Returns when the learner can take its next step."""
        ...

    async def published(self, version: int) -> WeightUpdate:
        """Returns when the actors can fetch what `begin_publish` began."""
        ...

    async def begin_save(
        self,
        folder: Path,
        extra: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
        *,
        background: bool = True,
    ) -> None:
        """Returns when the learner can take its next step."""
        ...

    async def saved(self) -> None:
        """Returns when the checkpoint that `begin_save` began is complete."""
        ...


@dataclass(frozen=True, slots=True)
class Roles:
    """The three roles of a run, started, with actors and learner at the same version, and who has the devices."""

    actors: Actors
    rewards: RewardWorkers
    learner: Learner
    devices: Devices
