"""The random models of the comparison, and the job that a stage of it takes part in."""

from dataclasses import dataclass
from pathlib import Path

from tests.models import tiny_llama
from volley.job import RLJob
from volley.plan.stages import Load

# hidden size, feed-forward size, layers, heads, key-value heads
SIZES = {"1M": (128, 384, 4, 4, 4), "3M": (192, 640, 6, 6, 2), "30M": (512, 1408, 9, 16, 16)}
VOCABULARY = 2048  # so large that a random model hardly ever ends a sample
HEAD = 32
PROMPT = 16


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage is measured with: ``groups`` of ``n`` samples of ``tokens`` tokens each."""

    groups: int
    n: int
    tokens: int
    turns: int


def make(folder: Path, shape: tuple[int, int, int, int, int]) -> Path:
    """Write a random model; returns its folder."""
    hidden, inner, layers, heads, kv_heads = shape
    return tiny_llama(
        folder,
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD,
        tie_word_embeddings=True,
        initializer_range=0.02,
    )


def job_of(model: Path, work: Work) -> RLJob:
    """A job on one actor and one rank, on CPUs, whose steps are ``work``."""
    return RLJob.model_validate(
        {
            **{"kind": "rl", "name": "measured", "steps": 1, "prompts_per_step": work.groups, "max_lag": 0},
            **{"model": {"path": str(model)}, "data": {"path": "none"}, "scorer": {"kind": "math"}},
            **{"objective": {"kind": "mean"}, "sampling": {"n": work.n, "max_tokens": work.tokens}},
            "update": {"kl": {"logged": False}, "kl_sample_fraction": 1.0},
            "actors": {"max_num_seqs": work.groups * work.n, "kv_cache_gb": 0.5},
            "learner": {"tokens_per_micro_batch": 2048},
        }
    )


def load_of(work: Work) -> Load:
    return Load(PROMPT, work.tokens, 0.01)
