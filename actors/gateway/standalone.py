"""The gateway of a finished model: every request stands for itself and chooses how its answer is sampled.

Nothing is recorded, so there are no sessions. A request for something that this server does not do is answered 400;
nothing is silently ignored.
"""

import hmac
import itertools
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from actors.gateway.aside import aside
from actors.gateway.asked import IGNORED, READ, BadRequest, SamplingOfJob, asked, changes_nothing, stops_of
from actors.gateway.calls import Answer, Engine, Gateway, OnStart, OnText, OnTokens, OpenSession, UnknownSession
from actors.gateway.groups import body_of
from actors.gateway.messages import checked
from actors.gateway.rendering import Setting, Tokenizer, TooLong
from actors.gateway.replies import Pieces, Reply
from actors.gateway.session import Call, Drawn, Limits, Session
from volley.gateway import GatewaySpec

_FREE = SamplingOfJob(1.0, 1.0, "override")
_MORE = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_OWN = frozenset({"temperature", "top_p", "seed", "stop", *_MORE})
_NUMBERS = 10_000  # as in the ids of tool calls
MOST_STOPS = 16
MOST_NUMBER = 1e9  # beyond any sense; json also reads NaN and Infinity
REPETITION_PENALTY = (0.01, 100)  # outside, logits overflow


class FreeEngine(Engine, Protocol):
    """The part of `actors.engine.Engine` used here."""

    async def draw(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | None,
        on_tokens: OnTokens | None,
        more: Mapping[str, float] | None = None,
    ) -> Drawn: ...


@dataclass(frozen=True, slots=True)
class OwnSampling:
    """How a request wants its answer sampled.

    Attributes:
        stop: texts that end the answer and do not belong to it.
        more: further fields of vLLM's SamplingParams.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    more: Mapping[str, float] = field(default_factory=dict)


def sampling_of(body: Mapping[str, Any]) -> OwnSampling:
    """Read how a request samples. Raises `BadRequest` for anything that this server does not do."""
    for name, value in body.items():
        known = value is None or name in _OWN or name in READ or name in IGNORED
        if not known and not changes_nothing(name, value):
            raise BadRequest(f"{name} is not supported with the value {reprlib.repr(value):.40}: leave it out")
    given = {name: _number(name, body[name]) for name in _OWN - {"stop", "seed"} if body.get(name) is not None}
    seed = body.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise BadRequest("seed must be an integer from 0 to 2**63 - 1")
    return OwnSampling(
        temperature=given.get("temperature", 1.0),
        top_p=given.get("top_p", 1.0),
        seed=seed,
        stop=stops_of(body, MOST_STOPS),
        more={name: given[name] for name in _MORE if name in given},
    )


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST_NUMBER:
        raise BadRequest(f"{name} must be a number")
    least, most = REPETITION_PENALTY
    if name == "repetition_penalty" and not least <= value <= most:
        raise BadRequest(f"{name} must be from {least:g} to {most:g}; 1 changes nothing")
    return value


class StandaloneGateway(Gateway):
    """A gateway without sessions.

    Args:
        context: longest prompt plus answer in tokens.
        token: the API key that requests must send; None accepts any.
    """

    def __init__(
        self,
        engine: FreeEngine,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        spec: GatewaySpec,
        *,
        context: int,
        token: str | None,
    ) -> None:
        super().__init__(engine, tokenizer, stop_ids, spec)
        self._free, self._context, self._token = engine, context, token
        self._numbers = itertools.cycle(range(_NUMBERS))

    def find(self, key: str) -> OpenSession:
        """A session for one request; raises `UnknownSession` if ``key`` is not the server's token."""
        if self._token is not None and not hmac.compare_digest(key.encode(), self._token.encode()):
            raise UnknownSession("the API key is not this server's token")
        return OpenSession(Session(Limits(1, self._context, self._context)), _FREE, None)

    async def chat(
        self,
        found: OpenSession,
        body: Mapping[str, Any],
        *,
        size: int = 0,
        on_start: OnStart | None = None,
        on_text: OnText | None = None,
    ) -> Answer:
        """As in `Gateway`, for a conversation of its own."""
        own, wanted = sampling_of(body), asked(body, _FREE)
        prompt = await aside(size, self._chat_ids, body, wanted.setting)
        stream = None if self._replies.is_parsed(wanted) else on_text
        number = next(self._numbers)
        drawn = await self._sampled(prompt, own, wanted.max_tokens, number, on_start, stream)
        reply = self._replies.make(body_of(Call([], drawn)), wanted, number=number)
        return _answer(prompt, drawn, reply, number)

    async def complete(
        self,
        found: OpenSession,
        body: Mapping[str, Any],
        *,
        size: int = 0,
        on_start: OnStart | None = None,
        on_text: OnText | None = None,
    ) -> Answer:
        """As in `Gateway`, for a prompt of its own."""
        own, wanted = sampling_of(body), asked(body, _FREE)
        prompt = await aside(size, self._text_ids, body)
        number = next(self._numbers)
        drawn = await self._sampled(prompt, own, wanted.max_tokens, number, on_start, on_text)
        return _answer(prompt, drawn, Reply(self._replies.plain(body_of(Call([], drawn)))), number)

    def _chat_ids(self, body: Mapping[str, Any], setting: Setting) -> list[int]:
        try:
            return self.renderer.prompt(checked(body.get("messages")), setting, room=self._context)
        except TooLong as problem:
            raise self._too_long(str(problem)) from None

    def _text_ids(self, body: Mapping[str, Any]) -> list[int]:
        prompt = self._prompt_of(body)
        try:
            return self.renderer.tokens(prompt, room=self._context) if isinstance(prompt, str) else prompt
        except TooLong as problem:
            raise self._too_long(str(problem)) from None

    def _too_long(self, tokens: str) -> BadRequest:
        return BadRequest(f"the prompt has {tokens}; the model takes {self._context - 1}: shorten it")

    async def _sampled(
        self,
        prompt: list[int],
        own: OwnSampling,
        max_tokens: int | None,
        number: int,
        on_start: OnStart | None,
        on_text: OnText | None,
    ) -> Drawn:
        room = self._context - len(prompt)
        if room < 1:
            raise self._too_long(f"{len(prompt)} tokens")
        if on_start:
            on_start(number)
        text = Pieces(self._replies.plain, self.stops, own.stop, on_text)
        drawn = await self._free.draw(
            prompt,
            max_tokens=min(room, max_tokens or room),
            temperature=own.temperature,
            top_p=own.top_p,
            seed=own.seed,
            on_tokens=text.add if on_text or own.stop else None,
            more=own.more,
        )
        if on_text:
            text.end()
        return replace(drawn, stop_text=text.stop)


def _answer(prompt: list[int], drawn: Drawn, reply: Reply, number: int) -> Answer:
    finish = "length" if not drawn.stopped else "tool_calls" if reply.tool_calls else "stop"
    return Answer(prompt, drawn, reply.before(drawn.stop_text), finish, number)
