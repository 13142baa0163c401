"""A byte-level BPE tokenizer with a chat template: most texts have several encodings, as with real models."""

from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CHATML = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
END = "<|im_end|>"
ROOT = Path(__file__).parents[1]


@cache
def _trained(vocabulary: int) -> str:
    """A tokenizer trained on the project's pages, as JSON."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([page.read_text() for page in sorted(ROOT.glob("*.md"))], trainer)
    return str(bpe.to_str())


def chat_tokenizer(template: str = CHATML, *, end: str = END, vocabulary: int = 600) -> Any:
    """A tokenizer whose replies end in the special token ``end``."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(_trained(vocabulary)),
        eos_token=end,
        pad_token="<pad>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def split(tokenizer: Any, text: str) -> list[int]:
    """The ids of ``text`` letter by letter: an encoding that the model may sample and the tokenizer never makes."""
    return [token for letter in text for token in tokenizer(letter, add_special_tokens=False).input_ids]
