"""Write a small, untrained Llama model with a character tokenizer, in Hugging Face format."""

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CHARACTERS = "0123456789+-*()= :"


def tokenizer_of(tokens: Iterable[str], pattern: str) -> PreTrainedTokenizerFast:
    """A tokenizer that splits text at matches of ``pattern``; pieces not in ``tokens`` are unknown. It adds no BOS."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *tokens])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, **SPECIAL)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    return tokenizer_of(CHARACTERS, ".")


def make(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    width: int = 128,
    length: int = 64,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Write the model and its tokenizer (by default one token per character) to ``folder``; returns ``folder``."""
    tokenizer = tokenizer or character_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make(args.folder, seed=args.seed, layers=args.layers, width=args.width))


if __name__ == "__main__":
    main()
