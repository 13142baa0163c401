"""Sampled ids to what the client gets: text, tool calls and reasoning. The parsers are vLLM's, by name.

A reply that a parser cannot take apart is text: that the model writes broken calls is for the program to see.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.gateway.asked import Asked
from actors.gateway.messages import Message, parsed
from actors.gateway.rendering import Tokenizer
from actors.parser_names import unknown_parser
from volley.errors import JobError

log = logging.getLogger(__name__)
_PARSER_LOGGERS = ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser")
_MARKERS = ("tool_call_start_token", "tool_calls_start_token", "tool_call_begin", "tool_calls_begin", "bot_token")


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model as the client gets it.

    Attributes:
        failed: it holds a tool call that could not be parsed, so it is given as text.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    failed: bool = False

    def message(self) -> Message:
        """The reply as a chat message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning:
            message |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message

    def before(self, stop: str) -> "Reply":
        """The reply up to the text at which it was stopped; all of it with ""."""
        return replace(self, content=self.content.partition(stop)[0]) if stop else self


class Replies:
    """Makes replies.

    Raises:
        JobError: vLLM has no parser of that name, or it does not fit the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, *, tool_parser: str | None, reasoning_parser: str | None) -> None:
        self._tokenizer = tokenizer
        self._tools, self._reasoning = tool_parser is not None, reasoning_parser is not None
        self._parser = _parser(tokenizer, tool_parser, reasoning_parser)

    def is_parsed(self, asked: Asked) -> bool:
        """Whether replies to ``asked`` are parsed, which takes whole replies; others can be passed on as they come."""
        return self._reasoning or (asked.parse_tools and self._tools)

    def plain(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def make(self, ids: Sequence[int], asked: Asked, *, number: int) -> Reply:
        """The reply whose ids are ``ids``, without the token that ended it.

        Args:
            number: number of the call within its session; tool calls are numbered after it.
        """
        if not self.is_parsed(asked):
            return Reply(self.plain(ids))
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        try:
            reasoning, content, calls, markers = self._parser(text, ids, asked)
        except Exception as problem:  # noqa: BLE001 - vLLM documents no type; whatever the model wrote, it is text then
            log.warning("a reply cannot be parsed (%s: %s): %.200r", type(problem).__name__, problem, text)
            return Reply(text, failed=True)
        lost = not calls and not self._reasoning and content != text
        broken = any(not isinstance(parsed(arguments), dict) for _, arguments in calls)
        if asked.parse_tools and (broken or lost or (not calls and any(marker in text for marker in markers))):
            return Reply(text, failed=True)
        kept = calls[:1] if asked.one_call else calls
        return Reply(content, reasoning, tuple(_call(number, at, *call) for at, call in enumerate(kept)))


def _call(number: int, at: int, name: str, arguments: str) -> Mapping[str, Any]:
    """A tool call. Its id is unique within the session, and has the nine characters that some templates insist on."""
    call = {"name": name, "arguments": arguments}
    return {"id": f"c{number:04d}{at:04d}", "type": "function", "function": call}


_Parse = Callable[[str, Sequence[int], Asked], tuple[str, str, list[tuple[str, str]], list[str]]]


def _parser(tokenizer: Tokenizer, tools: str | None, reasoning: str | None) -> _Parse:
    """A function from text, its ids and the request to reasoning, content, tool calls, and how calls begin."""
    if tools is None and reasoning is None:
        return lambda text, ids, asked: ("", text, [], [])
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for name in _PARSER_LOGGERS:  # they log a traceback for a broken call, which is ordinary, and counted here
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _check_name("tool_parser", tools, ToolParserManager.list_registered())
    _check_name("reasoning_parser", reasoning, ReasoningParserManager.list_registered())
    try:
        made = ParserManager.get_parser(tools, reasoning, enable_auto_tools=tools is not None, tokenizer=tokenizer)
    except TypeError as problem:
        raise JobError(f"gateway: {problem.__cause__ or problem}") from problem

    def parse(text: str, ids: Sequence[int], asked: Asked) -> tuple[str, str, list[tuple[str, str]], list[str]]:
        chosen = {"tools": list(asked.setting.tools), "tool_choice": "auto"} if asked.parse_tools else {}
        request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], **chosen)
        parser = made(tokenizer, request.tools, chat_template_kwargs=dict(asked.setting.options), model_config=None)
        thought, content, calls = parser.parse(
            text, request, enable_auto_tools=asked.parse_tools, model_output_token_ids=list(ids)
        )
        markers = [getattr(parser.tool_parser, name, None) for name in _MARKERS]
        begins = [marker for marker in markers if isinstance(marker, str) and marker]
        return thought or "", content or "", [(call.name, call.arguments) for call in calls or []], begins

    return parse


def _check_name(key: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:  # a name that a plug-in of vLLM might have had
        raise unknown_parser(key, name, sorted(known))


class StreamedText:
    """Text of ids that come one after another. Ids whose text is not complete yet wait for the next ones."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode, self._ids = decode, list[int]()
        self._start = self._read = 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` complete."""
        self._ids += ids
        before, text = self._decode(self._ids[self._start : self._read]), self._decode(self._ids[self._start :])
        if text.endswith("\N{REPLACEMENT CHARACTER}") or len(text) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def rest(self) -> str:
        """The text of the ids that still waited, when none follows."""
        before, text = self._decode(self._ids[self._start : self._read]), self._decode(self._ids[self._start :])
        self._start = self._read = len(self._ids)
        return text[len(before) :]


class Pieces:
    """The text of an answer as it is sampled: passes it on piece by piece, and finds where the answer stops.

    What may be the beginning of a text at which the answer stops is held back.

    Args:
        stop_ids: tokens that end an answer and have no text.
        stops: texts at which it stops.
        on_text: called with each piece.

    Attributes:
        stop: the text at which it stopped; "" if at none.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_ids: Collection[int],
        stops: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self._stream, self._stop_ids, self._stops, self._on_text = StreamedText(decode), stop_ids, stops, on_text
        self._longest = max(map(len, stops), default=1)
        self._text, self._sent, self._count = "", 0, 0
        self.stop = ""

    def add(self, ids: Sequence[int]) -> int | None:
        """Take the next ids; returns how many of all are the answer's, once the last of these completes a stop."""
        for token in ids:
            self._count += 1
            if token not in self._stop_ids and self._grow(self._stream.add([token])):
                return self._count
        self._send(len(self._text) - self._longest + 1)
        return None

    def end(self) -> str:
        """Pass on what is left; returns the whole text."""
        if not self.stop:
            self._text += self._stream.rest()
        self._send(len(self._text))
        return self._text

    def _grow(self, text: str) -> bool:
        """Add ``text``; whether a stop is complete. The text then ends before it."""
        begin = max(0, len(self._text) - self._longest + 1)
        self._text += text
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop, begin)) >= 0]
        if found:
            at, self.stop = min(found)
            self._text = self._text[:at]
        return bool(found)

    def _send(self, end: int) -> None:
        if self._on_text and end > self._sent:
            self._on_text(self._text[self._sent : end])
            self._sent = end
