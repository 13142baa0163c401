"""The actors' log-probs of a few tokens are compared with the learner's."""

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from actors.config import GenerateRequest
from services.data.tokens import EncodedPrompt
from services.runs.served_check import TOLERANCE, check_served
from tests.learner_batches import random_group
from volley.errors import ServedWeightsDiffer
from volley.job import RLJob
from volley.records import Group, Prompt
from volley.refs import Ref

PROMPT = EncodedPrompt(Prompt("p", "x"), np.arange(3, dtype=np.int32))
GROUP = random_group(np.random.default_rng(0), 0)


@dataclass
class Stored:
    """In place of a Ray reference."""

    group: Group

    def __await__(self) -> Generator[Any, None, Group]:
        yield from ()
        return self.group


class Actors:
    """In place of the pool: each actor's log-probs are off by a constant."""

    def __init__(self, **off: float) -> None:
        self.off = off
        self.requests: list[GenerateRequest] = []

    async def probe(self, request: GenerateRequest) -> Mapping[str, Ref[Group]]:
        self.requests.append(request)
        moved = {name: GROUP.logprobs_T + np.float32(off) for name, off in self.off.items()}
        return {name: Stored(replace(GROUP, logprobs_T=logprobs_T)) for name, logprobs_T in moved.items()}


class Learner:
    async def score(self, group: Ref[Group]) -> NDArray[np.float32]:
        return GROUP.logprobs_T


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some_moe"}))
    return {
        "name": "j",
        "steps": 1,
        "prompts_per_step": 1,
        "model": {"path": tmp_path},
        "data": {"path": "d"},
        "scorer": {"kind": "countdown"},
        "objective": {"kind": "mean"},
        "sampling": {"n": 16, "max_tokens": 5, "temperature": 0.7, "seeded": True},
    }


@pytest.mark.parametrize("dtype", list(TOLERANCE))
async def test_a_small_difference_passes_and_a_large_one_names_actor_and_model(
    tree: dict[str, Any], dtype: str
) -> None:
    job = RLJob.model_validate({**tree, "model": {**tree["model"], "dtype": dtype}})
    fine, wrong = 0.9 * TOLERANCE[dtype], -1.1 * TOLERANCE[dtype]
    assert await check_served(Actors(a=fine / 2, b=-fine), Learner(), job, PROMPT) == pytest.approx(fine, rel=1e-4)
    with pytest.raises(ServedWeightsDiffer, match=rf"^b does not serve .* {dtype} allows .* of type some_moe "):
        await check_served(Actors(a=fine, b=wrong), Learner(), job, PROMPT)


async def test_log_probs_that_are_no_numbers_differ(tree: dict[str, Any]) -> None:
    with pytest.raises(ServedWeightsDiffer, match="differ by nan"):
        await check_served(Actors(a=float("nan")), Learner(), RLJob.model_validate(tree), PROMPT)


async def test_the_probe_is_small_and_sampled_as_the_job_samples(tree: dict[str, Any]) -> None:
    actors = Actors(a=0.0)
    await check_served(actors, Learner(), RLJob.model_validate(tree), PROMPT)
    (request,) = actors.requests
    assert (request.n, request.max_tokens, request.temperature, request.top_p) == (4, 5, 0.7, 1.0)
    assert request.group_id < 0
    assert request.seed is not None, "the engine's own random numbers stay the run's"


async def test_a_check_of_no_actor_is_no_check(tree: dict[str, Any]) -> None:
    assert await check_served(Actors(), Learner(), RLJob.model_validate(tree), PROMPT) is None
