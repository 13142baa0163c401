"""vLLM's route for token ids, /inference/v1/generate, read as a call of /v1/completions.

The ids are the prompt; the fields of ``sampling_params`` are those of the request. Answers are ids, too, so options
about text ask for nothing.
"""

import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from actors.gateway.asked import READ, BadRequest, is_number

_TOP: dict[str, Callable[[Any], bool]] = {  # fields beside those read, with the values that ask for nothing more
    "stream": lambda value: value is False,
    "output_mode": lambda value: value == "tokens",
    "return_token_ids": lambda value: isinstance(value, bool),
    "cache_salt": lambda value: isinstance(value, str),
    "request_id": lambda value: isinstance(value, str),
    "priority": is_number(0),
}
_PARAMS: dict[str, Callable[[Any], bool]] = {  # of vLLM's SamplingParams
    "skip_special_tokens": lambda value: isinstance(value, bool),
    "spaces_between_special_tokens": lambda value: isinstance(value, bool),
    "detokenize": lambda value: isinstance(value, bool),
    "include_stop_str_in_output": lambda value: isinstance(value, bool),
    "ignore_eos": lambda value: value is False,
    "min_tokens": is_number(0),
    "logprobs": is_number(0, 1),
}

_OF_REQUESTS = READ - {"max_tokens", "stop"}  # fields of a request that SamplingParams does not have


def as_completion(body: Mapping[str, Any], stops: Collection[int]) -> dict[str, Any]:
    """The request as one of /v1/completions.

    Args:
        stops: the tokens that end the model's answers.

    Raises:
        BadRequest: it asks for something that this server does not do.
    """
    ids, params = body.get("token_ids"), body.get("sampling_params")
    if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
        raise BadRequest("token_ids must be a non-empty list of token ids")
    if params is not None and not isinstance(params, dict):
        raise BadRequest("sampling_params must be an object")
    rest = {name: value for name, value in body.items() if name not in ("model", "token_ids", "sampling_params")}
    _refuse(rest, _TOP)
    params = dict(params or {})
    _check_stops(params.pop("stop_token_ids", None), stops)
    _refuse({name: params.pop(name) for name in (*_PARAMS, *_OF_REQUESTS) if name in params}, _PARAMS)
    return {**params, "prompt": ids, "model": body.get("model")}


def _refuse(given: Mapping[str, Any], harmless: Mapping[str, Callable[[Any], bool]]) -> None:
    for name, value in given.items():
        if value is not None and not (name in harmless and harmless[name](value)):
            raise BadRequest(f"{name} is not supported with the value {reprlib.repr(value):.40}: leave it out")


def _check_stops(asked: object, stops: Collection[int]) -> None:
    if not isinstance(asked, list | None) or not all(type(each) is int for each in asked or ()):
        raise BadRequest("stop_token_ids must be a list of token ids")
    if further := [each for each in asked or () if each not in stops]:
        raise BadRequest(
            f"stop_token_ids: {further[0]} does not end this model's answers; those that do are "
            f"{', '.join(map(str, sorted(stops)))}, and need not be named"
        )
