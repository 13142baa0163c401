"""Tokenising prompts, one convention for training, evaluation and supervised rows.

A prompt is encoded as its tokenizer encodes a text: with a beginning-of-text token only if the tokenizer adds one.
"""

import json
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from volley.errors import JobError
from volley.records import Prompt


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt and its token ids, int32 [p]."""

    prompt: Prompt
    tokens_p: NDArray[np.int32]


def import_tokenizers_alone() -> None:
    """Import transformers without torch, which its tokenizers do not need and which takes most of the time.

    Nothing else of transformers works in this process from then on. Without effect where either is imported already.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would say that there is no torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # its import fails
    try:
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"], os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]


def load_tokenizer(model: Path) -> Any:
    """The model's tokenizer; raises `JobError` where the folder holds none that loads."""
    if (model / "adapter_config.json").is_file() and not (model / "config.json").is_file():
        whole = model.parent if (model.parent / "config.json").is_file() else "the folder `volley export` writes"
        raise JobError(f"model {model} is an adapter alone: give a whole model, which is merged in {whole}")
    if not (model / "config.json").is_file():
        raise JobError(f"model {model}: no config.json there; give a folder in Hugging Face format")
    _check_weights(model)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise JobError(f"model {model}: its tokenizer does not load: {' '.join(str(error).split())[:200]}") from error


def _check_weights(model: Path) -> None:
    """Raise `JobError` for weights that are missing or cut off: seconds before a process would."""
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
            raise JobError(f"model {model} does not load: {file.name} is no whole safetensors file; copy it again")


def model_length(model: Path) -> int:
    """Positions the model was made for, from its ``config.json``."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise JobError(f"model {model}: config.json can not be read: {error}") from error
    length = config.get("max_position_embeddings") if isinstance(config, dict) else None
    if not isinstance(length, int):
        raise JobError(f"model {model}: config.json names no max_position_embeddings")
    return length


def encode_prompts(
    tokenizer: Any, prompts: Sequence[Prompt], *, room: int, length: int, key: str = "sampling.max_tokens"
) -> list[EncodedPrompt]:
    """Prompts with their token ids.

    Args:
        room: tokens a sample may take.
        key: where the job sets that.
        length: the model's length.

    Raises:
        JobError: a prompt and its sample do not fit in the model's length, or half of its tokens are unknown.
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
            f"prompt {longest.prompt.id} has {len(longest.tokens_p)} tokens; with {key} {room} that is over "
            f"the model's length {length}: {advice}"
        )
    empty = next((each.prompt.id for each in encoded if not len(each.tokens_p)), None)
    if empty is not None:
        raise JobError(f"prompt {empty} has no tokens under this model's tokenizer")
    _check_known(tokenizer, encoded)
    return encoded


def _check_known(tokenizer: Any, encoded: Sequence[EncodedPrompt]) -> None:
    """Raise `JobError` for a prompt that the model would hardly see anything of: data of another model."""
    unk = tokenizer.unk_token_id
    if unk in (
        None,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    ):  # it says other things too
        return
    for each in encoded:
        unknown = int((each.tokens_p == unk).sum())
        if 2 * unknown >= len(each.tokens_p):
            raise JobError(
                f"prompt {each.prompt.id}: {unknown} of its {len(each.tokens_p)} tokens are {tokenizer.unk_token}: the "
                "tokenizer in model.path does not know this text; drop it, or take the model that the data is for"
            )


def encode_answers(tokenizer: Any, answers: Sequence[str]) -> list[NDArray[np.int32]]:
    """Token ids of each answer, closed by the end-of-text token."""
    if tokenizer.eos_token_id is None:
        raise JobError("the model's tokenizer has no eos_token: answers could not be ended")
    ids = tokenizer(list(answers), add_special_tokens=False).input_ids
    return [np.asarray([*tokens, tokenizer.eos_token_id], dtype=np.int32) for tokens in ids]
