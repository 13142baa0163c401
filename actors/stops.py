"""The tokens that end a sample."""

import json
from pathlib import Path
from typing import Protocol


class HasEnd(Protocol):
    """The part of a transformers tokenizer used here."""

    @property
    def eos_token_id(self) -> int | None: ...


def stop_token_ids(model: Path, tokenizer: HasEnd) -> list[int]:
    """The tokenizer's, and those in the model's generation configuration, ascending."""
    ids = {tokenizer.eos_token_id}
    file = model / "generation_config.json"
    if file.is_file():
        eos = json.loads(file.read_text()).get("eos_token_id")
        ids |= set(eos) if isinstance(eos, list) else {eos}
    return sorted(each for each in ids if each is not None)
