"""From vLLM's outputs to the columns of a ``Group``."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.config import GenerateRequest
from volley.records import Group


class Span(Protocol):
    """Tokens ``[start, end)`` of a completion were sampled under weights ``version``."""

    @property
    def version(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class FlatLogprobs(Protocol):
    """The chosen tokens' log-probs, one after the other."""

    @property
    def logprobs(self) -> Sequence[float]: ...


class Completion(Protocol):
    """The part of vLLM's ``CompletionOutput`` that is read here."""

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
    """The finished completions of one request, in order.

    Raises:
        ValueError: a completion has not one log-prob and one weight version per token.
    """
    stopped_n = np.array([c.finish_reason == "stop" for c in completions], dtype=np.bool_)
    lengths_n = np.array([len(c.token_ids) for c in completions], dtype=np.int32)
    tokens_T = _flat([c.token_ids for c in completions], np.int32)
    logprobs_T = _flat([c.logprobs.logprobs for c in completions], np.float32)
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


def _flat(columns: Sequence[Sequence[float]], dtype: type[_T]) -> NDArray[_T]:
    return np.fromiter(chain.from_iterable(columns), dtype=dtype)


def _versions(spans: Sequence[Sequence[Span]]) -> NDArray[np.int32]:
    flat = list(chain.from_iterable(spans))
    return np.repeat(
        np.array([int(span.version) for span in flat], dtype=np.int32), [span.end - span.start for span in flat]
    )
