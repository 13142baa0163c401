"""What is recorded of a group apart from its step: what went wrong while it was made, and why it was dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.coordinator.records import Recorder
from volley.records import Scores


@dataclass(frozen=True, slots=True)
class GroupNews:
    """What there is to record of one group that was made.

    Attributes:
        step: the learner's when the group was made.
        episodes: see `services.coordinator.episode_figures.troubles_of`.
        scoring: see `services.coordinator.scoring_health.ScoringHealth.note`.
        dropped: why the group was dropped, or "".
    """

    group_id: int
    prompt_id: str
    step: int
    scores: Scores
    episodes: Mapping[str, object]
    scoring: Sequence[tuple[str, str]]
    dropped: str

    async def record(self, recorder: Recorder) -> None:
        """Write it down, which waits while the disk is full."""
        if self.episodes:
            await recorder.event("episode_troubles", group=self.group_id, **self.episodes)
        for kind, problem in self.scoring:
            await recorder.event(kind, problem=problem)
        if self.dropped:
            detail = next((verdict.detail for verdict in self.scores.verdicts if verdict.reward is None), "")
            await recorder.dropped(self.group_id, self.prompt_id, self.step, self.dropped, detail)
