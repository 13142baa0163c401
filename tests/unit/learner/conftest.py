"""A process group of one rank, and tiny models in float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.plain_engine import process_group_of_one


@pytest.fixture(scope="package", autouse=True)
def alone() -> Iterator[None]:
    torch.set_num_threads(1)
    with process_group_of_one():
        yield


def tiny_lm(kind: str = "llama", **overrides: Any) -> Any:
    """A model of type ``kind`` with random weights, in float64."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        **overrides,
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()
