"""The line that says what a run starts names exactly the processes that it starts."""

from typing import Any

import pytest

from services.runs.episodes import roles_started
from volley.job import EvalJob

PROGRAM = {"rollout": {"kind": "program", "target": "agent:solve"}}
SCORER = {"scorer": {"kind": "exact"}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (SCORER, "2 actor(s), 3 reward worker(s)"),
        (PROGRAM, "2 actor(s), 4 environment worker(s)"),
        ({**PROGRAM, **SCORER}, "2 actor(s), 4 environment worker(s), 3 reward worker(s)"),
    ],
)
def test_only_what_is_started_is_named(changes: dict[str, Any], words: str) -> None:
    counts = {"actors": {"count": 2}, "reward_workers": {"count": 3}, "environment_workers": {"count": 4}}
    tree = {"name": "x", "model": {"path": "m"}, "data": {"path": "d"}, "sampling": {"n": 1}, "ks": [1], **counts}
    assert roles_started(EvalJob.model_validate({**tree, **changes})) == words
