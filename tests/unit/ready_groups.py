"""Groups that wait to be trained on, from their rewards."""

from collections.abc import Sequence

from services.coordinator.records import ReadyGroup
from tests.refs import NOT_STORED
from volley.records import GroupMeta, Prompt, Scores, Verdict, VerdictStatus


def scores_of(rewards: Sequence[float | None], ranks: Sequence[float] | None = None) -> Scores:
    return Scores.pack(
        [
            Verdict(VerdictStatus.INFRA_ERROR, None)
            if reward is None
            else Verdict(VerdictStatus.PASSED, reward, answer=str(reward), rank=None if ranks is None else ranks[i])
            for i, reward in enumerate(rewards)
        ]
    )


def ready(
    rewards: Sequence[float | None],
    *,
    group_id: int = 0,
    cut: tuple[int, ...] = (),
    ranks: Sequence[float] | None = None,
) -> ReadyGroup:
    meta = GroupMeta(group_id, f"p{group_id}", "a", len(rewards), 3, 9, -3.0, 0, 0, len(cut), 0.1, len(rewards), cut)
    return ReadyGroup(NOT_STORED, meta, Prompt(meta.prompt_id, ""), scores_of(rewards, ranks), 0, (0.0, 1.0), 2.0)
