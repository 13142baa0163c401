"""vLLM's outputs become consistent columns of a group."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.columns import context_of, joined, to_group
from actors.config import GenerateRequest, Observation
from volley.records import Group


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Logprobs:
    logprobs: list[float]


@dataclass
class Completion:
    """The fields of vLLM's own class that are used."""

    token_ids: list[int]
    logprobs: Logprobs
    finish_reason: str
    weight_versions: list[Span]


def request(n: int) -> GenerateRequest:
    return GenerateRequest(7, "prompt", np.array([1, 2], dtype=np.int32), n, 1.0, 1.0, 64)


def decode(bodies: list[list[int]]) -> list[str]:
    return [" ".join(map(str, body)) for body in bodies]


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
    cuts = sorted(draw(st.sets(st.integers(1, len(tokens) - 1), max_size=3))) if len(tokens) > 1 else []
    spans = [Span(str(3 + i), a, b) for i, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(tokens)], strict=True))]
    logprobs = [-draw(st.floats(0, 20, width=32)) for _ in tokens]
    return Completion(tokens, Logprobs(logprobs), draw(st.sampled_from(["stop", "length"])), spans)


@given(st.lists(completions(), min_size=1, max_size=6))
def test_columns_concatenate_the_samples_in_order(made: list[Completion]) -> None:
    group = to_group(request(len(made)), made, decode, actor="actor-3", seconds=0.5)
    at = 0
    for i, completion in enumerate(made):
        for j, token in enumerate(completion.token_ids):
            (span,) = [span for span in completion.weight_versions if span.start <= j < span.end]
            assert group.tokens_T[at] == token
            assert group.logprobs_T[at] == np.float32(completion.logprobs.logprobs[j])
            assert group.versions_T[at] == int(span.version)
            at += 1
        stopped = completion.finish_reason == "stop"
        assert group.lengths_n[i] == len(completion.token_ids)
        assert group.stopped_n[i] == stopped
        assert group.texts[i] == " ".join(map(str, completion.token_ids[: -1 if stopped else None]))
    assert at == len(group.tokens_T) == len(group.logprobs_T) == len(group.versions_T)
    assert [column.dtype.name for column in (group.tokens_T, group.logprobs_T, group.versions_T)] == [
        "int32",
        "float32",
        "int32",
    ]
    assert (group.group_id, group.prompt_id, group.actor, group.n) == (7, "prompt", "actor-3", len(made))


def test_a_completion_without_a_version_per_token_is_rejected() -> None:
    torn = Completion([4, 5, 6], Logprobs([-1.0, -1.0, -1.0]), "stop", [Span("0", 0, 2)])
    with pytest.raises(ValueError, match="group 7: 3 tokens, 3 log-probs, 2 versions"):
        to_group(request(1), [torn], decode, actor="actor-0", seconds=0.0)


def turn(*samples: list[int], version: int = 0) -> Group:
    """The group an engine returns for these samples; log-probs and versions differ for every token."""
    made = [
        Completion(
            ids, Logprobs([-ids[0] - i / 10 for i in range(len(ids))]), "stop", [Span(str(version), 0, len(ids))]
        )
        for ids in samples
    ]
    return to_group(request(len(samples)), made, decode, actor="actor-0", seconds=0.5)


def test_a_turn_is_appended_after_earlier_turns_and_observations() -> None:
    first = turn([10, 11], [20], [30, 31, 32])
    group: Any = None  # the reference is not used
    shown = Observation(group, (None, np.array([7, 8], np.int32), np.array([9], np.int32)), ("", "<7 8>", "<9>"))
    second = joined(first, shown, [None, turn([21, 22], version=1), turn([33], version=2)], actor="a", seconds=0.25)
    assert second.tokens_T.tolist() == [10, 11, 20, 21, 22, 30, 31, 32, 33]
    assert second.versions_T.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 2]
    assert second.logprobs_T == pytest.approx([-10, -10.1, -20, -21, -21.1, -30, -30.1, -30.2, -33])
    assert second.lengths_n.tolist() == [2, 3, 4]
    assert (second.observation_S.tolist(), second.observation_at_S.tolist()) == ([7, 8, 9], [3, 3, 8])
    assert second.texts == ("10", "21", "")
    assert second.earlier == ("", "<7 8>", "30 31<9>")
    assert (second.turns, second.meta().turns, second.seconds) == (5, 5, 0.75)
    again = Observation(group, (None, None, np.array([5, 6], np.int32)), ("", "", "<5 6>"))
    third = joined(second, again, [None, None, turn([34, 35])], actor="a", seconds=0.25)
    assert [context_of(third, i)[2:].tolist() for i in range(3)] == [
        [10, 11],
        [20, 7, 8, 21, 22],
        [30, 31, 32, 9, 33, 5, 6, 34, 35],
    ]
    assert third.turns == 6
