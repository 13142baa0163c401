"""Prompts as token ids: those that do not fit the model or that it cannot read are rejected by name."""

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.data.tokens import encode_prompts
from volley.errors import JobError
from volley.records import Prompt


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """One token per digit; anything else is unknown."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "</s>", *"0123456789"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **special)


def encode(text: str, made: PreTrainedTokenizerFast) -> list[int]:
    (each,) = encode_prompts(made, [Prompt("data.jsonl:7", text, {})], room=4, length=16)
    return [int(token) for token in each.tokens_p]


def test_a_prompt_of_mostly_unknown_tokens_is_rejected() -> None:
    made = tokenizer(eos_token="</s>")
    assert encode("12x", made) == [3, 4, 0]
    with pytest.raises(JobError, match=r"prompt data\.jsonl:7: 2 of its 4 tokens are <unk>: the tokenizer"):
        encode("1x2x", made)


def test_an_unknown_token_that_is_also_the_end_of_text_is_not_counted() -> None:
    assert encode("xx", tokenizer(eos_token="<unk>")) == [0, 0]


def test_a_prompt_that_is_too_long_is_rejected() -> None:
    with pytest.raises(JobError, match=r"prompt data\.jsonl:7 has 13 tokens; .* lower sampling\.max_tokens to 3"):
        encode("1" * 13, tokenizer(eos_token="</s>"))
