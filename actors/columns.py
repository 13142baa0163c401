"""Turns vLLM's outputs into the columns of a ``Group``, and appends further turns."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.config import GenerateRequest, Observation
from volley.records import Group


class Span(Protocol):
    """Tokens ``[start, end)`` of a completion were sampled with weights ``version``."""

    @property
    def version(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class FlatLogprobs(Protocol):
    """The log-probs of the sampled tokens, in order."""

    @property
    def logprobs(self) -> Sequence[float]: ...


class Completion(Protocol):
    """The part of vLLM's ``CompletionOutput`` used here."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> FlatLogprobs: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def weight_versions(self) -> Sequence[Span]: ...


Decode = Callable[[list[list[int]]], list[str]]
_T = TypeVar("_T", bound=np.generic)


def to_group(
    request: GenerateRequest, completions: Sequence[Completion], decode: Decode, *, actor: str, seconds: float
) -> Group:
    """The group of a request's finished completions, in order.

    Raises:
        ValueError: a completion lacks the log-prob or the weight version of a token.
    """
    stopped_n = np.array([c.finish_reason == "stop" for c in completions], dtype=np.bool_)
    lengths_n = np.array([len(c.token_ids) for c in completions], dtype=np.int32)
    tokens_T = flat([c.token_ids for c in completions], np.int32)
    logprobs_T = flat([c.logprobs.logprobs for c in completions], np.float32)
    versions_T = _versions([c.weight_versions for c in completions])
    if not len(tokens_T) == len(logprobs_T) == len(versions_T) == lengths_n.sum():
        raise ValueError(
            f"group {request.group_id}: {len(tokens_T)} tokens, {len(logprobs_T)} log-probs, {len(versions_T)} versions"
        )
    bodies = [
        list(c.token_ids[:-1] if stopped else c.token_ids) for c, stopped in zip(completions, stopped_n, strict=True)
    ]
    return Group(
        group_id=request.group_id,
        prompt_id=request.prompt_id,
        prompt_p=request.prompt_p,
        tokens_T=tokens_T,
        logprobs_T=logprobs_T,
        versions_T=versions_T,
        lengths_n=lengths_n,
        stopped_n=stopped_n,
        texts=tuple(decode(bodies)),
        actor=actor,
        seconds=seconds,
    )


def flat(columns: Sequence[Sequence[float]], dtype: type[_T]) -> NDArray[_T]:
    """The columns end to end."""
    return np.fromiter(chain.from_iterable(columns), dtype=dtype)


def _versions(spans: Sequence[Sequence[Span]]) -> NDArray[np.int32]:
    flat = list(chain.from_iterable(spans))
    return np.repeat(
        np.array([int(span.version) for span in flat], dtype=np.int32), [span.end - span.start for span in flat]
    )


def context_of(group: Group, sample: int) -> NDArray[np.int32]:
    """The context of a sample's next turn: its prompt, turns and observations."""
    start = int(group.lengths_n[:sample].sum())
    end = start + int(group.lengths_n[sample])
    mine = (group.observation_at_S >= start) & (group.observation_at_S < end)
    body = np.insert(group.tokens_T[start:end], group.observation_at_S[mine] - start, group.observation_S[mine])
    return np.concatenate([group.prompt_p, body])


def joined(
    group: Group, observation: Observation, turns: Sequence[Group | None], *, actor: str, seconds: float
) -> Group:
    """Append the observation and one more turn to the samples that continue.

    Args:
        turns: per sample a group of one sample, its next turn; None for samples that have ended.
    """
    parts = [_sample(group, i, observation.tokens[i], turn) for i, turn in enumerate(turns)]
    lengths_n = np.array([len(part.tokens) for part in parts], np.int32)
    starts_n = np.cumsum(lengths_n) - lengths_n
    earlier = group.earlier or ("",) * group.n
    return replace(
        group,
        tokens_T=np.concatenate([part.tokens for part in parts]),
        logprobs_T=np.concatenate([part.logprobs for part in parts]),
        versions_T=np.concatenate([part.versions for part in parts]),
        lengths_n=lengths_n,
        stopped_n=np.array([t.stopped_n[0] if t else group.stopped_n[i] for i, t in enumerate(turns)], np.bool_),
        texts=tuple(turn.texts[0] if turn else group.texts[i] for i, turn in enumerate(turns)),
        actor=actor,
        seconds=group.seconds + seconds,
        observation_S=np.concatenate([part.observation for part in parts]),
        observation_at_S=np.concatenate([part.at + start for part, start in zip(parts, starts_n, strict=True)]).astype(
            np.int32
        ),
        earlier=tuple(
            earlier[i] + group.texts[i] + observation.texts[i] if turn else earlier[i] for i, turn in enumerate(turns)
        ),
    )


class _Part(NamedTuple):
    """One sample's columns; ``at`` counts from the sample's first token."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    observation: NDArray[np.int32]
    at: NDArray[np.int32]


def _sample(group: Group, sample: int, observation: NDArray[np.int32] | None, turn: Group | None) -> _Part:
    start = int(group.lengths_n[:sample].sum())
    own = slice(start, start + int(group.lengths_n[sample]))
    mine = (group.observation_at_S >= own.start) & (group.observation_at_S < own.stop)
    before = _Part(
        group.tokens_T[own],
        group.logprobs_T[own],
        group.versions_T[own],
        group.observation_S[mine],
        group.observation_at_S[mine] - start,
    )
    if turn is None or observation is None:
        return before
    at = np.full(len(observation), len(before.tokens), np.int32)
    after = _Part(turn.tokens_T, turn.logprobs_T, turn.versions_T, observation, at)
    return _Part(*(np.concatenate(pair) for pair in zip(before, after, strict=True)))
