"""Writes the model of a GGUF file as a Hugging Face folder: weights, tokenizer, chat template.

Transformers reads the file, through the ``gguf`` package. It ignores what it does not know, which would give a model
that loads and answers worse, so everything that it would ignore is an error here.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from volley.errors import JobError
from volley.files import check_new, new_folder

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FAMILIES = ("llama", "qwen2", "qwen3")
PLAIN = frozenset({"F32", "F16", "BF16"})  # types of tensors that are not quantised
# Metadata that changes what the model computes, and that transformers does not read for these families.
UNREAD = ("rope.scaling.type", "attention.sliding_window", "expert_count", "logit_scale", "embedding_scale")
UNSCALED = ("none", 0, 0.0)
GPT2_SPLIT, DIGITS_SPLIT = frozenset({"gpt-2"}), frozenset({"smollm"})


@dataclass(frozen=True, slots=True)
class Imported:
    """What was written.

    Attributes:
        name: the name that the file gives the model, or the file's own.
        parameters: how many weights the model has.
        quantised: types of the quantised tensors, such as ``Q4_1``; empty if the weights are the published ones.
        chat: whether the file has a chat template.
    """

    name: str
    family: str
    parameters: int
    quantised: tuple[str, ...]
    chat: bool

    def __str__(self) -> str:
        weights = (
            f"dequantised from {', '.join(self.quantised)}: not exactly the published ones"
            if self.quantised
            else "as stored in the file"
        )
        template = "with" if self.chat else "without"
        return (
            f"{self.name} ({self.family}), {self.parameters:,} parameters, {template} chat template; weights {weights}"
        )


def import_gguf(file: Path, out: Path) -> Imported:
    """Write the model in ``file`` to the folder ``out`` in float32, complete or not at all.

    Raises:
        JobError: the file is no GGUF file, or of a kind that cannot be converted faithfully.
        HostError: ``out`` exists already or cannot be written.
    """
    check_new(out)
    reader = _open(file)
    facts = _facts(file, reader)
    about = _checked(file, reader, facts)
    with new_folder(out) as partial:
        tokenizer = _tokenizer(file, facts)
        _model(file, reader).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return about


def _open(file: Path) -> "GGUFReader":
    if not file.is_file():
        raise JobError(f"{file}: no such file; name a .gguf file")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise JobError(f"{file} is not a GGUF file: it does not begin with GGUF")
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except (ValueError, KeyError, IndexError, struct.error, OverflowError) as error:
        raise JobError(f"{file} is truncated or not a GGUF file of version 2 or 3: {error}") from error


def _facts(file: Path, reader: "GGUFReader") -> dict[str, Any]:
    """Return the file's metadata, the vocabulary excepted."""
    long = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")
    try:
        return {name: field.contents() for name, field in reader.fields.items() if name not in long}
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise JobError(f"{file}: its metadata cannot be read: {error}") from error


def _checked(file: Path, reader: "GGUFReader", facts: Mapping[str, Any]) -> Imported:
    """Return what the file holds; raises `JobError` if that cannot be converted faithfully."""
    family = facts.get("general.architecture")
    if family not in FAMILIES:
        raise JobError(f"{file}: architecture {family!r} is not supported: use a model of {', '.join(FAMILIES)}")
    for name in UNREAD:
        if (value := facts.get(f"{family}.{name}")) is not None and value not in UNSCALED:
            raise JobError(f"{file}: {family}.{name} = {value} would be lost: get this model in Hugging Face format")
    if "tokenizer.ggml.tokens" not in reader.fields:
        raise JobError(f"{file} has no vocabulary: use a file of a whole language model")
    kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors} - PLAIN)
    name = str(facts.get("general.name") or file.stem)
    count = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return Imported(name, str(family), count, tuple(kinds), bool(facts.get("tokenizer.chat_template")))


def _model(file: Path, reader: "GGUFReader") -> "PreTrainedModel":
    """Load the weights in float32; raises `JobError` unless model and file have the same tensors."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
    except (ValueError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
        raise JobError(f"{file} does not load: {' '.join(str(error).split())[:300]}") from error
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == model.config.model_type)
    names = get_tensor_name_map(arch, model.config.num_hidden_layers)
    read = {f"{names.get_name(stem)}.{suffix}" for stem, _, suffix in (n.rpartition(".") for n in model.state_dict())}
    with torch.device("meta"):
        described = AutoModelForCausalLM.from_config(model.config).state_dict()
    for names_of, problem in (
        (sorted({tensor.name for tensor in reader.tensors} - read), "would be lost"),
        (sorted(info["missing_keys"]), "is missing"),
        (
            [n for n, each in model.state_dict().items() if each.shape != described[n].shape],
            "has another shape than its header says",
        ),
    ):
        if names_of:
            raise JobError(f"{file}: {', '.join(names_of[:4])} {problem}: get this model in Hugging Face format")
    del model.config.quantization_config  # the weights are plain numbers, which saving else refuses to believe
    model.hf_quantizer, model.is_quantized = None, False
    return model


def _tokenizer(file: Path, facts: Mapping[str, Any]) -> "PreTrainedTokenizerBase":
    """Load the tokenizer, with the rules that transformers leaves out; raises `JobError` if some are unknown."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(f"{file}: its tokenizer does not load: {' '.join(str(error).split())[:300]}") from error
    if facts.get("tokenizer.ggml.model") == "gpt2" and (split := _split(file, facts)) is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = split
    begins = tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
    wanted = facts.get("tokenizer.ggml.add_bos_token")
    if tokenizer.bos_token is not None and wanted is not None and bool(wanted) != begins:
        tokenizer.add_bos_token = bool(wanted)
        tokenizer.update_post_processor()
    return tokenizer


def _split(file: Path, facts: Mapping[str, Any]) -> "PreTokenizer | None":
    """Return how text is split before merging, where transformers does not know it; None where it does."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = facts.get("tokenizer.ggml.pre")
    if name in GGUF_PRE_TOKENIZER_SPLITS or name in GPT2_SPLIT:
        return None
    if name in DIGITS_SPLIT:
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    unknown = f"how its tokenizer splits text ({json.dumps(name)}) is not known"
    raise JobError(f"{file}: {unknown}: get this model in Hugging Face format")
