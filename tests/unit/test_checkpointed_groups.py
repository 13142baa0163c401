"""Groups are read from a checkpoint as they were written."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from services.runs.checkpointed_groups import CheckpointedGroup, pack, unpack
from tests.refs import NOT_STORED
from volley.errors import JobError
from volley.records import Group, ModelCall, Prompt, Scores, Verdict, VerdictStatus

PROMPT = Prompt("p1", "2+2=", {"answer": "4"})


def checkpointed(group_id: int, lengths: list[int]) -> CheckpointedGroup:
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
        observation_S=np.arange(total // 3, dtype=np.int32),
        observation_at_S=np.sort(rng.integers(0, total, total // 3, dtype=np.int32)),
        earlier=tuple(f"said {i}" for i in range(len(lengths))),
        calls=tuple((ModelCall(f"asked {i}", "said", 2, 3, 0.5),) * i for i in range(len(lengths))),
    )
    verdicts = [Verdict(VerdictStatus.PASSED, 1.0, answer="4"), Verdict(VerdictStatus.INFRA_ERROR, None, detail="gone")]
    scores = Scores.pack(verdicts * (len(lengths) // 2), seconds=0.5, worker="reward-0")
    return CheckpointedGroup(group, PROMPT, scores, max_lag=2, generated=(1.0, 2.0), scored=2.5)


@pytest.mark.parametrize(
    "groups",
    [[], [checkpointed(0, [4, 1])], [checkpointed(0, [4, 1]), checkpointed(7, [1, 1, 5, 2]), checkpointed(8, [0, 3])]],
)
def test_groups_are_read_as_they_were_written(groups: list[CheckpointedGroup], tmp_path: Path) -> None:
    file = tmp_path / "groups.npz"
    file.write_bytes(pack(groups))
    back = unpack(file, {PROMPT.id: PROMPT})
    assert len(back) == len(groups)
    for ours, theirs in zip(groups, back, strict=True):
        for name in (field.name for field in fields(Group)):
            if name == "calls":
                assert theirs.group.calls == ours.group.calls
            else:
                np.testing.assert_array_equal(getattr(theirs.group, name), getattr(ours.group, name))
        assert theirs.group.tokens_T.dtype == np.int32
        assert replace(theirs, group=ours.group, scores=ours.scores) == ours
        assert theirs.scores.verdicts == ours.scores.verdicts
        np.testing.assert_array_equal(theirs.scores.rewards_n, ours.scores.rewards_n)


def test_a_ready_group_refers_to_its_arrays() -> None:
    group = checkpointed(3, [4, 1])
    ready = group.ready(NOT_STORED)
    assert ready.meta == group.group.meta()
    again = CheckpointedGroup.of(ready, group.group)
    assert all(getattr(again, field.name) is getattr(group, field.name) for field in fields(again))


def test_a_checkpoint_without_the_file_has_no_groups(tmp_path: Path) -> None:
    assert unpack(tmp_path / "groups.npz", {}) == []


@pytest.mark.parametrize(("groups", "named"), [([0], "prompt p1,"), ([0, 1, 2], "prompt p1 and 1 more,")])
def test_a_prompt_that_was_removed_from_the_data_is_named(groups: list[int], named: str, tmp_path: Path) -> None:
    other = checkpointed(0, [1])
    others = [replace(other, group=replace(other.group, prompt_id=f"p{1 + i % 2}")) for i in groups]
    file = tmp_path / "groups.npz"
    file.write_bytes(pack(others))
    with pytest.raises(JobError, match=named):
        unpack(file, {"p0": PROMPT})
