"""One call of the model: plan it in its session, sample, record, and make the reply.

    open_sessions ─> keys ─> chat, complete (while the episode runs) ─> end ─> close_sessions ─> Group

The calls of a session follow one another, as they do in a program that waits for each answer. A session ends with its
own episode, others of its group may go on.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from actors.config import EpisodesRequest
from actors.gateway.aside import aside
from actors.gateway.asked import Asked, BadRequest, SamplingOfJob, asked, prompt_of, stops_of
from actors.gateway.groups import EpisodeReport, body_of, group_of
from actors.gateway.messages import checked
from actors.gateway.rendering import Renderer, Tokenizer
from actors.gateway.replies import Pieces, Replies, Reply
from actors.gateway.session import Call, Chat, Draft, Drawn, Plan, Session
from volley.gateway import GatewaySpec
from volley.records import Group

OnTokens = Callable[[list[int]], int | None]
OnText = Callable[[str], None]
OnStart = Callable[[int], None]


class Engine(Protocol):
    """The part of `actors.engine.Engine` used here."""

    @property
    def vocab_size(self) -> int: ...

    async def draw(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | None,
        on_tokens: OnTokens | None,
    ) -> Drawn: ...


class UnknownSession(Exception):
    """The key belongs to no session, or to one whose episode is over."""


@dataclass(slots=True)
class OpenSession:
    """A session that programs may use, and the sampling of its job.

    Attributes:
        over: the episode has ended, and its session takes no further call.
    """

    session: Session
    sampling: SamplingOfJob
    seed: int | None
    opened: float = field(default_factory=time.perf_counter)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: set[asyncio.Task[Any] | None] = field(default_factory=set)
    over: bool = False

    async def end(self) -> None:
        """Take no further call, and drop those that still run: what the episode earned is settled."""
        self.over = True
        running = [task for task in self.running if task is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a call.

    Attributes:
        prompt: the ids that the model saw; [] if the call exceeded a limit, and then nothing was sampled.
        finish: OpenAI's ``finish_reason``.
        number: number of the call within its session.
    """

    prompt: Sequence[int]
    drawn: Drawn
    reply: Reply
    finish: str
    number: int


class Gateway:
    """The sessions of one actor, on its event loop.

    Attributes:
        stops: the tokens that end an answer.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, stop_ids: Sequence[int], spec: GatewaySpec) -> None:
        self.engine, self._tokenizer, self._spec = engine, tokenizer, spec
        self.stops = frozenset(stop_ids)
        self.renderer = Renderer(tokenizer, stop_ids)
        self._replies = Replies(tokenizer, tool_parser=spec.tool_parser, reasoning_parser=spec.reasoning_parser)
        self._sessions: dict[str, OpenSession] = {}

    def open_sessions(self, request: EpisodesRequest) -> tuple[str, ...]:
        """Open the sessions of a group's n episodes; returns their keys."""
        sampling = SamplingOfJob(request.temperature, request.top_p, self._spec.sampling)
        keys = tuple(secrets.token_urlsafe(32) for _ in range(request.n))
        for number, key in enumerate(keys):
            seed = None if request.seed is None else (request.seed + number) % 2**63
            self._sessions[key] = OpenSession(Session(request.limits), sampling, seed)
        return keys

    async def close_sessions(
        self, keys: Sequence[str], *, group_id: int, prompt_id: str, actor: str
    ) -> tuple[Group, tuple[EpisodeReport, ...]]:
        """End the sessions, drop the calls that still run, and return what was recorded. Their keys are void."""
        closed = [self._sessions.pop(key) for key in keys]
        await asyncio.gather(*(each.end() for each in closed))
        opened = min(each.opened for each in closed)
        seconds = time.perf_counter() - opened
        sessions = [each.session for each in closed]
        return group_of(
            sessions,
            self._text,
            group_id=group_id,
            prompt_id=prompt_id,
            actor=actor,
            opened=opened,
            seconds=seconds,
        )

    def find(self, key: str) -> OpenSession:
        """The session of ``key``; raises `UnknownSession`."""
        found = self._sessions.get(key)
        if found is None or found.over:
            raise UnknownSession("the API key belongs to no session, or to one whose episode is over")
        return found

    async def chat(
        self,
        found: OpenSession,
        body: Mapping[str, Any],
        *,
        size: int = 0,
        on_start: OnStart | None = None,
        on_text: OnText | None = None,
    ) -> Answer:
        """Answer a call of /v1/chat/completions.

        Args:
            size: of the request in bytes.
            on_start: called with the call's number when it is planned, after which nothing listed below is raised.
            on_text: called with each piece of the answer's text as it is sampled, unless the answer is parsed.

        Raises:
            BadRequest, BadMessages: the request cannot be answered as written. Nothing is recorded.
            Rewritten: it does not continue the session, which has ended; or a call before did not.
            RanOut: too many calls came after a limit was reached.
            UnknownSession: the episode ended while the call waited for the one before.
        """
        wanted, stops = asked(body, found.sampling), stops_of(body)
        chat = Chat(await aside(size, checked, body.get("messages")), wanted.setting)
        stream = on_text if on_text and not self._replies.is_parsed(wanted) else None
        async with self._turn(found) as session:
            plan = await self._planned(session, size, session.draft_chat, chat)
            if on_start:
                on_start(session.calls)
            if plan is None:
                return _nothing(session)
            drawn, streamed = await self._draw(found, plan, wanted, stops, stream)
            number = session.calls
            ids = body_of(Call([], drawn))
            reply = Reply(streamed) if streamed is not None else self._replies.make(ids, wanted, number=number)
            reply = reply.before(drawn.stop_text)
            session.parse_failures += reply.failed
            session.record_chat(plan, drawn, chat, reply.message())
            return Answer(plan.prompt, drawn, reply, _finish(drawn, reply), number)

    async def complete(
        self,
        found: OpenSession,
        body: Mapping[str, Any],
        *,
        size: int = 0,
        on_start: OnStart | None = None,
        on_text: OnText | None = None,
    ) -> Answer:
        """Answer a call of /v1/completions; arguments and errors as `chat`."""
        wanted, stops = asked(body, found.sampling), stops_of(body)
        prompt = await aside(size, self._prompt_of, body)
        async with self._turn(found) as session:
            plan = await self._planned(session, size, session.draft_text, prompt)
            if on_start:
                on_start(session.calls)
            if plan is None:
                return _nothing(session)
            drawn, streamed = await self._draw(found, plan, wanted, stops, on_text)
            number = session.calls
            sampled = self._replies.plain(body_of(Call([], drawn)))
            reply = Reply(sampled if streamed is None else streamed).before(drawn.stop_text)
            before = prompt if isinstance(prompt, str) else self._text(prompt)
            session.record_text(plan, drawn, before + sampled, before + reply.content)
            return Answer(plan.prompt, drawn, reply, _finish(drawn, reply), number)

    @contextlib.asynccontextmanager
    async def _turn(self, found: OpenSession) -> AsyncIterator[Session]:
        """Wait for the session's call before. A call that is cancelled, because its client is gone, is counted."""
        task = asyncio.current_task()
        found.running.add(task)
        try:
            async with found.turn:
                if found.over:
                    raise UnknownSession("the episode is over")
                yield found.session
        except asyncio.CancelledError:
            found.session.abandoned += 1
            raise
        finally:
            found.running.discard(task)

    def _prompt_of(self, body: Mapping[str, Any]) -> str | list[int]:
        """The prompt of a call of /v1/completions. Raises `BadRequest` or `BadMessages`."""
        prompt, count = prompt_of(body), self.engine.vocab_size
        if not isinstance(prompt, str) and not all(0 <= each < count for each in prompt):
            raise BadRequest(f"token ids must be from 0 to {count - 1}")
        return prompt

    async def _planned(
        self, session: Session, size: int, draft: Callable[[Any, Renderer], Draft], call: object
    ) -> Plan | None:
        """What is to be sampled; None if the session is at a limit."""
        return session.plan(await aside(size, draft, call, self.renderer)) if session.admits() else None

    async def _draw(
        self, found: OpenSession, plan: Plan, wanted: Asked, stops: tuple[str, ...], on_text: OnText | None
    ) -> tuple[Drawn, str | None]:
        """Sample the answer. With ``on_text`` returns its text too, which is what was passed on.

        What is drawn ends with the token that completes one of ``stops``: where an answer ends then depends on nothing
        but its tokens, whose log-probs are those of the job's distribution.
        """
        room = plan.room if wanted.max_tokens is None else min(plan.room, wanted.max_tokens)
        text = Pieces(self._replies.plain, self.stops, stops, on_text) if on_text or stops else None
        seed = None if found.seed is None else (found.seed + found.session.calls * 1_000_003) % 2**63
        begun = time.perf_counter()
        drawn = await self.engine.draw(
            plan.prompt,
            max_tokens=room,
            temperature=found.sampling.temperature,
            top_p=found.sampling.top_p,
            seed=seed,
            on_tokens=text.add if text else None,
        )
        seconds = time.perf_counter() - begun
        drawn = replace(drawn, begun=begun, seconds=seconds, stop_text=text.stop if text else "")
        return drawn, text.end() if text and on_text else None

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _nothing(session: Session) -> Answer:
    return Answer([], Drawn([], [], [], stopped=False), Reply(""), "length", session.calls)


def _finish(drawn: Drawn, reply: Reply) -> str:
    if not drawn.stopped:
        return "length"
    return "tool_calls" if reply.tool_calls else "stop"
