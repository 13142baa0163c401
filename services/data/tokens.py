"""Tokenisation with one convention for training, evaluation and supervised rows.

A prompt is encoded as the tokenizer encodes any text: with a beginning-of-text token only if the tokenizer adds one.
"""

import json
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from volley.errors import JobError
from volley.imports import without, without_collection
from volley.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt and its token ids, int32 [p]."""

    prompt: Prompt
    tokens_p: NDArray[np.int32]


def import_tokenizers_alone() -> None:
    """Import transformers without torch, which tokenizers do not need and which takes most of the import time.

    Afterwards only the tokenizers of transformers work in this process. Does nothing if torch or transformers is
    already imported.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would warn that torch is missing
    try:
        with without("torch"), without_collection():
            from transformers import AutoTokenizer  # noqa: F401
    finally:
        del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]


def load_tokenizer(model: Path) -> "PreTrainedTokenizerBase":
    """Load the model's tokenizer. Raises `JobError` if the folder is incomplete or the tokenizer does not load."""
    if (model / "adapter_config.json").is_file() and not (model / "config.json").is_file():
        whole = model.parent if (model.parent / "config.json").is_file() else "the folder `volley export` writes"
        raise JobError(f"model {model} is only an adapter: name a full model; the merged one is in {whole}")
    if not (model / "config.json").is_file():
        raise JobError(f"model {model}: no config.json there; name a folder in Hugging Face format, or hub: OWNER/NAME")
    _check_weights(model)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        if not any((model / name).is_file() for name in TOKENIZER_FILES):
            raise JobError(
                f"model {model} has no tokenizer: copy tokenizer.json and tokenizer_config.json there"
            ) from error
        raise JobError(f"model {model}: its tokenizer does not load: {' '.join(str(error).split())[:200]}") from error


def _check_weights(model: Path) -> None:
    """Raise `JobError` for missing or truncated weights, seconds before a process would fail to load them."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise JobError(f"model {model}: no *.safetensors there; save it with save_pretrained")
    for file in files:
        try:
            with file.open("rb") as raw:
                (length,) = struct.unpack("<Q", raw.read(8).ljust(8, b"\xff"))
                header = json.loads(raw.read(length)) if length < file.stat().st_size else {}
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            whole = 8 + length + max(ends, default=0) == file.stat().st_size
        except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError):
            whole = False
        if not whole:
            raise JobError(
                f"model {model} does not load: {file.name} is not a complete safetensors file; copy it again"
            )


_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")  # as types of models name it


def model_length(model: Path) -> int:
    """Return the model's maximum number of positions, from its ``config.json``."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise JobError(f"model {model}: config.json cannot be read: {error}") from error
    if isinstance(config, dict):
        config = config.get("text_config", config)
        lengths = (config.get(key) for key in _LENGTH_KEYS)
        if (length := next((each for each in lengths if isinstance(each, int)), None)) is not None:
            return length
    raise JobError(f"model {model}: config.json has no {_LENGTH_KEYS[0]}")


def needed_length(prompts: Sequence[EncodedPrompt], room: int) -> int:
    """Tokens of the longest prompt with ``room`` tokens after it: an engine that takes more only reserves more."""
    return max(len(each.tokens_p) for each in prompts) + room


def encode_prompts(
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    *,
    room: int,
    length: int,
    key: str = "sampling.max_tokens",
) -> list[EncodedPrompt]:
    """Tokenise prompts.

    Args:
        room: tokens to leave for the sample after each prompt.
        key: the job key that sets it, for the error message.
        length: the model's maximum number of positions.

    Raises:
        JobError: a prompt is empty, leaves no space for its sample in the model's length, or half of its tokens are
            unknown to the tokenizer.
    """
    ids = tokenizer([prompt.text for prompt in prompts]).input_ids
    encoded = [
        EncodedPrompt(prompt, np.asarray(tokens, dtype=np.int32)) for prompt, tokens in zip(prompts, ids, strict=True)
    ]
    longest = max(encoded, key=lambda each: len(each.tokens_p))
    if len(longest.tokens_p) + room > length:
        left = length - len(longest.tokens_p)
        advice = f"lower {key} to {left}, or drop longer prompts" if left > 0 else "drop or shorten it"
        raise JobError(
            f"prompt {longest.prompt.id} has {len(longest.tokens_p)} tokens; with {key} {room} that exceeds "
            f"the model's length {length}: {advice}"
        )
    empty = next((each.prompt.id for each in encoded if not len(each.tokens_p)), None)
    if empty is not None:
        raise JobError(f"prompt {empty} has no tokens under this model's tokenizer")
    _check_known(tokenizer, encoded)
    return encoded


def _check_known(tokenizer: "PreTrainedTokenizerBase", encoded: Sequence[EncodedPrompt]) -> None:
    """Raise `JobError` if at least half of a prompt's tokens are unknown: the data is for another model."""
    unk = tokenizer.unk_token_id
    other_uses = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    if unk is None or unk in other_uses:
        return
    for each in encoded:
        unknown = int((each.tokens_p == unk).sum())
        if 2 * unknown >= len(each.tokens_p):
            raise JobError(
                f"prompt {each.prompt.id}: {unknown} of its {len(each.tokens_p)} tokens are {tokenizer.unk_token}: the "
                "tokenizer in model.path does not know this text; drop the prompt, or use the model that the data is "
                "made for"
            )


def encode_answers(tokenizer: "PreTrainedTokenizerBase", answers: Sequence[str]) -> list[NDArray[np.int32]]:
    """Return the token ids of each answer, followed by the end-of-text token."""
    if tokenizer.eos_token_id is None:
        raise JobError("the model's tokenizer has no eos_token to end answers with")
    ids = tokenizer(list(answers), add_special_tokens=False).input_ids
    return [np.asarray([*tokens, tokenizer.eos_token_id], dtype=np.int32) for tokens in ids]
