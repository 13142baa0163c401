"""The bodies of OpenAI's API. Beside what that has, they carry the ids of prompt and answer, as vLLM's server does."""

import math
import time
from collections.abc import Sequence
from typing import Any

from actors.gateway.calls import Answer

_NOT_FINITE = -9999.0  # what vLLM writes for a log-prob that JSON cannot hold


def chat_body(answer: Answer, model: str) -> dict[str, Any]:
    """The answer of /v1/chat/completions."""
    choice = {
        "index": 0,
        "message": answer.reply.message(),
        "finish_reason": answer.finish,
        "logprobs": {"content": _logprobs(answer)},
        "token_ids": answer.drawn.tokens,
    }
    return {**_head("chat.completion", answer.number, model), "choices": [choice], **_tail(answer)}


def completion_body(answer: Answer, model: str) -> dict[str, Any]:
    """The answer of /v1/completions."""
    choice = {
        "index": 0,
        "text": answer.reply.content,
        "finish_reason": answer.finish,
        "logprobs": {
            "tokens": [_name(token) for token in answer.drawn.tokens],
            "token_logprobs": _finite(answer.drawn.logprobs),
            "top_logprobs": None,
            "text_offset": [],
        },
        "token_ids": answer.drawn.tokens,
        "prompt_token_ids": answer.prompt,
    }
    return {**_head("text_completion", answer.number, model), "choices": [choice], **_tail(answer)}


def generate_body(answer: Answer, model: str) -> dict[str, Any]:
    """The answer of /inference/v1/generate."""
    named = zip(answer.drawn.tokens, _logprobs(answer), strict=True)
    choice = {
        "index": 0,
        "finish_reason": answer.finish,
        "stop_reason": answer.drawn.stop_text or None,
        "token_ids": answer.drawn.tokens,
        "logprobs": {"content": [{"token_id": token, **entry} for token, entry in named]},
        "weight_versions": _spans(answer.drawn.versions),
    }
    head = {"request_id": f"call-{answer.number}", "created": int(time.time()), "model": model, "output_mode": "tokens"}
    return {**head, "choices": [choice], **_tail(answer)}


def chat_text(text: str, model: str, number: int) -> dict[str, Any]:
    """A piece of the streamed answer to a session's call ``number``."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
    return {**_head("chat.completion.chunk", number, model), "choices": [choice]}


def completion_text(text: str, model: str, number: int) -> dict[str, Any]:
    """A piece of a streamed answer of /v1/completions."""
    choice = {"index": 0, "text": text, "finish_reason": None}
    return {**_head("text_completion", number, model), "choices": [choice]}


def chat_end(answer: Answer, model: str, *, text_sent: bool) -> dict[str, Any]:
    """The last piece of a streamed chat answer: all that was not sent as text."""
    delta = dict(answer.reply.message())
    if text_sent:
        delta = {"role": "assistant"}
    if answer.reply.tool_calls:
        delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(answer.reply.tool_calls)]
    body = chat_body(answer, model)
    (choice,) = body["choices"]
    kept = {key: choice[key] for key in ("index", "finish_reason", "logprobs", "token_ids")}
    head = _head("chat.completion.chunk", answer.number, model)
    return {**head, "choices": [{**kept, "delta": delta}], **_ids(answer)}


def completion_end(answer: Answer, model: str, *, text_sent: bool) -> dict[str, Any]:
    """The last piece of a streamed answer of /v1/completions."""
    (choice,) = completion_body(answer, model)["choices"]
    return {
        **_head("text_completion", answer.number, model),
        "choices": [{**choice, "text": "" if text_sent else choice["text"]}],
        **_ids(answer),
    }


def usage_chunk(answer: Answer, model: str, kind: str) -> dict[str, Any]:
    """The piece about tokens with which a stream ends if the request asks for it."""
    return {**_head(kind, answer.number, model), "choices": [], "usage": _usage(answer)}


def _head(kind: str, number: int, model: str) -> dict[str, Any]:
    return {"id": f"call-{number}", "object": kind, "created": int(time.time()), "model": model}


def _tail(answer: Answer) -> dict[str, Any]:
    return {"usage": _usage(answer), **_ids(answer)}


def _ids(answer: Answer) -> dict[str, Any]:
    return {"prompt_token_ids": answer.prompt}


def _usage(answer: Answer) -> dict[str, int]:
    prompt, sampled = len(answer.prompt), len(answer.drawn.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(answer: Answer) -> list[dict[str, Any]]:
    pairs = zip(answer.drawn.tokens, _finite(answer.drawn.logprobs), strict=True)
    return [{"token": _name(token), "logprob": value, "bytes": None, "top_logprobs": []} for token, value in pairs]


def _finite(logprobs: Sequence[float]) -> list[float]:
    return [value if math.isfinite(value) else _NOT_FINITE for value in logprobs]


def _spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Which tokens of an answer were sampled with which version of the weights, as vLLM writes it."""
    starts = [at for at, version in enumerate(versions) if at == 0 or versions[at - 1] != version]
    ends = [*starts[1:], len(versions)]
    return [{"version": str(versions[a]), "start": a, "end": b} for a, b in zip(starts, ends, strict=False)]


def _name(token: int) -> str:
    return f"token_id:{token}"
