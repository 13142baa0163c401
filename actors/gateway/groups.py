"""n sessions to the `Group` that the learner takes.

    session 0   [prompt ........][sampled][observation][sampled]
    session 1   [prompt .][other][sampled]
                 ^ common to all: the group's prompt; all other context is observation

The longest branch of a session is its sample. A session without an answer becomes a sample without tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from actors.columns import flat
from actors.gateway.session import Branch, Call, End, Session
from volley.records import Group, ModelCall

MAX_SPANS = 64
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """What a session recorded besides the tokens of its sample.

    Attributes:
        end: why it took no further call before the episode was over; None if it still did.
        calls: calls that the model answered.
        observed: tokens of its sample that the model did not sample, behind the prompt.
        rewrites: calls that did not continue the history; ``rewrite`` says what the first of them changed.
        parse_failures: replies with a tool call that could not be parsed.
        abandoned: calls whose client went away before the answer.
        calling: when the model was answering a call, in seconds since the sessions were opened; short pauses are left
            out beyond `MAX_SPANS`.
        calling_seconds: how long it answered in all.
    """

    end: End | None
    calls: int
    observed: int
    rewrites: int = 0
    rewrite: str = ""
    parse_failures: int = 0
    abandoned: int = 0
    calling: tuple[tuple[float, float], ...] = ()
    calling_seconds: float = 0.0


def group_of(
    sessions: Sequence[Session],
    decode: Decode,
    *,
    group_id: int,
    prompt_id: str,
    actor: str,
    seconds: float,
    opened: float = 0.0,
) -> tuple[Group, tuple[EpisodeReport, ...]]:
    """The group of n sessions, and a report on each.

    Args:
        decode: token ids to text, special tokens included.
        opened: when the sessions were opened, on the clock of `time.perf_counter`; ``seconds`` ago.
    """
    branches = [session.longest or Branch() for session in sessions]
    prompt = _common([branch.calls[0].context for branch in branches if branch.calls])
    parts = [_part(branch, len(prompt)) for branch in branches]
    starts_n = np.cumsum([0, *(len(part.tokens) for part in parts)])
    group = Group(
        group_id=group_id,
        prompt_id=prompt_id,
        prompt_p=np.array(prompt, np.int32),
        tokens_T=flat([part.tokens for part in parts], np.int32),
        logprobs_T=flat([part.logprobs for part in parts], np.float32),
        versions_T=flat([part.versions for part in parts], np.int32),
        lengths_n=np.array([len(part.tokens) for part in parts], np.int32),
        stopped_n=np.array([_stopped(*pair) for pair in zip(sessions, branches, strict=True)], np.bool_),
        texts=tuple(_answer(branch, decode) for branch in branches),
        actor=actor,
        seconds=seconds,
        observation_S=flat([part.observed for part in parts], np.int32),
        observation_at_S=flat(
            [[at + start for at in part.at] for part, start in zip(parts, starts_n[:-1], strict=True)], np.int32
        ),
        calls=tuple(_calls(branch, decode) for branch in branches),
    )
    reports = (_report(session, part, opened) for session, part in zip(sessions, parts, strict=True))
    return group, tuple(reports)


@dataclass(frozen=True, slots=True)
class _Part:
    """One sample; ``at`` counts from its first token."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    observed: list[int]
    at: list[int]


def _common(contexts: Sequence[list[int]]) -> list[int]:
    """The longest beginning that all have; [] if there are none."""
    if not contexts:
        return []
    low, high = min(contexts), max(contexts)  # between them, all others share their common beginning
    same = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:same]


def _part(branch: Branch, prompt: int) -> _Part:
    part = _Part([], [], [], [], [])
    for number, call in enumerate(branch.calls):
        observed = call.context[prompt:] if number == 0 else call.context
        part.observed.extend(observed)
        part.at.extend([len(part.tokens)] * len(observed))
        part.tokens.extend(call.drawn.tokens)
        part.logprobs.extend(call.drawn.logprobs)
        part.versions.extend(call.drawn.versions)
    return part


def _stopped(session: Session, branch: Branch) -> bool:
    cut = session.end is not None and session.end.is_limit
    return bool(branch.calls) and branch.calls[-1].drawn.stopped and not cut


def _answer(branch: Branch, decode: Decode) -> str:
    """The last answer up to the text that stopped it, as the program saw it."""
    if not branch.calls:
        return ""
    text, stop = decode(body_of(branch.calls[-1])), branch.calls[-1].drawn.stop_text
    return text.partition(stop)[0] if stop else text


def body_of(call: Call) -> list[int]:
    """The sampled ids without the token that ended them."""
    return call.drawn.tokens if call.drawn.stop is None else call.drawn.tokens[:-1]


def _calls(branch: Branch, decode: Decode) -> tuple[ModelCall, ...]:
    return tuple(
        ModelCall(
            context=decode(call.context),
            answer=decode(body_of(call)),
            observed=len(call.context),
            tokens=len(call.drawn.tokens),
            seconds=round(call.drawn.seconds, 3),
        )
        for call in branch.calls
    )


def _report(session: Session, part: _Part, opened: float) -> EpisodeReport:
    calls = [call.drawn for call in session.all_calls]
    return EpisodeReport(
        end=session.end,
        calls=session.calls,
        observed=len(part.observed),
        rewrites=session.rewrites,
        rewrite=session.rewrite,
        parse_failures=session.parse_failures,
        abandoned=session.abandoned,
        calling=_bounded([(each.begun - opened, each.begun - opened + each.seconds) for each in calls]),
        calling_seconds=sum(each.seconds for each in calls),
    )


def _bounded(spans: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """At most `MAX_SPANS` of spans that follow one another: those with the shortest pauses between them are joined."""
    pauses = sorted(range(1, len(spans)), key=lambda at: spans[at - 1][1] - spans[at][0])[: MAX_SPANS - 1]
    starts = [0, *sorted(pauses)]
    ends = [*(at - 1 for at in starts[1:]), len(spans) - 1]
    return tuple((spans[first][0], spans[last][1]) for first, last in zip(starts, ends, strict=True)) if spans else ()
