"""The record of an episode: the calls of the model that it made, token by token.

A session has one branch as long as every call continues the one before:

    call 0                     call 1
    context    tokens          context     tokens
    [prompt]   [sampled ...]   [what came  [sampled ...]
                                between]

A call whose history is not that of the session starts another branch with a prompt of its own, or ends the session, as
``on_rewrite`` says; nothing recorded is ever encoded again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple

from actors.gateway.messages import Message, describe_difference, first_difference
from actors.gateway.rendering import NoEnd, Renderer, Setting, TooLong

OnRewrite = Literal["drop", "keep_longest"]
_NOT_BEGUN = "the prompt does not begin with the prompt and answer of an earlier call"
MOST_EMPTY = 100  # answers without tokens after a limit: a program that never ends is refused, rather than served


class End(StrEnum):
    """Why a session takes no further call."""

    CALLS = "calls"  # the model used up its calls
    TOKENS = "tokens"  # ... its tokens
    CONTEXT = "context"  # ... its context
    REWRITTEN = "rewritten"  # a call did not continue the history

    @property
    def is_limit(self) -> bool:
        """Whether the model ran out of something, which counts as a failed sample."""
        return self in (End.CALLS, End.TOKENS, End.CONTEXT)


class Rewritten(Exception):
    """A call does not continue the session's history; the text names the first difference."""


class RanOut(Exception):
    """The session has reached a limit, and given `MOST_EMPTY` empty answers since."""

    def __init__(self, end: End) -> None:
        super().__init__(f"the model ran out of {end}, and {MOST_EMPTY} further calls got an empty answer")
        self.end = end


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

    def goes_on_behind(self, text: str) -> bool:
        """Whether ``text``, one of ``texts``, stands for all ids, so that a prompt which adds nothing continues them.

        Behind the token that ended an answer, or the text that stopped it, the model would answer something else.
        """
        return self.stop is None and text == self.texts[0]


class Draft(NamedTuple):
    """What a call asks of the model: ``context`` behind the ids of ``branch``.

    Attributes:
        context: None if it is longer than the session's, whatever its tokens are.
        rewrite: why it does not continue the history; "" if it does, or begins it.
    """

    branch: Branch
    context: list[int] | None
    rewrite: str


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
        self._empty = 0

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

    def admits(self) -> bool:
        """Whether a call may be planned. If not, a limit was reached, and the call gets an answer without tokens.

        Raises:
            Rewritten: a call before has ended the session.
            RanOut: too many calls came after the limit.
        """
        if self.end is End.REWRITTEN:
            raise Rewritten(self.rewrite)
        if self.end is None:
            return True
        self._empty += 1
        if self._empty > MOST_EMPTY:
            raise RanOut(self.end)
        return False

    def draft_chat(self, chat: Chat, renderer: Renderer) -> Draft:
        """What a chat call asks of the model. Changes nothing.

        Raises:
            BadMessages: the chat template rejects the messages.
        """
        branch, reason = self._continued_chat(chat)
        if branch is not None:
            count, stop = len(branch.messages), branch.stop
            known, new = chat.messages[:count], chat.messages[count:]  # with null or "" for no content, as it came
            try:
                return self._draft(
                    branch, lambda room: renderer.continuation(known, new, chat.setting, stop=stop, room=room)
                )
            except NoEnd as problem:
                reason = str(problem)
        first = Branch(setting=chat.setting)
        return self._draft(first, lambda room: renderer.prompt(chat.messages, chat.setting, room=room), reason)

    def draft_text(self, prompt: str | Sequence[int], renderer: Renderer) -> Draft:
        """What a call of /v1/completions asks of the model, as text or ids. Changes nothing."""
        if not isinstance(prompt, str):
            return self._draft_ids(list(prompt))
        found = [
            (len(text), branch)
            for branch in self.branches
            for text in branch.texts
            if prompt.startswith(text) and (len(prompt) > len(text) or branch.goes_on_behind(text))
        ]
        if found:
            size, branch = max(found, key=lambda each: each[0])
            return self._draft(branch, lambda room: renderer.tokens(prompt[size:], room=room))
        repeated = any(prompt in branch.texts for branch in self.branches)
        reason = "the prompt adds nothing to an answer that had ended" if repeated else _NOT_BEGUN
        return self._draft(Branch(), lambda room: renderer.tokens(prompt, room=room), reason if self.branches else "")

    def _draft(self, branch: Branch, tokens: Callable[[int], list[int]], rewrite: str = "") -> Draft:
        try:
            return Draft(branch, tokens(self.limits.context - len(branch.ids)), rewrite)
        except TooLong:
            return Draft(branch, None, rewrite)

    def _draft_ids(self, ids: list[int]) -> Draft:
        starts = [branch for branch in self.branches if branch.setting is None and ids[: len(branch.ids)] == branch.ids]
        if starts or not self.branches:
            branch = max(starts, key=lambda each: len(each.ids), default=Branch())
            return Draft(branch, ids[len(branch.ids) :], "")
        return Draft(Branch(), ids, _NOT_BEGUN)

    def plan(self, draft: Draft) -> Plan | None:
        """Plan a call; None if it exceeds a limit, which ends the session.

        Raises:
            Rewritten: the call does not continue the history, and the job drops such episodes. The session has ended.
        """
        if draft.rewrite:
            self._note_rewrite(draft.rewrite)
        prompt = draft.branch.ids + (draft.context or [])
        left = {
            End.CALLS: self.limits.calls - self.calls,
            End.TOKENS: self.limits.tokens - self.sampled,
            End.CONTEXT: 0 if draft.context is None else self.limits.context - len(prompt),
        }
        self.end = next((end for end, amount in left.items() if amount <= 0), None)
        if self.end is not None or draft.context is None:
            return None
        return Plan(draft.branch, draft.context, prompt, min(left[End.TOKENS], left[End.CONTEXT]))

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
        self.rewrites += 1
        self.rewrite = self.rewrite or reason
        if self.limits.on_rewrite == "drop":
            self.end = End.REWRITTEN
            raise Rewritten(reason)

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
