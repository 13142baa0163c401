"""Groups in a checkpoint come back as they were."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from services.kept_groups import KeptGroup, packed, referred, unpacked
from services.steps import ReadyGroup
from volley.records import Group, Prompt, Scores, Verdict, VerdictStatus

PROMPT = Prompt("p1", "2+2=", {"answer": "4"})


def kept(group_id: int, lengths: list[int]) -> KeptGroup:
    rng = np.random.default_rng(group_id)
    total = sum(lengths)
    group = Group(
        group_id=group_id,
        prompt_id=PROMPT.id,
        prompt_p=rng.integers(0, 99, 3 + group_id, dtype=np.int32),
        tokens_T=rng.integers(0, 99, total, dtype=np.int32),
        logprobs_T=rng.normal(size=total).astype(np.float32),
        versions_T=np.sort(rng.integers(3, 5, total, dtype=np.int32)),
        lengths_n=np.array(lengths, dtype=np.int32),
        stopped_n=rng.random(len(lengths)) < 0.5,
        texts=tuple(f"text {i} é\n" for i in range(len(lengths))),
        actor="actor-1",
        seconds=0.25,
        shown_S=np.arange(total // 3, dtype=np.int32),
        shown_at_S=np.sort(rng.integers(0, total, total // 3, dtype=np.int32)),
        earlier=tuple(f"said {i}" for i in range(len(lengths))),
    )
    verdicts = [Verdict(VerdictStatus.PASSED, 1.0, answer="4"), Verdict(VerdictStatus.INFRA_ERROR, None, detail="gone")]
    scores = Scores.pack(verdicts * (len(lengths) // 2), seconds=0.5, worker="reward-0")
    ready = ReadyGroup(None, group.meta(), PROMPT, scores, max_lag=2, generated=(1.0, 2.0), scored=2.5)
    return KeptGroup(group, ready)


@pytest.mark.parametrize("groups", [[], [kept(0, [4, 1])], [kept(0, [4, 1]), kept(7, [1, 1, 5, 2]), kept(8, [0, 3])]])
def test_groups_come_back_as_they_were(groups: list[KeptGroup], tmp_path: Path) -> None:
    file = tmp_path / "groups.npz"
    file.write_bytes(packed(groups))
    back = unpacked(file, {PROMPT.id: PROMPT})
    assert len(back) == len(groups)
    for ours, theirs in zip(groups, back, strict=True):
        for name in (field.name for field in fields(Group)):
            np.testing.assert_array_equal(getattr(theirs.group, name), getattr(ours.group, name))
        assert theirs.group.tokens_T.dtype == np.int32
        assert replace(theirs.ready, scores=ours.ready.scores) == ours.ready
        assert theirs.ready.scores.verdicts == ours.ready.scores.verdicts
        np.testing.assert_array_equal(theirs.ready.scores.rewards_n, ours.ready.scores.rewards_n)
        assert referred(theirs, "ref").group == "ref"


def test_a_checkpoint_without_the_file_has_none(tmp_path: Path) -> None:
    assert unpacked(tmp_path / "groups.npz", {}) == []
