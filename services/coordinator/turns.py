"""How a group is made: generated and scored, and in jobs with turns, shown what failed and continued.

prompt ─> n samples ─> verdicts ──all passed, or no turn left──> group, scores
             ^             │
             └─ observation: why a sample failed; the sample continues after it, behind its own earlier turns
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple, Protocol, TypedDict

import jinja2
import jinja2.sandbox
import numpy as np
from numpy.typing import NDArray

from actors.config import GenerateRequest, Observation
from services.coordinator.episode_figures import EpisodeFigures
from services.coordinator.roles import Actors, RewardWorkers
from volley.errors import GroupGone, JobError
from volley.records import Group, GroupMeta, Prompt, Scores, Verdict, VerdictStatus
from volley.refs import Ref
from volley.turns import TurnsSpec

ATTEMPTS = 3  # to make a group, if nodes are lost between its turns
Stage = Literal["generate", "score"]
_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
)


class Encoding(Protocol):
    """What a tokenizer returns for one text."""

    @property
    def input_ids(self) -> list[int]: ...


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that observations need."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Encoding: ...


class Turns:
    """Makes the observations for samples that did not pass.

    Raises:
        JobError: ``turns.observation`` is not a valid template.
    """

    def __init__(self, spec: TurnsSpec, tokenizer: Tokenizer) -> None:
        self.max_count, self._spec, self._tokenizer = spec.max_count, spec, tokenizer
        try:
            self._template = _ENVIRONMENT.from_string(spec.observation)
        except jinja2.TemplateSyntaxError as error:
            raise JobError(f"turns.observation: line {error.lineno}: {error.message}") from error

    def observation(self, group: Ref[Group], prompt: Prompt, scores: Scores, turn: int) -> Observation | None:
        """What each sample is shown after its turn number ``turn``, from 1; None if no sample continues.

        Raises:
            JobError: the template cannot be rendered for a verdict.
        """
        texts = [self._text(prompt, verdict, turn) if _continues(verdict) else "" for verdict in scores.verdicts]
        if not any(texts):
            return None
        return Observation(group, tuple(self._tokens(text) if text else None for text in texts), tuple(texts))

    def _text(self, prompt: Prompt, verdict: Verdict, turn: int) -> str:
        try:
            return self._template.render({**prompt.reference, "verdict": verdict, "turn": turn})
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise JobError(f"turns.observation: prompt {prompt.id}: {error}") from error

    def _tokens(self, text: str) -> NDArray[np.int32]:
        """The text's token ids. A text that is too long loses its middle, since chat templates mark begin and end."""
        ids = np.asarray(self._tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)
        limit = self._spec.max_observation_tokens
        return ids if len(ids) <= limit else np.concatenate([ids[: limit - limit // 2], ids[len(ids) - limit // 2 :]])


def _continues(verdict: Verdict) -> bool:
    return verdict.status is not VerdictStatus.PASSED and verdict.status.bears_reward


def turns_of(spec: TurnsSpec | None, tokenizer: Tokenizer) -> Turns | None:
    """The job's `Turns`, or None if the job has one turn. Raises what `Turns` raises."""
    return Turns(spec, tokenizer) if spec else None


class SampleRoom(TypedDict):
    """Arguments of `services.data.tokens.encode_prompts`: tokens that may follow a prompt, and the job keys for it."""

    room: int
    key: str


def room_for(max_tokens: int, turns: TurnsSpec | None, key: str = "sampling.max_tokens") -> SampleRoom:
    """The room that a sample of at most ``max_tokens`` per turn needs behind its prompt."""
    if turns is None:
        return {"room": max_tokens, "key": key}
    return {
        "room": turns.room(max_tokens),
        "key": f"turns.max_count x {key} + (turns.max_count - 1) x turns.max_observation_tokens",
    }


class MadeGroup(NamedTuple):
    """A group with its scores.

    Attributes:
        generated: when its generation began and ended, seconds since 1970.
        episodes: figures of the episodes; None if no program made the group.
    """

    group: Ref[Group]
    meta: GroupMeta
    scores: Scores
    generated: tuple[float, float]
    episodes: EpisodeFigures | None = None


def _ignore(_stage: Stage) -> None:
    """The default of ``on_stage``."""


async def make_group(
    request: GenerateRequest,
    prompt: Prompt,
    *,
    actors: Actors,
    rewards: RewardWorkers,
    turns: Turns | None,
    on_stage: Callable[[Stage], None] = _ignore,
) -> MadeGroup:
    """n samples of a prompt and their verdicts, after as many turns as they need and are allowed.

    Args:
        on_stage: called as each stage begins.

    Raises:
        GroupGone: in `ATTEMPTS` attempts, the node that held the group was lost between two turns.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(GroupGone):
            return await _attempt(request, prompt, actors, rewards, turns, on_stage)
    return await _attempt(request, prompt, actors, rewards, turns, on_stage)


async def _attempt(
    request: GenerateRequest,
    prompt: Prompt,
    actors: Actors,
    rewards: RewardWorkers,
    turns: Turns | None,
    on_stage: Callable[[Stage], None],
) -> MadeGroup:
    begun = time.time()
    on_stage("generate")
    group, meta = await actors.generate(request)
    generated = time.time()
    on_stage("score")
    scores = await rewards.score(group, prompt)
    for turn in range(1, turns.max_count if turns else 1):
        observation = turns.observation(group, prompt, scores, turn) if turns else None
        if observation is None:
            break
        on_stage("generate")
        seed = None if request.seed is None else (request.seed + turn * request.n) % 2**63
        longer, longer_meta = await actors.generate(replace(request, after=observation, seed=seed))
        if longer_meta.turns == meta.turns:  # every sample that could continue was truncated
            break
        group, meta, generated = longer, longer_meta, time.time()
        on_stage("score")
        scores = _merged(scores, await rewards.score(group, prompt), observation)
    return MadeGroup(group, meta, scores, (begun, generated))


def _merged(before: Scores, after: Scores, observation: Observation) -> Scores:
    """The scores after a further turn: samples that took no part in it keep their verdicts."""
    pairs = zip(before.verdicts, after.verdicts, observation.tokens, strict=True)
    verdicts = [old if tokens is None else new for old, new, tokens in pairs]
    return Scores.pack(verdicts, seconds=before.seconds + after.seconds, worker=after.worker)
