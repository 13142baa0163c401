"""What the coordinator asks of the three roles. The pools and the rank group satisfy these; tests use small fakes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from actors.config import BroadcastReport, GenerateRequest
from learner.records import ScoredGroup, StepReport
from volley.objectives import Objective
from volley.records import GroupMeta, Prompt, Scores, WeightUpdate


class Generator(Protocol):
    """`actors.pool.ActorPool`."""

    @property
    def version(self) -> int:
        """The oldest version any live actor serves."""
        ...

    async def generate(self, request: GenerateRequest) -> tuple[Any, GroupMeta]: ...

    async def broadcast(self, update: WeightUpdate) -> BroadcastReport: ...


class Judge(Protocol):
    """`reward_servers.pool.RewardPool`."""

    async def score(self, group: Any, prompt: Prompt) -> Scores: ...


class Learner(Protocol):
    """`learner.group.LearnerGroup`."""

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
        """Returns when the learner can go on."""
        ...

    async def published(self, version: int) -> WeightUpdate:
        """Returns when the actors can have what was begun."""
        ...

    async def save(self, folder: Path, extra: Mapping[str, Any], files: Mapping[str, bytes] | None = None) -> None: ...
