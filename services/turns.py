"""How a group is made: generated and scored, and where the job has turns, shown what failed and generated on.

prompt ─> n samples ─> verdicts ──all passed, or no turn left──> group, scores
             ^             │
             └── shown: why a sample did not pass; each goes on behind its own turns
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jinja2
import jinja2.sandbox
import numpy as np
from numpy.typing import NDArray

from actors.config import GenerateRequest, Shown
from services.roles import Generator, Judge
from volley.errors import GroupGone, JobError
from volley.records import GroupMeta, Prompt, Scores, Verdict, VerdictStatus
from volley.turns import TurnsSpec

ATTEMPTS = 3  # at a group whose turns go with nodes
_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
)


class Turns:
    """What is shown to samples that did not pass.

    Raises:
        JobError: ``turns.show`` does not parse.
    """

    def __init__(self, spec: TurnsSpec, tokenizer: Any) -> None:
        self.most, self._spec, self._tokenizer = spec.most, spec, tokenizer
        try:
            self._template = _ENVIRONMENT.from_string(spec.show)
        except jinja2.TemplateSyntaxError as error:
            raise JobError(f"turns.show: line {error.lineno}: {error.message}") from error

    def shown(self, group: Any, prompt: Prompt, scores: Scores, turn: int) -> Shown | None:
        """What each sample is shown after its turn number ``turn``, from 1; None where all have ended.

        Raises:
            JobError: the template can not be rendered for a verdict.
        """
        texts = [self._text(prompt, verdict, turn) if _goes_on(verdict) else "" for verdict in scores.verdicts]
        if not any(texts):
            return None
        return Shown(group, tuple(self._tokens(text) if text else None for text in texts), tuple(texts))

    def _text(self, prompt: Prompt, verdict: Verdict, turn: int) -> str:
        try:
            return self._template.render({**prompt.reference, "verdict": verdict, "turn": turn})
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise JobError(f"turns.show: prompt {prompt.id}: {error}") from error

    def _tokens(self, text: str) -> NDArray[np.int32]:
        """The middle goes where it is too long: begin and end hold the turn's own tokens."""
        ids = np.asarray(self._tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)
        most = self._spec.most_shown
        return ids if len(ids) <= most else np.concatenate([ids[: most - most // 2], ids[len(ids) - most // 2 :]])


def _goes_on(verdict: Verdict) -> bool:
    return verdict.status is not VerdictStatus.PASSED and verdict.status.bears_reward


def turns_of(spec: TurnsSpec | None, tokenizer: Any) -> Turns | None:
    """As `Turns`; None where the job has one turn."""
    return Turns(spec, tokenizer) if spec else None


def room_for(max_tokens: int, turns: TurnsSpec | None, key: str = "sampling.max_tokens") -> dict[str, Any]:
    """Arguments of `services.tokens.encode_prompts`: what may follow a prompt, and where the job says so."""
    if turns is None:
        return {"room": max_tokens, "key": key}
    return {"room": turns.room(max_tokens), "key": f"turns.most x {key} + (turns.most - 1) x turns.most_shown"}


class Made(NamedTuple):
    """A group with its scores. ``generated`` is when its generation began and ended, seconds since 1970."""

    group: Any
    meta: GroupMeta
    scores: Scores
    generated: tuple[float, float]


async def make_group(
    request: GenerateRequest,
    prompt: Prompt,
    *,
    actors: Generator,
    rewards: Judge,
    turns: Turns | None,
    stage: Callable[[str], None] = lambda _: None,
) -> Made:
    """n samples of a prompt and their verdicts, after as many turns as they need and may have.

    Args:
        stage: told ``generate`` and ``score`` as they begin.

    Raises:
        GroupGone: a node took the group with it, `ATTEMPTS` times.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(GroupGone):
            return await _made(request, prompt, actors, rewards, turns, stage)
    return await _made(request, prompt, actors, rewards, turns, stage)


async def _made(
    request: GenerateRequest,
    prompt: Prompt,
    actors: Generator,
    rewards: Judge,
    turns: Turns | None,
    stage: Callable[[str], None],
) -> Made:
    begun = time.time()
    stage("generate")
    group, meta = await actors.generate(request)
    generated = time.time()
    stage("score")
    scores = await rewards.score(group, prompt)
    for turn in range(1, turns.most if turns else 1):
        shown = turns.shown(group, prompt, scores, turn) if turns else None
        if shown is None:
            break
        stage("generate")
        seed = None if request.seed is None else (request.seed + turn * request.n) % 2**63
        longer, after = await actors.generate(replace(request, after=shown, seed=seed))
        if after.turns == meta.turns:  # those to go on had been cut
            break
        group, meta, generated = longer, after, time.time()
        stage("score")
        scores = _newer(scores, await rewards.score(group, prompt), shown)
    return Made(group, meta, scores, (begun, generated))


def _newer(before: Scores, after: Scores, shown: Shown) -> Scores:
    """A sample that had ended keeps its verdict."""
    pairs = zip(before.verdicts, after.verdicts, shown.tokens, strict=True)
    verdicts = [old if tokens is None else new for old, new, tokens in pairs]
    return Scores.pack(verdicts, seconds=before.seconds + after.seconds, worker=after.worker)
