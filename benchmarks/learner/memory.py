"""Bytes that a forward pass keeps for the backward pass, with and without checkpointed layers, against the planner.

    python -m benchmarks.learner.memory [--tokens 512]

The model is a bfloat16 decoder with the proportions of Qwen2.5-7B and an eighth of its width. It runs on the CPU, as
bytes do not depend on the device. Counted are the tensors that PyTorch saves for the backward pass, except parameters.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.layout import MicroBatch
from learner.policy import Policy, checkpoint_layers
from volley.shape import BF16, Shape

LAYERS = 28
ATTENTIONS = ("sdpa", "eager")


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass: bytes kept in between, and the gradient."""

    kept: int
    gradient: Tensor


def narrow_model(attention: str, **changes: int) -> Any:
    """The model with random weights, which are the same at every call; ``changes`` go to its configuration."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=448,
        intermediate_size=2368,
        num_hidden_layers=LAYERS,
        vocab_size=19008,
        tie_word_embeddings=False,
        attn_implementation=attention,
        **{"num_attention_heads": 7, "num_key_value_heads": 1, **changes},
    )
    return Qwen2ForCausalLM(config).to(torch.bfloat16).eval()


def row_of(tokens: int) -> MicroBatch:
    """A micro-batch of one row of random tokens; all but the first are scored."""
    ids_RL = torch.randint(0, 19008, (1, tokens), generator=torch.Generator().manual_seed(0))
    at_T = torch.arange(tokens - 1)
    return MicroBatch(ids_RL, None, None, at_T, ids_RL[0, 1:], at_T)


def measured(lm: Any, batch: MicroBatch) -> Pass:
    """Run ``batch`` forward and backward through the policy."""
    kept = kept_bytes(Policy(lm, 1.0), batch)
    return Pass(kept, torch.cat([each.grad.flatten() for each in lm.parameters() if each.grad is not None]))


def kept_bytes(policy: Policy, batch: MicroBatch) -> int:
    """Run ``batch`` forward and backward; returns the bytes kept in between."""
    weights = {each.untyped_storage().data_ptr() for each in policy.lm.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprob_T, _ = policy(batch)
    torch.autograd.backward(-logprob_T.mean())
    return sum(kept.values())


def main() -> None:
    """Print one line per attention and per way of keeping activations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    tokens = parser.parse_args().tokens
    batch = row_of(tokens)
    with tempfile.TemporaryDirectory() as folder:
        narrow_model("sdpa").config.save_pretrained(folder)
        shape = Shape.of_config(json.loads(Path(folder, "config.json").read_text()))
    print(f"{LAYERS} layers, hidden {shape.hidden_size}, feed-forward {shape.intermediate_size}, {tokens} tokens, bf16")
    for attention in ATTENTIONS:
        plain = measured(narrow_model(attention), batch)
        lm = narrow_model(attention)
        checkpoint_layers(lm)
        checkpointed = measured(lm, batch)
        formulas = (shape.kept_bytes(BF16, checkpointed=each) for each in (False, True))
        for name, done, formula in zip(("kept", "checkpointed"), (plain, checkpointed), formulas, strict=True):
            print(
                f"{attention:6} {name:13} {done.kept / tokens / 1024:8.0f} KiB per token, formula "
                f"{formula / 1024:6.0f} KiB"
            )
        print(f"{attention:6} gradients bitwise equal: {torch.equal(plain.gradient, checkpointed.gradient)}")


if __name__ == "__main__":
    main()
