"""The shape of a decoder of the Llama family, and what follows from it: parameters, cache, activations in bytes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volley.lora import LoraSpec
from volley.update import LearnerSpec

BF16, FP32 = 2, 4
WIDTHS = {"bfloat16": BF16, "float32": FP32}
MOST_TOKENS, LEAST_TOKENS = 16384, 512  # of a micro-batch, unless the job says otherwise
CPU_ACTIVATIONS = 2 << 30  # bytes of activations that a micro-batch may keep on a CPU
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

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "Shape":
        """Take the shape from a decoded ``config.json``. Raises KeyError if it is not one of this family."""
        fields = {name: config[name] for name in cls.__dataclass_fields__ if name not in _FLAGS}
        return cls(**fields, **{name: bool(config.get(name, False)) for name in _FLAGS})

    @classmethod
    def of(cls, model: Path) -> "Shape | None":
        """Read the shape of the model in a folder; None if it has no ``config.json`` or is of another family."""
        try:
            return cls.of_config(json.loads((model / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError):
            return None

    @property
    def kv_size(self) -> int:
        return self.hidden_size // self.num_attention_heads * self.num_key_value_heads

    @property
    def parameters(self) -> int:
        """Embeddings, attention, gated feed-forward, norms."""
        h, kv, m = self.hidden_size, self.kv_size, self.intermediate_size
        layer = 2 * h * h + 2 * h * kv + 3 * h * m + 2 * h + (h + 2 * kv if self.attention_bias else 0)
        return (1 if self.tie_word_embeddings else 2) * self.vocab_size * h + self.num_hidden_layers * layer + h

    def adapters(self, lora: LoraSpec) -> int:
        """Number of parameters of the low-rank adapters on every matrix that ``lora`` targets."""
        h, kv, m = self.hidden_size, self.kv_size, self.intermediate_size
        sides = {"q_proj": 2 * h, "k_proj": h + kv, "v_proj": h + kv, "o_proj": 2 * h}
        sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), h + m)
        named = sides.values() if lora.target_modules == "all-linear" else (sides[name] for name in lora.target_modules)
        return self.num_hidden_layers * lora.rank * sum(named)

    @property
    def kv_bytes(self) -> int:
        """Bytes of key-value cache per token."""
        return 2 * self.num_hidden_layers * self.kv_size * BF16

    def activation_bytes(self, width: int) -> int:
        """Bytes kept per token for the backward pass without checkpointing: the inputs of the matmuls, of ``width``
        bytes per number, and those of the two norms in float32. `benchmarks.learner.memory` compares with PyTorch."""
        h, kv, m = self.hidden_size, self.kv_size, self.intermediate_size
        return self.num_hidden_layers * ((6 * h + 2 * kv + 4 * m) * width + 2 * h * FP32)

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
    if spec.gpus_per_rank or shape is None:
        return MOST_TOKENS
    fit = CPU_ACTIVATIONS // shape.kept_bytes(width, checkpointed=spec.gradient_checkpointing)
    return min(MOST_TOKENS, max(LEAST_TOKENS, 1 << max(0, fit.bit_length() - 1)))
