"""How many characters a token can stand for: the bound refuses nothing that fits; where text is lost, there is none."""

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.gateway.rendering import Renderer, TooLong
from actors.gateway.token_lengths import most_characters
from tests.chat_models import chat_tokenizer

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level(normalizer: Any = None, before: Any = None, **added: Any) -> Any:
    """A byte-level BPE tokenizer, as most models have."""
    core = tokenizers.Tokenizer.from_str(chat_tokenizer().backend_tokenizer.to_str())
    if normalizer is not None:
        core.normalizer = normalizer
    if before is not None:
        core.pre_tokenizer = pre_tokenizers.Sequence([before, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if added:
        core.add_special_tokens([AddedToken("<mask>", **added)])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def sentencepiece(*, byte_fallback: bool = True, pieces: tuple[str, ...] = ("▁", "a", "▁▁", "aa", "é")) -> Any:
    """A tokenizer with marks for spaces, as Llama 2 has."""
    vocabulary = {**BYTES, "<unk>": 256} | {piece: 257 + at for at, piece in enumerate(pieces)}
    model = models.BPE(
        vocab=vocabulary,
        merges=[("▁", "▁"), ("a", "a")],
        unk_token="<unk>",
        byte_fallback=byte_fallback,
        fuse_unk=True,
    )
    core = tokenizers.Tokenizer(model)
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=core)


SPLIT = pre_tokenizers.Split(tokenizers.Regex(r"\s+|\w+|[^\s\w]+"), "isolated")
BOUNDED = {
    "plain": byte_level(),
    "nfc": byte_level(normalizers.NFC()),
    "nfd": byte_level(normalizers.NFD()),
    "split": byte_level(normalizers.Sequence([normalizers.NFC()]), SPLIT),
    "sentencepiece": sentencepiece(),
}
LOSING = {
    "accents": byte_level(normalizers.StripAccents()),
    "compatibility": byte_level(normalizers.NFKC()),
    "stripped": byte_level(normalizers.Strip()),
    "shortened": byte_level(normalizers.Replace("  ", " ")),
    "pattern": byte_level(normalizers.Replace(tokenizers.Regex(" +"), " ")),
    "spaces": byte_level(before=pre_tokenizers.WhitespaceSplit()),
    "removed": byte_level(before=pre_tokenizers.Split(" ", "removed")),
    "left": byte_level(lstrip=True),
    "right": byte_level(rstrip=True),
    "unknown": sentencepiece(byte_fallback=False),
    "words": PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")), unk_token="?"
    ),
}
# Repeated pieces reach the longest tokens; the characters are those that normal forms join, and a byte's every kind.
PIECES = st.tuples(
    st.sampled_from(
        [
            " ",
            "a",
            "the ",
            "é",
            "\u1f82",
            "e\u0301",
            "\u03b1\u0313\u0300\u0345",
            "\u1112\u1161\u11ab",
            "\u212a",
            "你",
            "🙂",
            "<mask>",
        ]
    ),
    st.integers(1, 40),
)


@pytest.mark.parametrize("name", BOUNDED)
@given(parts=st.lists(PIECES | st.text(max_size=20).map(lambda text: (text, 1)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_no_token_stands_for_more(name: str, parts: list[tuple[str, int]]) -> None:
    text = "".join(piece * count for piece, count in parts)
    most = most_characters(BOUNDED[name])
    assert most is not None
    assert len(text) <= most * len(BOUNDED[name](text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("name", LOSING)
def test_there_is_no_bound_where_text_is_lost(name: str) -> None:
    assert most_characters(LOSING[name]) is None


def test_tokenizers_of_other_kinds_have_no_bound() -> None:
    assert most_characters(object()) is None


def test_the_bound_is_the_longest_token() -> None:
    names = json.loads(BOUNDED["plain"].backend_tokenizer.to_str())["model"]["vocab"]
    longest = max(map(len, [*names, "<|im_end|>"]))
    assert most_characters(BOUNDED["plain"]) == longest
    assert most_characters(BOUNDED["nfc"]) == 4 * longest


def test_texts_that_cannot_fit_are_not_tokenised() -> None:
    renderer = Renderer(BOUNDED["plain"], [])
    most = most_characters(BOUNDED["plain"])
    assert most is not None
    assert len(renderer.tokens("a " * most, room=2)) > 2, "more than there is room for, but it had to be tokenised"
    with pytest.raises(TooLong, match="at least 4 tokens"):
        renderer.tokens("a" * (3 * most + 1), room=3)
    assert Renderer(LOSING["stripped"], []).tokens(" " * 10_000 + "a", room=1) == renderer.tokens("a")
