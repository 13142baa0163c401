"""How many characters of a text a token can stand for: a long text is then known to have too many tokens unread.

A bound holds only if nothing of a text is lost on its way to the tokens. Lost are, for example, the spaces that some
pre-tokenizers remove, accents that a normalizer strips, and characters that share one token for the unknown.
"""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_Part = Mapping[str, Any]
_KEEPING = ("ByteLevel", "Metaspace", "Digits")  # pre-tokenizers that drop nothing
_CUTTING = ("Split", "Punctuation")  # ... unless their behavior is to remove
# NFC joins at most four characters in one: no character has a longer canonical decomposition, and none a shorter one.
_JOINED = {"NFC": 4, "NFD": 1, "Prepend": 1, "ByteLevel": 1}


def most_characters(tokenizer: object) -> int | None:
    """The most characters that one token can stand for; None if any number."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return None
    parts: dict[str, Any] = json.loads(core.to_str())
    model, added = parts["model"], parts["added_tokens"]
    joined = _joined(parts["normalizer"])
    swallowing = any(token["lstrip"] or token["rstrip"] for token in added)  # any number of spaces around them
    if joined is None or swallowing or not _keeps(parts["pre_tokenizer"]) or not _knows_all(model, parts):
        return None
    # A token of the vocabulary stands for at most as many characters as its name has, which are bytes or characters.
    return joined * max(map(len, [*model["vocab"], *(token["content"] for token in added)]))


def _joined(normalizer: _Part | None) -> int | None:
    """How many characters the normalizer makes one of at most; None if any number."""
    product = 1
    for part in _flat(normalizer):
        if part["type"] == "Replace":
            old = part["pattern"].get("String")
            joined = 1 if old is not None and len(part["content"]) >= len(old) else None
        else:
            joined = _JOINED.get(part["type"])
        if joined is None:
            return None
        product *= joined
    return product


def _keeps(pre_tokenizer: _Part | None) -> bool:
    return all(
        part["type"] in _KEEPING or (part["type"] in _CUTTING and part["behavior"] != "Removed")
        for part in _flat(pre_tokenizer)
    )


def _knows_all(model: _Part, parts: _Part) -> bool:
    """Whether there is a token for every byte, so that nothing is unknown."""
    if model["type"] != "BPE":
        return False
    before = [*_flat(parts["normalizer"]), *_flat(parts["pre_tokenizer"])]
    if any(part["type"] == "ByteLevel" for part in before):
        return set(model["vocab"]) >= set(ByteLevel.alphabet())
    return bool(model["byte_fallback"]) and set(model["vocab"]) >= {f"<0x{byte:02X}>" for byte in range(256)}


def _flat(part: _Part | None) -> list[_Part]:
    """The steps of a normalizer or pre-tokenizer, which may be sequences of others."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part.get("normalizers", part.get("pretokenizers", ())) for step in _flat(each)]
