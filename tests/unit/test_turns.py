"""Samples that fail are shown why and continue; the others keep their verdicts."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.config import GenerateRequest
from services.coordinator.turns import Turns, make_group, room_for
from tests.refs import NOT_STORED
from volley.errors import GroupGone, JobError
from volley.records import GroupMeta, Prompt, Scores, Verdict, VerdictStatus
from volley.turns import TurnsSpec

PROMPT = Prompt("p", "text", {"tests": ["one", "two"]})
PASSED, GONE = Verdict(VerdictStatus.PASSED, 1.0), Verdict(VerdictStatus.INFRA_ERROR, None, detail="boom")
FAILED = Verdict(VerdictStatus.WRONG_ANSWER, 0.0, detail="4 is not 5", failing_test=1)
REQUEST = GenerateRequest(3, "p", np.zeros(2, np.int32), 3, 1.0, 1.0, 8, seed=5)
SPEC = TurnsSpec(max_count=3, observation="[{{ turn }}: {{ verdict.detail }}, {{ tests[verdict.failing_test] }}]")


def letters(text: str, *, add_special_tokens: bool) -> Any:
    assert not add_special_tokens
    return SimpleNamespace(input_ids=[ord(letter) for letter in text])


@dataclass
class FakeActors:
    """Remembers its requests; in place of a reference, a group is the number of its request."""

    version: int = 0
    asked: list[GenerateRequest] = field(default_factory=list)
    cut: bool = False

    async def generate(self, request: GenerateRequest) -> tuple[Any, GroupMeta]:
        self.asked.append(request)
        further = 0 if request.after is None or self.cut else sum(each is not None for each in request.after.tokens)
        turns = request.n + further * (len(self.asked) - 1)
        return len(self.asked), GroupMeta(3, "p", "actor-0", 3, 2, 9, -9.0, 0, 0, 0, 0.1, turns)

    async def broadcast(self, update: Any) -> Any:
        raise AssertionError("nothing is broadcast here")


@dataclass
class FakeRewards:
    """Returns the given verdicts, turn by turn."""

    turns: list[list[Verdict]]
    seen: list[Any] = field(default_factory=list)

    async def score(self, group: Any, prompt: Prompt) -> Scores:
        self.seen.append(group)
        return Scores.pack(self.turns[len(self.seen) - 1], seconds=0.5, worker="reward-0")


async def made(actors: FakeActors, rewards: FakeRewards, spec: TurnsSpec | None = SPEC) -> tuple[Any, list[str]]:
    stages: list[str] = []
    turns = Turns(spec, letters) if spec else None
    group = await make_group(REQUEST, PROMPT, actors=actors, rewards=rewards, turns=turns, on_stage=stages.append)
    return group, stages


async def test_a_failed_sample_continues_until_it_passes_or_has_no_turn_left() -> None:
    flaky = [FAILED, PASSED, GONE]  # samples that took no part in a turn keep their verdicts
    actors, rewards = FakeActors(), FakeRewards([[FAILED, PASSED, GONE], [FAILED, FAILED, PASSED], flaky])
    group, stages = await made(actors, rewards)
    assert stages == ["generate", "score"] * 3
    assert [request.seed for request in actors.asked] == [5, 8, 11]
    after = [request.after for request in actors.asked]
    assert after[0] is None
    assert after[1] is not None
    shown_after: Any = after[1].group
    assert (shown_after, after[1].texts) == (1, ("[1: 4 is not 5, two]", "", ""))
    assert "".join(map(chr, after[1].tokens[0])) == "[1: 4 is not 5, two]"  # type: ignore[arg-type]
    assert after[1].tokens[1:] == (None, None)
    assert (group.group, rewards.seen) == (3, [1, 2, 3])
    assert group.scores.verdicts == (FAILED, PASSED, GONE)
    assert group.scores.seconds == 1.5


async def test_there_is_one_turn_if_no_sample_can_continue_or_the_job_has_no_turns() -> None:
    group, stages = await made(FakeActors(), FakeRewards([[PASSED, PASSED, GONE]]))
    assert (group.group, stages) == (1, ["generate", "score"])
    group, stages = await made(FakeActors(), FakeRewards([[FAILED] * 3]), None)
    assert (group.group, stages) == (1, ["generate", "score"])


async def test_truncated_samples_have_no_further_turn() -> None:
    group, _ = await made(FakeActors(cut=True), FakeRewards([[FAILED] * 3]))
    assert (group.group, group.scores.verdicts) == (1, (FAILED,) * 3)


async def test_a_group_lost_with_its_node_is_made_again_from_its_first_turn() -> None:
    class OnALostNode(FakeActors):
        async def generate(self, request: GenerateRequest) -> tuple[Any, GroupMeta]:
            made = await super().generate(request)
            if len(self.asked) in self.gone:
                raise GroupGone("its node is gone")
            return made

        gone: tuple[int, ...] = (2,)

    actors = OnALostNode()
    group, _ = await made(actors, FakeRewards([[FAILED] * 3, [FAILED] * 3, [PASSED] * 3]))
    assert [request.after is None for request in actors.asked] == [True, False, True, False]
    assert group.group == 4
    actors = OnALostNode()
    actors.gone = (2, 4, 6)
    with pytest.raises(GroupGone):
        await made(actors, FakeRewards([[FAILED] * 3] * 3))


def test_a_long_observation_loses_its_middle() -> None:
    spec = SPEC.model_copy(update={"observation": "<a>{{ verdict.detail }}</a>", "max_observation_tokens": 7})
    observation = Turns(spec, letters).observation(
        NOT_STORED, PROMPT, Scores.pack([replace(FAILED, detail="x" * 99)]), 1
    )
    assert observation is not None
    assert "".join(map(chr, observation.tokens[0])) == "<a>x/a>"  # type: ignore[arg-type]


def test_an_invalid_template_is_reported_with_its_key() -> None:
    with pytest.raises(JobError, match=r"turns\.observation: line 1"):
        Turns(SPEC.model_copy(update={"observation": "{{"}), letters)
    with pytest.raises(JobError, match=r"turns\.observation: prompt p: 'nothing' is undefined"):
        Turns(SPEC.model_copy(update={"observation": "{{ nothing }}"}), letters).observation(
            NOT_STORED, PROMPT, Scores.pack([FAILED]), 1
        )


def test_all_turns_together_must_fit_the_model() -> None:
    assert room_for(100, None) == {"room": 100, "key": "sampling.max_tokens"}
    assert room_for(100, TurnsSpec(max_count=3, observation="x", max_observation_tokens=40))["room"] == 380
