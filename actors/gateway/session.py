"""The record of an episode: the calls of the model that it made, token by token.

A session has one branch as long as every call continues the one before:

    call 0                     call 1
    context    tokens          context     tokens
    [prompt]   [sampled ...]   [what came  [sampled ...]
                                between]

A call whose history is not that of the session starts another branch with a prompt of its own, or ends the session, as
``on_rewrite`` says; nothing recorded is ever encoded again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple

from actors.gateway.messages import Message, describe_difference, first_difference
from actors.gateway.rendering import NoEnd, Renderer, Setting

OnRewrite = Literal["drop", "keep_longest"]


class End(StrEnum):
    """Why a session takes no further call."""

    CALLS = "calls"  # the model used up its calls
    TOKENS = "tokens"  # ... its tokens
    CONTEXT = "context"  # ... its context
    REWRITTEN = "rewritten"  # a call did not continue the history
    CLOSED = "closed"  # the episode is over

    @property
    def is_limit(self) -> bool:
        """Whether the model ran out of something, which counts as a failed sample."""
        return self in (End.CALLS, End.TOKENS, End.CONTEXT)


class Rewritten(Exception):
    """A call does not continue the session's history; the text names the first difference."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may use.

    Attributes:
        calls: calls of the model.
        tokens: sampled tokens, over all calls.
        context: tokens of the last call's prompt and answer together.
        on_rewrite: what becomes of an episode whose history was rewritten.
    """

    calls: int
    tokens: int
    context: int
    on_rewrite: OnRewrite = "drop"


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the engine sampled in one call.

    Attributes:
        tokens: the sampled ids.
        stopped: the last one is a stop token, or completes ``stop_text``; False if the answer was cut.
        logprobs: their log-probs under the distribution they were drawn from.
        versions: the version of the weights each was drawn with.
        begun: when the engine was asked, on the clock of `time.perf_counter`.
        seconds: how long it took.
        stop_text: the text of the request at which the answer was stopped; "" if none was.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stopped: bool
    begun: float = 0.0
    seconds: float = 0.0
    stop_text: str = ""

    @property
    def stop(self) -> int | None:
        """The stop token that ended the answer; None if it ended otherwise."""
        return self.tokens[-1] if self.stopped and not self.stop_text else None

    def first(self, count: int) -> "Drawn":
        """The answer as if the engine had stopped after ``count`` tokens."""
        parts = (self.tokens[:count], self.logprobs[:count], self.versions[:count])
        return replace(self, tokens=parts[0], logprobs=parts[1], versions=parts[2], stopped=True)


@dataclass(frozen=True, slots=True)
class Call:
    """One call: ``context`` is what was put behind the branch's ids before the model answered with ``drawn``."""

    context: list[int]
    drawn: Drawn


class Chat(NamedTuple):
    """What a chat call brings: the whole history, and what else its prompt depends on."""

    messages: Sequence[Message]
    setting: Setting


@dataclass(slots=True)
class Branch:
    """Calls that continue each other.

    Attributes:
        messages: the history of a chat, with every reply as it was returned.
        setting: what its prompts depend on besides; None if the branch was made by /v1/completions.
        texts: the prompt and answers of a branch made by /v1/completions, as text: with the text that stopped the last
            answer, and without it, as it was returned.
        ids: everything the model has seen and sampled.
    """

    setting: Setting | None = None
    messages: list[Message] = field(default_factory=list)
    texts: tuple[str, ...] = ()
    ids: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def stop(self) -> int | None:
        """The token that ended the last reply; None if it was cut, or stopped at a text."""
        return self.calls[-1].drawn.stop


class Plan(NamedTuple):
    """A call that may be made: sample at most ``room`` tokens behind ``prompt``, the branch's ids and ``context``."""

    branch: Branch
    context: list[int]
    prompt: list[int]
    room: int


class Session:
    """One episode's record. Pure bookkeeping: it neither waits nor samples.

    Attributes:
        calls: calls that were answered.
        sampled: tokens of their answers.
        rewrites: calls that did not continue the history.
        rewrite: what the first of them changed; "" without any.
        parse_failures: replies with a tool call that could not be parsed.
        abandoned: calls whose client went away before the answer; they are not part of the record.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.branches: list[Branch] = []
        self.end: End | None = None
        self.calls = self.sampled = 0
        self.rewrites = self.parse_failures = self.abandoned = 0
        self.rewrite = ""

    @property
    def all_calls(self) -> list[Call]:
        """The answered calls of all branches, in the order they were asked."""
        found = [call for branch in self.branches for call in branch.calls]
        return sorted(found, key=lambda call: call.drawn.begun)

    @property
    def longest(self) -> Branch | None:
        """The branch with the most sampled tokens, the first of equals; None before the first answer."""
        sizes = [sum(len(call.drawn.tokens) for call in branch.calls) for branch in self.branches]
        return self.branches[sizes.index(max(sizes))] if sizes else None

    def plan_chat(self, chat: Chat, renderer: Renderer) -> Plan | None:
        """Plan a chat call; None if it exceeds a limit, which ends the session.

        Raises:
            Rewritten: the call does not continue the history, and the job drops such episodes. The session has ended.
            BadMessages: the chat template rejects the messages. Nothing is recorded.
        """
        branch, reason = self._continued_chat(chat)
        if branch is not None:
            new = chat.messages[len(branch.messages) :]
            try:
                context = renderer.continuation(branch.messages, new, chat.setting, stop=branch.stop)
                return self._plan(branch, context)
            except NoEnd as problem:
                reason = str(problem)
        context = renderer.prompt(chat.messages, chat.setting)
        self._note_rewrite(reason)
        return self._plan(Branch(setting=chat.setting), context)

    def plan_text(self, prompt: str | Sequence[int], renderer: Renderer) -> Plan | None:
        """Plan a call of /v1/completions, as text or ids; returns and raises as `plan_chat`."""
        if isinstance(prompt, str):
            begun = [
                (len(text), branch) for branch in self.branches for text in branch.texts if prompt.startswith(text)
            ]
            size, branch = max(begun, key=lambda each: each[0], default=(0, None))
            new = renderer.tokens(prompt[size:])
        else:
            ids = list(prompt)
            starts = [
                branch for branch in self.branches if branch.setting is None and ids[: len(branch.ids)] == branch.ids
            ]
            branch = max(starts, key=lambda each: len(each.ids), default=None)
            new = ids[len(branch.ids) :] if branch else ids
        if branch is None:
            self._note_rewrite("the prompt does not begin with the prompt and answer of an earlier call")
        return self._plan(branch or Branch(), new)

    def record_chat(self, plan: Plan, drawn: Drawn, chat: Chat, reply: Message) -> None:
        """Record the answer to a planned call, with the reply as the client gets it."""
        plan.branch.messages = [*chat.messages, reply]
        plan.branch.setting = chat.setting
        self._record(plan, drawn)

    def record_text(self, plan: Plan, drawn: Drawn, *texts: str) -> None:
        """Record the answer to a planned call of /v1/completions.

        Args:
            texts: the whole prompt with the answer, in each form in which a later prompt may repeat it.
        """
        plan.branch.texts = texts
        self._record(plan, drawn)

    def _continued_chat(self, chat: Chat) -> tuple[Branch | None, str]:
        """The branch that the call continues, and else why it continues none."""
        found: Branch | None = None
        reason, matched = "", -1
        for branch in self.branches:
            if branch.setting is None:
                reason = reason or "a chat cannot continue a prompt of /v1/completions"
                continue
            difference = first_difference(branch.messages, chat.messages)
            if difference is None and branch.setting == chat.setting:
                if found is None or len(branch.messages) > len(found.messages):
                    found = branch
            elif difference is None:
                reason = "the tools or the options of the chat template changed"
            elif difference > matched:
                reason, matched = describe_difference(branch.messages, chat.messages, difference), difference
        return found, reason

    def _note_rewrite(self, reason: str) -> None:
        if not self.branches:
            return
        self.rewrites += 1
        self.rewrite = self.rewrite or reason
        if self.limits.on_rewrite == "drop":
            self.end = End.REWRITTEN
            raise Rewritten(reason)

    def _plan(self, branch: Branch, context: list[int]) -> Plan | None:
        prompt = branch.ids + context
        left = {
            End.CALLS: self.limits.calls - self.calls,
            End.TOKENS: self.limits.tokens - self.sampled,
            End.CONTEXT: self.limits.context - len(prompt),
        }
        self.end = next((end for end, amount in left.items() if amount <= 0), None)
        if self.end is not None:
            return None
        return Plan(branch, context, prompt, min(left[End.TOKENS], left[End.CONTEXT]))

    def _record(self, plan: Plan, drawn: Drawn) -> None:
        branch = plan.branch
        if not branch.calls:
            self.branches.append(branch)
        branch.calls.append(Call(plan.context, drawn))
        branch.ids = [*plan.prompt, *drawn.tokens]
        self.calls += 1
        self.sampled += len(drawn.tokens)
        if not drawn.stopped and len(drawn.tokens) == plan.room:
            used_up = self.sampled >= self.limits.tokens
            self.end = End.TOKENS if used_up else End.CONTEXT
