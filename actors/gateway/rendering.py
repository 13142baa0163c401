"""Messages to token ids, through the model's chat template: a whole prompt, or only what is new behind recorded ids.

What is new is found by rendering the conversation with a marker in place of the last reply:

    ... <assistant> MARKER <end of turn> \\n <user> next question <end of turn> \\n <assistant>
                   recorded ids end here ^ ^──────────────── tokenised ─────────────────────^

Where no token ends a turn, the recorded ids may end in the one that begins the next; it is not repeated. What is new
depends neither on the reply's text nor on what the template does to earlier messages, such as removing their reasoning
or stripping white space: the recorded ids stay as they were sampled.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jinja2

from actors.gateway.messages import BadMessages, Message, for_template
from actors.gateway.token_lengths import most_characters


class Tokenizer(Protocol):
    """The part of a transformers tokenizer used here."""

    @property
    def chat_template(self) -> object: ...

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[Mapping[str, Any]] | None,
        tokenize: bool,
        **options: object,
    ) -> object: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What a prompt depends on besides its messages.

    Attributes:
        tools: the tools as OpenAI's API describes them.
        options: further variables of the chat template, such as ``enable_thinking``.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


_OF_TEMPLATES = (
    *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError),
)


class NoEnd(Exception):
    """The chat template does not show where a reply ends, so nothing can be put behind it."""


class TooLong(Exception):
    """A text has more tokens than there is room for, as its length shows: it has at least ``fewest``."""

    def __init__(self, fewest: int) -> None:
        super().__init__(f"at least {fewest} tokens")
        self.fewest = fewest


class Renderer:
    """Renders and tokenises conversations.

    Args:
        stop_ids: the tokens that end a reply.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = {each: tokenizer.decode([each], skip_special_tokens=False) for each in stop_ids}
        self._marker = f"reply{secrets.token_hex(8)}"  # random, so that no message contains it
        self._closings: dict[bool, str] = {}  # what ends a reply without and with tool calls
        self._most_characters = most_characters(tokenizer)
        tokenizer("", add_special_tokens=False)  # sets what must not change while threads encode

    def tokens(self, text: str, *, room: int | None = None) -> list[int]:
        """The ids of ``text``, to which no special token is added.

        Args:
            room: how many there may be; None for any number. More are returned too, unless they are seen unread.

        Raises:
            TooLong: there are more than ``room``, whatever they are. Tokenising them could take minutes.
        """
        if room is not None and self._most_characters and len(text) > room * self._most_characters:
            raise TooLong(-(-len(text) // self._most_characters))
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def prompt(self, messages: Sequence[Message], setting: Setting, *, room: int | None = None) -> list[int]:
        """The ids of a whole conversation, up to where the model replies; ``room`` as in `tokens`.

        Raises:
            BadMessages: the model has no chat template, or its template rejects the conversation.
            TooLong: as `tokens`.
        """
        return self.tokens(self.text(messages, setting), room=room)

    def text(self, messages: Sequence[Message], setting: Setting, *, replies: bool = True) -> str:
        """The conversation as text, up to where the model replies unless ``replies`` is False; raises as `prompt`."""
        if not self._tokenizer.chat_template:
            raise BadMessages("the model has no chat template: send prompts to /v1/completions")
        try:
            return self._rendered(messages, setting, replies=replies)
        except _OF_TEMPLATES as error:
            advice = self._advice(messages, setting, replies=replies)
            raise BadMessages(f"the model's chat template rejects the messages: {error}{advice}") from error

    def _rendered(self, messages: Sequence[Message], setting: Setting, *, replies: bool) -> str:
        rendered = self._tokenizer.apply_chat_template(
            [for_template(message) for message in messages],
            tools=list(setting.tools) or None,
            tokenize=False,
            **{**setting.options, "add_generation_prompt": replies},
        )
        return str(rendered)

    def _advice(self, messages: Sequence[Message], setting: Setting, *, replies: bool) -> str:
        """What to do about rejected messages if empty strings in place of null contents help; else ""."""
        empty = [number for number, message in enumerate(messages) if message.get("content") is None]
        if not empty:
            return ""
        filled = [{**message, "content": message.get("content") or ""} for message in messages]
        try:
            self._rendered(filled, setting, replies=replies)
        except _OF_TEMPLATES:
            return ""
        calls = bool(messages[empty[0]].get("tool_calls"))
        return (
            f": message {empty[0]} has no content, which this template needs; "
            f"{'it was not made for tools: use a model that was, or ' if calls else ''}send content as an empty string"
        )

    def continuation(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        setting: Setting,
        *,
        stop: int | None,
        room: int | None = None,
    ) -> list[int]:
        """The ids to put behind those of ``history``, whose last message is the model's reply, for ``new`` messages.

        Args:
            stop: the token with which the reply ended; None if it was cut.
            room: as in `tokens`.

        Raises:
            BadMessages, TooLong: as `prompt`.
            NoEnd: the template leaves the reply out, or does not show where it ends.
        """
        marked = [*history[:-1], self._with_marker(history[-1])]
        calls = bool(history[-1].get("tool_calls"))
        if calls not in self._closings:
            self._closings[calls] = self._behind_marker(self.text(marked, setting, replies=False))
        closing = self._closings[calls]
        tail = self._behind_marker(self.text([*marked, *new], setting))
        if self._end(closing) is not None and (end := self._end(tail)) is not None:
            return self._tokens_behind(stop, tail[end[0 if stop is None else 1] :], room)
        if calls:  # the closing brackets of the last call were sampled
            if not tail.startswith(closing):
                raise NoEnd("the chat template does not show where a reply with tool calls ends")
            tail = tail[len(closing) :]
        return self._tokens_behind(stop, tail.removeprefix("" if stop is None else self._stops.get(stop, "")), room)

    def _with_marker(self, reply: Message) -> Message:
        """A message of the same shape as ``reply`` whose text, or last tool call, ends in the marker."""
        calls = reply.get("tool_calls")
        if not calls:
            return {"role": "assistant", "content": self._marker}
        last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": f'{{"value": "{self._marker}"}}'}}
        return {"role": "assistant", "content": reply.get("content"), "tool_calls": [*calls[:-1], last]}

    def _behind_marker(self, text: str) -> str:
        _, found, tail = text.rpartition(self._marker)
        if not found:
            raise NoEnd("the chat template leaves earlier replies out")
        return tail

    def _end(self, tail: str) -> tuple[int, int] | None:
        """Begin and end of the first stop token in ``tail``."""
        found = [(tail.find(text), len(text)) for text in self._stops.values() if text and text in tail]
        return min((start, start + length) for start, length in found) if found else None

    def _tokens_behind(self, stop: int | None, text: str, room: int | None) -> list[int]:
        """The ids of ``text`` behind a stop token, if any: some tokenizers mark the beginning of a text."""
        if stop is None:
            return self.tokens(text, room=room)
        ids = self.tokens(self._stops.get(stop, "") + text, room=None if room is None else room + 1)
        return ids[1:] if ids[:1] == [stop] else self.tokens(text, room=room)
