"""Small real models for tests: a random Llama with a character tokenizer, in Hugging Face format."""

from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+-*=()/, abcdefghijklmnopqrstuvwxyz?"
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


def tiny_llama(folder: Path, seed: int = 0, tokenizer: Any = None, **overrides: Any) -> Path:
    """Write a Llama of about 0.1M parameters to ``folder`` and return it; ``overrides`` go to ``LlamaConfig``.

    Args:
        tokenizer: None for `character_tokenizer`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer or character_tokenizer()
    config = LlamaConfig(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,  # vLLM's CPU attention requires a multiple of 32
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "initializer_range": 0.2,  # large, so that different weights give clearly different log-probs
            **overrides,
        }
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def character_tokenizer() -> Any:
    """A tokenizer with one token per character, which puts ``<bos>`` before every prompt."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((PAD, BOS, EOS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
