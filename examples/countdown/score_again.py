"""Score an exported model without Volley: plain transformers, plain vLLM, and an independent scorer and pass@k.

    python -m examples.countdown.score_again demo/max-at-8/model demo/data/heldout.jsonl

It prints pass@k for each engine; both should agree with the run's last evaluation.
"""

import argparse
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

KS = (1, 2, 4, 8, 16, 32, 64)
MAX_TOKENS = 10
EXPRESSION = re.compile(r"\d(?:[+*-]\d)*")


def solves(text: str, row: dict[str, Any]) -> bool:
    """Whether ``text``, in digits and ``+ - *`` only, uses each number once and equals the target."""
    if not EXPRESSION.fullmatch(text) or Counter(map(int, re.findall(r"\d", text))) != Counter(row["numbers"]):
        return False
    terms = re.findall(r"([+-]?)(\d(?:\*\d)*)", text)
    total = sum((-1 if sign == "-" else 1) * math.prod(map(int, term.split("*"))) for sign, term in terms)
    return bool(total == row["target"])


def pass_at_k(n: int, correct: int, k: int) -> float:
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def by_transformers(model: Path, prompts: Sequence[str], n: int) -> list[list[str]]:
    """Draw n samples per prompt with transformers' ``generate``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.repeat(n, 1)
        out = lm.generate(ids, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_TOKENS)
        texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        ended = (out[:, ids.shape[1] :] == tokenizer.eos_token_id).any(-1).tolist()
        samples.append([text if end else "cut" for text, end in zip(texts, ended, strict=True)])
    return samples


def by_vllm(model: Path, prompts: Sequence[str], n: int) -> list[list[str]]:
    """Draw n samples per prompt with vLLM's offline engine."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(str(model), dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=512, seed=0)
    params = SamplingParams(n=n, temperature=1.0, max_tokens=MAX_TOKENS)
    results = engine.generate(list(prompts), params)
    return [[one.text if one.finish_reason == "stop" else "cut" for one in result.outputs] for result in results]


ENGINES: dict[str, Callable[[Path, Sequence[str], int], list[list[str]]]] = {
    "transformers": by_transformers,
    "vllm": by_vllm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--engine", choices=sorted(ENGINES), action="append", help="default: both")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.heldout.read_text().splitlines()]
    for name in args.engine or sorted(ENGINES):
        samples = ENGINES[name](args.model, [row["prompt"] for row in rows], args.n)
        correct = [sum(solves(text, row) for text in texts) for texts, row in zip(samples, rows, strict=True)]
        figures = {k: sum(pass_at_k(args.n, c, k) for c in correct) / len(rows) for k in KS if k <= args.n}
        print(f"{name:14}" + "  ".join(f"pass@{k} {value:.3f}" for k, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
