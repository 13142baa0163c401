"""How far the actors' log-probs are from the learner's in bfloat16, when adapters are merged into rounded matrices.

    python -m benchmarks.learner.adapters MODEL [--prompts FILE.jsonl] [--rank 16]

It prints mean absolute differences of the next token's log-prob, in expectation over the model's own distribution at
every position of the prompts. ``learner`` keeps adapters separate from the bfloat16 matrices, ``actor`` uses their sum
rounded to bfloat16, and ``exact`` is the learner in float32 with the same adapters. B is drawn at random at several
scales; A is initialised as PEFT does.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.objectives.report import print_table
from learner.lora import published, split
from learner.policy import load_lm, load_trained
from volley.lora import UP, LoraSpec
from volley.model import ModelSpec

SIZES = (0.001, 0.003, 0.01, 0.03)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path("demo/data/heldout.jsonl"))
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ids_RL = tokens(options.model, options.prompts)
    base = logprobs(load_lm(options.model, "float32"), ids_RL)
    noise = difference(base, logprobs(load_lm(options.model, "bfloat16"), ids_RL), base)
    spec = LoraSpec(rank=options.rank, alpha=2 * options.rank)
    rows = [[f"{size:g}", *row(options.model, spec, size, ids_RL, base)] for size in SIZES]
    print(f"without adapters, bfloat16 against float32: {noise:.4f}")
    print_table(["B drawn with", "adapters change", "learner - actor", "learner - exact", "actor - exact"], rows)


def row(model: Path, lora: LoraSpec, size: float, ids_RL: Tensor, base: Tensor) -> list[float]:
    """The differences for one scale of B."""
    narrow = ModelSpec(path=model, dtype="bfloat16", lora=lora)
    learner = drawn(load_trained(narrow, seed=0), size)
    adapted = dict(learner.named_parameters())
    exact = load_trained(ModelSpec(path=model, lora=lora), seed=0)
    actor = load_lm(model, "bfloat16")
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(adapted[name].float())
        actor.load_state_dict(split(adapted, lora)[0], strict=False)  # a tied head is not among them
    in_learner, in_actor, in_exact = (logprobs(each, ids_RL) for each in (learner, actor, exact))
    pairs = ((base, in_exact), (in_learner, in_actor), (in_learner, in_exact), (in_actor, in_exact))
    return [difference(one, other, base) for one, other in pairs]


@torch.no_grad()
def drawn(lm: Any, size: float) -> Any:
    """The model with its B matrices drawn from a normal distribution."""
    torch.manual_seed(1)
    for name, parameter in published(lm):
        if name.endswith(UP):
            parameter.normal_(std=size)
    return lm


def tokens(model: Path, prompts: Path) -> Tensor:
    """Tokens of the file's first 64 prompts, cut to the length of the shortest, int64 [R, L]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in prompts.read_text().splitlines()[:64]]
    return torch.tensor([row[: min(map(len, rows))] for row in rows])


@torch.no_grad()
def logprobs(lm: Any, ids_RL: Tensor) -> Tensor:
    """Log-probs of every next token, float32 [R, L, V]."""
    logprob_RLV: Tensor = lm(ids_RL).logits.float().log_softmax(-1)
    return logprob_RLV


def difference(one_RLV: Tensor, other_RLV: Tensor, base_RLV: Tensor) -> float:
    """Expected absolute difference under ``base_RLV``, mean over positions."""
    return float((base_RLV.exp() * (one_RLV - other_RLV).abs()).sum(-1).mean())


if __name__ == "__main__":
    main()
