"""What the sections of the GPU benchmark share: the device, random models of real shapes, timing, rows of the table."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.attention import implementation
from learner.batch import RankBatch, rank_batch
from learner.config import LearnerConfig
from learner.engine import Engine, join_ranks, open_store
from learner.policy import Policy, load_trained
from learner.records import ScoredGroup
from tests.learner_batches import random_group, scored
from volley.lora import LoraSpec
from volley.model import ModelSpec
from volley.records import Group
from volley.update import LearnerSpec, Optimizer, PolicyUpdate

GIB = 1 << 30
# All of a step's work: every sample is computed, and no reference policy is.
WHOLE = PolicyUpdate.model_validate({"kl": {"logged": False}, "kl_sample_fraction": 1.0})
SHARPNESS = 8.0  # factor on the last norm: random logits become as peaked as those of a trained model
# hidden size, feed-forward, layers, heads, key-value heads, vocabulary, tied embeddings
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "tiny": (64, 128, 2, 2, 1, 512, True),
    "135M": (576, 1536, 30, 9, 3, 49_152, True),  # SmolLM2-135M
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),  # Qwen2.5-1.5B
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),  # Qwen2.5-3B
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),  # Qwen2.5-7B
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: what was measured, and the figure with its unit."""

    section: str
    what: str
    figure: str


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a section runs, and on what.

    Attributes:
        device: "cuda" or "cpu".
        size: a key of `SHAPES`.
        folder: scratch space.
        small: short rows and few repeats, for a trial on a CPU.
    """

    device: str
    size: str
    folder: Path
    small: bool

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def vocabulary(self) -> int:
        return SHAPES[self.size][5]

    def model(self, size: str | None = None) -> Path:
        """The folder of a random model, made at the first call."""
        folder = self.folder / (size or self.size)
        if not folder.exists():
            make(size or self.size, folder, self.device)
        return folder

    def config(
        self, *, dtype: str, size: str | None = None, lora: LoraSpec | None = None, **learner: Any
    ) -> LearnerConfig:
        """A learner of one rank on the device."""
        spec = ModelSpec.model_validate({"path": self.model(size), "dtype": dtype, "lora": lora})
        return LearnerConfig(
            model=spec,
            learner=LearnerSpec.model_validate({"gpus_per_rank": float(self.cuda), **learner}),
            optimizer=Optimizer(lr=1e-5, clip_norm=None),
            steps=1000,
            seed=0,
            log_dir=self.folder,
            update=WHOLE,
        )

    def join(self) -> None:
        """Become the only rank; once per process."""
        join_ranks(0, 1, open_store("127.0.0.1", 0, 1), cuda=self.cuda, deadline_s=300)

    def settle(self) -> None:
        """Wait until the device has done all it was given."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], repeats: int = 3) -> float:
        """The median wall time of ``call``, after one call that warms up."""
        call()
        times = []
        for _ in range(1 if self.small else repeats):
            self.settle()
            begun = time.perf_counter()
            call()
            self.settle()
            times.append(time.perf_counter() - begun)
        return float(np.median(times))

    def peak(self, call: Callable[[], object]) -> float:
        """The device's peak memory during ``call``, GiB; nan on a CPU."""
        if not self.cuda:
            call()
            return float("nan")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / GIB


def make(size: str, folder: Path, device: str) -> None:
    """Write a random Qwen2 model of this size in bfloat16; it has no tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    width, inner, layers, heads, pairs, vocabulary, tied = SHAPES[size]
    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=65_536,
    )
    torch.manual_seed(0)
    with torch.device(device):
        lm = Qwen2ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        lm.model.norm.weight.fill_(SHARPNESS)
    lm.save_pretrained(folder)
    del lm
    torch.cuda.empty_cache()  # the sections' processes need it


def engine_of(config: LearnerConfig, *, checkpointed: bool = False) -> Engine:
    """The policy under ZeRO-3, as a rank of a run loads it."""
    return Engine(
        lambda: Policy(load_trained(config.model, 0, attention=implementation(config), checkpointed=checkpointed), 1.0),
        config.optimizer,
        config,
    )


def groups_of(
    setting: Setting, count: int, *, n: int, prompt: int, lengths: tuple[int, int]
) -> tuple[list[Group], list[ScoredGroup]]:
    """Groups of random tokens, every other sample rewarded; sample lengths are drawn from the half-open range."""
    rng = np.random.default_rng(0)
    groups = [
        random_group(rng, i, n=n, vocabulary=setting.vocabulary, prompt=(prompt, prompt + 1), length=lengths)
        for i in range(count)
    ]
    return groups, [scored(group, [float(i % 2) for i in range(n)]) for group in groups]


def batch_of(groups: Sequence[Group], columns: Sequence[ScoredGroup]) -> RankBatch:
    """The groups as a rank trains on them."""
    return rank_batch(groups, columns, version=0, mask_truncated=False)
