"""When a new weight group is formed, with fake actors and a fake learner."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.runs import weight_groups
from services.runs.weight_groups import WeightGroups
from tests.unit.fake_roles import until
from volley.errors import WorkerDied
from volley.job import RLJob
from volley.weight_group import WeightGroupTerms


@dataclass
class Actors:
    weight_group_members: tuple[tuple[str, int], ...] = (("actor-0", 1), ("actor-1", 2))
    invited: list[WeightGroupTerms] = field(default_factory=list)

    async def join_weight_group(self, terms: WeightGroupTerms) -> None:
        self.invited.append(terms)


@dataclass
class Learner:
    weight_group: str | None = None
    rendezvous: tuple[str, int] = ("host", 1)
    answers: list[bool | Exception] = field(default_factory=list)

    async def join_weight_group(self, terms: WeightGroupTerms) -> bool:
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        self.weight_group = terms.name if answer else None
        return answer


def groups(pool: Any, group: Any, **changes: Any) -> WeightGroups:
    job = RLJob.model_validate(
        {
            "name": "fake",
            "steps": 1,
            "model": {"path": "m"},
            "data": {"path": "d"},
            "scorer": {"kind": "countdown"},
            "objective": {"kind": "mean"},
            "broadcast": {"transport": "collective", "deadline_s": 0.01},
            **changes,
        }
    )
    return WeightGroups(job, pool, group)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_groups, "POLL_SECONDS", 0.01)


async def test_another_group_is_formed_when_the_actors_change_or_the_group_is_lost() -> None:
    actors, learner = Actors(), Learner()
    weight_group = groups(actors, learner, broadcast={"transport": "collective", "deadline_s": 60})
    async with weight_group.maintained():
        await until(lambda: weight_group.complete)
        (first,) = actors.invited
        assert (first.host, first.port, first.members, first.cuda) == ("host", 1, actors.weight_group_members, False)
        actors.weight_group_members = (("actor-0", 1),)
        assert not weight_group.complete
        await until(lambda: weight_group.complete)
        learner.weight_group = None
        assert not weight_group.complete
        await until(lambda: weight_group.complete)
        actors.weight_group_members = ()
        await asyncio.sleep(0.1)  # time to form one too many
        actors.weight_group_members = first.members
        await until(lambda: weight_group.complete)
    one = (("actor-0", 1),)
    assert [terms.members for terms in actors.invited] == [first.members, one, one, first.members]
    assert len({terms.name for terms in actors.invited}) == 4


async def test_a_group_that_was_not_formed_is_tried_again() -> None:
    actors, learner = Actors(), Learner(answers=[False, WorkerDied("learner-0", "killed"), True])
    weight_group = groups(actors, learner)
    async with weight_group.maintained():
        await until(lambda: weight_group.complete)
    assert len(actors.invited) == 3


async def test_the_group_uses_cuda_if_both_sides_have_gpus() -> None:
    for gpus, per_rank, cuda in ((1, 1, True), (1, 0, False), (0, 1, False)):
        actors = Actors()
        await groups(actors, Learner(), actors={"gpus": gpus}, learner={"gpus_per_rank": per_rank}).form()
        assert actors.invited[0].cuda is cuda


async def test_other_transports_have_no_group() -> None:
    actors = Actors()
    async with groups(actors, Learner(), broadcast={}).maintained():
        await asyncio.sleep(0.05)
    assert not actors.invited


async def test_an_error_inside_the_block_is_raised_unchanged() -> None:
    async def dies() -> None:
        async with groups(Actors(), Learner()).maintained():
            await asyncio.sleep(0.02)
            raise WorkerDied("actor-3", "killed")

    with pytest.raises(WorkerDied, match="actor-3"):
        await dies()


def test_adapters_cannot_use_the_collective_transport() -> None:
    with pytest.raises(ValueError, match=r"write broadcast: \{transport: object_store\}"):
        groups(Actors(), Learner(), model={"path": "m", "lora": {"rank": 4}})
