"""Samples that fail are shown why and go on; the others keep what they have."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.config import GenerateRequest
from services.turns import Turns, make_group, room_for
from volley.errors import GroupGone, JobError
from volley.records import GroupMeta, Prompt, Scores, Verdict, VerdictStatus
from volley.turns import TurnsSpec

PROMPT = Prompt("p", "text", {"tests": ["one", "two"]})
PASSED, GONE = Verdict(VerdictStatus.PASSED, 1.0), Verdict(VerdictStatus.INFRA_ERROR, None, detail="boom")
FAILED = Verdict(VerdictStatus.WRONG_ANSWER, 0.0, detail="4 is not 5", failing_test=1)
REQUEST = GenerateRequest(3, "p", np.zeros(2, np.int32), 3, 1.0, 1.0, 8, seed=5)
SPEC = TurnsSpec(most=3, show="[{{ turn }}: {{ verdict.detail }}, {{ tests[verdict.failing_test] }}]")


def letters(text: str, *, add_special_tokens: bool) -> Any:
    assert not add_special_tokens
    return SimpleNamespace(input_ids=[ord(letter) for letter in text])


@dataclass
class FakeActors:
    """The requests it got; a group is the number of its request."""

    version: int = 0
    asked: list[GenerateRequest] = field(default_factory=list)
    cut: bool = False

    async def generate(self, request: GenerateRequest) -> tuple[Any, GroupMeta]:
        self.asked.append(request)
        further = 0 if request.after is None or self.cut else sum(each is not None for each in request.after.tokens)
        turns = request.n + further * (len(self.asked) - 1)
        return len(self.asked), GroupMeta(3, "p", "actor-0", 3, 2, 9, -9.0, 0, 0, 0, 0.1, turns)

    async def broadcast(self, update: Any) -> Any:
        raise AssertionError("nobody broadcasts")


@dataclass
class FakeRewards:
    """Verdicts turn by turn."""

    turns: list[list[Verdict]]
    seen: list[Any] = field(default_factory=list)

    async def score(self, group: Any, prompt: Prompt) -> Scores:
        self.seen.append(group)
        return Scores.pack(self.turns[len(self.seen) - 1], seconds=0.5, worker="reward-0")


async def made(actors: FakeActors, rewards: FakeRewards, spec: TurnsSpec | None = SPEC) -> tuple[Any, list[str]]:
    stages: list[str] = []
    turns = Turns(spec, letters) if spec else None
    group = await make_group(REQUEST, PROMPT, actors=actors, rewards=rewards, turns=turns, stage=stages.append)
    return group, stages


async def test_one_that_fails_is_shown_why_until_it_passes_or_has_no_turn_left() -> None:
    flaky = [FAILED, PASSED, GONE]  # what is scored again is not asked again
    actors, rewards = FakeActors(), FakeRewards([[FAILED, PASSED, GONE], [FAILED, FAILED, PASSED], flaky])
    group, stages = await made(actors, rewards)
    assert stages == ["generate", "score"] * 3
    assert [request.seed for request in actors.asked] == [5, 8, 11]
    after = [request.after for request in actors.asked]
    assert after[0] is None
    assert after[1] is not None
    assert (after[1].group, after[1].texts) == (1, ("[1: 4 is not 5, two]", "", ""))
    assert "".join(map(chr, after[1].tokens[0])) == "[1: 4 is not 5, two]"  # type: ignore[arg-type]
    assert after[1].tokens[1:] == (None, None)
    assert (group.group, rewards.seen) == (3, [1, 2, 3])
    assert group.scores.verdicts == (FAILED, PASSED, GONE)
    assert group.scores.seconds == 1.5


async def test_there_is_no_further_turn_where_all_have_ended_or_none_is_wanted() -> None:
    group, stages = await made(FakeActors(), FakeRewards([[PASSED, PASSED, GONE]]))
    assert (group.group, stages) == (1, ["generate", "score"])
    group, stages = await made(FakeActors(), FakeRewards([[FAILED] * 3]), None)
    assert (group.group, stages) == (1, ["generate", "score"])


async def test_samples_that_were_cut_have_no_further_turn() -> None:
    group, _ = await made(FakeActors(cut=True), FakeRewards([[FAILED] * 3]))
    assert (group.group, group.scores.verdicts) == (1, (FAILED,) * 3)


async def test_a_group_that_went_with_a_node_is_made_from_its_first_turn_again() -> None:
    class OnANodeThatGoes(FakeActors):
        async def generate(self, request: GenerateRequest) -> tuple[Any, GroupMeta]:
            made = await super().generate(request)
            if len(self.asked) in self.gone:
                raise GroupGone("its node is gone")
            return made

        gone: tuple[int, ...] = (2,)

    actors = OnANodeThatGoes()
    group, _ = await made(actors, FakeRewards([[FAILED] * 3, [FAILED] * 3, [PASSED] * 3]))
    assert [request.after is None for request in actors.asked] == [True, False, True, False]
    assert group.group == 4
    actors = OnANodeThatGoes()
    actors.gone = (2, 4, 6)
    with pytest.raises(GroupGone):
        await made(actors, FakeRewards([[FAILED] * 3] * 3))


def test_what_is_shown_is_cut_in_its_middle() -> None:
    spec = SPEC.model_copy(update={"show": "<a>{{ verdict.detail }}</a>", "most_shown": 7})
    shown = Turns(spec, letters).shown(1, PROMPT, Scores.pack([replace(FAILED, detail="x" * 99)]), 1)
    assert shown is not None
    assert "".join(map(chr, shown.tokens[0])) == "<a>x/a>"  # type: ignore[arg-type]


def test_a_template_that_can_not_be_used_is_named() -> None:
    with pytest.raises(JobError, match=r"turns\.show: line 1"):
        Turns(SPEC.model_copy(update={"show": "{{"}), letters)
    with pytest.raises(JobError, match=r"turns\.show: prompt p: 'nothing' is undefined"):
        Turns(SPEC.model_copy(update={"show": "{{ nothing }}"}), letters).shown(1, PROMPT, Scores.pack([FAILED]), 1)


def test_all_turns_fit_the_model() -> None:
    assert room_for(100, None) == {"room": 100, "key": "sampling.max_tokens"}
    assert room_for(100, TurnsSpec(most=3, show="x", most_shown=40))["room"] == 380
