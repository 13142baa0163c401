"""The shape of a decoder of the Llama family, and what follows from it: parameters, cache, activations in bytes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volley.errors import JobError
from volley.lora import LoraSpec
from volley.update import LearnerSpec

BF16, FP32 = 2, 4
WIDTHS = {"bfloat16": BF16, "float32": FP32}
MOST_TOKENS, LEAST_TOKENS = 16384, 512  # of a micro-batch, unless the job says otherwise
CPU_TOKENS = 2048  # the same on a CPU, where larger ones only add padding and leave the caches; measured
CPU_ACTIVATIONS = 2 << 30  # bytes of activations that a micro-batch may keep on a CPU
ATTENTION_COST = 1 / 3  # of attending to as many tokens as the hidden size, relative to a token's matmuls; measured
LARGEST_SIZE = 1 << 24
_FLAGS = ("tie_word_embeddings", "attention_bias")


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a decoder of the Llama family; field names as in ``config.json``."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    head_dim: int | None = None

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "Shape":
        """Take the shape from a decoded ``config.json``.

        Raises:
            KeyError: it is not one of this family.
            ValueError: a value is no possible size; the message names it.
        """
        sizes = {name: config[name] for name in cls.__dataclass_fields__ if name not in (*_FLAGS, "head_dim")}
        head = config.get("head_dim")
        for name, size in (sizes if head is None else {**sizes, "head_dim": head}).items():
            if not (isinstance(size, int) and not isinstance(size, bool) and 0 < size <= LARGEST_SIZE):
                raise ValueError(f"{name} is {size!r}, and must be an integer from 1 to {LARGEST_SIZE}")
        flags = {name: bool(config.get(name, False)) for name in _FLAGS}
        return cls(**sizes, **flags, head_dim=head)

    @classmethod
    def of(cls, model: Path) -> "Shape | None":
        """Read the shape of the model in a folder; None if it has no ``config.json`` or is of another family."""
        try:
            config = json.loads((model / "config.json").read_text(encoding="utf-8"))
            return cls.of_config(config) if isinstance(config, dict) else None
        except (OSError, ValueError, KeyError):
            return None

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def q_size(self) -> int:
        return self.head_size * self.num_attention_heads

    @property
    def kv_size(self) -> int:
        return self.head_size * self.num_key_value_heads

    @property
    def layer_parameters(self) -> int:
        """Of all layers: attention, gated feed-forward, norms."""
        h, q, kv, m = self.hidden_size, self.q_size, self.kv_size, self.intermediate_size
        layer = 2 * h * q + 2 * h * kv + 3 * h * m + 2 * h + (q + 2 * kv if self.attention_bias else 0)
        return self.num_hidden_layers * layer

    @property
    def head_parameters(self) -> int:
        """Of the output embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Embeddings, layers and the last norm."""
        embeddings = (1 if self.tie_word_embeddings else 2) * self.head_parameters
        return embeddings + self.layer_parameters + self.hidden_size

    def adapters(self, lora: LoraSpec) -> int:
        """Number of parameters of the low-rank adapters on every matrix that ``lora`` targets."""
        h, q, kv, m = self.hidden_size, self.q_size, self.kv_size, self.intermediate_size
        sides = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h}
        sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), h + m)
        if lora.target_modules == "all-linear":
            named = [*sides.values()]
        else:
            targets = [name.rpartition(".")[2] for name in lora.target_modules]  # names are matched by their ends
            if unknown := [name for name in targets if name not in sides]:
                raise JobError(f"model.lora.target_modules: no {unknown[0]!r} in the formulas, only {', '.join(sides)}")
            named = [sides[name] for name in targets]
        return self.num_hidden_layers * lora.rank * sum(named)

    @property
    def kv_bytes(self) -> int:
        """Bytes of key-value cache per token."""
        return 2 * self.num_hidden_layers * self.kv_size * BF16

    def activation_bytes(self, width: int) -> int:
        """Bytes kept per token for the backward pass without checkpointing: the inputs of the matmuls, of ``width``
        bytes per number, and those of the two norms in float32. `benchmarks.learner.memory` compares with PyTorch."""
        h, q, kv, m = self.hidden_size, self.q_size, self.kv_size, self.intermediate_size
        return self.num_hidden_layers * ((4 * h + 2 * q + 2 * kv + 4 * m) * width + 2 * h * FP32)

    def kept_bytes(self, width: int, *, checkpointed: bool) -> int:
        """`activation_bytes`; if layers are ``checkpointed``, the input of each, and one layer being recomputed."""
        whole = self.activation_bytes(width)
        if not checkpointed:
            return whole
        return self.num_hidden_layers * self.hidden_size * width + whole // self.num_hidden_layers


def micro_batch_tokens(spec: LearnerSpec, shape: Shape | None, width: int) -> int:
    """Padded tokens of a rank's forward pass: the job's number, or if that is null, one that fits the device.

    Args:
        shape: the model's; None if it is unknown.
        width: bytes per number of the model's dtype.
    """
    if spec.tokens_per_micro_batch is not None:
        return spec.tokens_per_micro_batch
    if spec.gpus_per_rank:
        return MOST_TOKENS
    if shape is None:
        return CPU_TOKENS
    fit = CPU_ACTIVATIONS // shape.kept_bytes(width, checkpointed=spec.gradient_checkpointing)
    return min(CPU_TOKENS, max(LEAST_TOKENS, 1 << max(0, fit.bit_length() - 1)))


def samples_sharing_row(prompt: int, sample: float, longest: float, n: int, *, budget: int, width: int) -> int:
    """The cheapest number of a group's samples that share a row with one copy of their prompt.

    Args:
        prompt, sample, longest: tokens of the prompt, of a sample on average, and of the longest sample.
        n: samples of the group.
        budget: padded tokens of a micro-batch, which a shared row may not exceed.
        width: the model's hidden size.
    """

    def cost(samples: int) -> float:
        length = prompt + samples * sample
        return n / samples * length * (1 + ATTENTION_COST * length / width)

    choices = [m for m in (*(1 << bit for bit in range(1, n.bit_length())), n) if prompt + m * longest <= budget]
    return min((1, *choices), key=cost)
