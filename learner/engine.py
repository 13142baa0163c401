"""The policy under ZeRO-3: one DeepSpeed engine a rank, and the forward pass every step is made of."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learner.config import LearnerConfig
from learner.layout import MicroBatch
from learner.logprobs import chosen_logprobs
from volley.errors import JobError


class Policy(nn.Module):
    """A causal LM that is asked for log-probs of given tokens instead of logits."""

    def __init__(self, lm: nn.Module, temperature: float) -> None:
        super().__init__()
        self.lm = lm
        self.temperature = temperature

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each sample token of the micro-batch, float32 [T]."""
        lm: Any = self.lm
        hidden_RLH = lm.base_model(
            input_ids=batch.ids_RL,
            position_ids=batch.positions_RL,
            attention_mask=batch.mask_R1LL,
            use_cache=False,
        ).last_hidden_state
        hidden_TH = hidden_RLH[batch.row_T, batch.column_T]
        head = lm.get_output_embeddings()
        return chosen_logprobs(head, hidden_TH, batch.token_T, self.temperature, lm.config.vocab_size)


def join_ranks(rank: int, world: int, host: str, port: int, *, cuda: bool) -> None:
    """Make this process rank ``rank`` of ``world``: gloo on CPU, NCCL on CUDA."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_SIZE="1", MASTER_ADDR=host, MASTER_PORT=str(port)
    )
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", verbose=False)


def deepspeed_config(config: LearnerConfig) -> dict[str, Any]:
    """ZeRO stage 3, with the job's own ``deepspeed:`` keys laid over it."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # micro-batches are cut by tokens; losses carry their own scale
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "stage3_param_persistence_threshold": 100_000,
        },
    }
    if config.optimizer.clip_norm is not None:
        settings["gradient_clipping"] = config.optimizer.clip_norm
    if config.model.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
    return _merged(settings, config.learner.deepspeed)


def load_lm(path: Path, dtype: str) -> Any:
    """The model at ``path``; raises `JobError` where it does not load."""
    from transformers import AutoModelForCausalLM

    try:
        lm = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise JobError(f"model {path} does not load: {' '.join(str(error).split())[:300]}") from error
    return lm


def start_engine(config: LearnerConfig) -> Any:
    """The DeepSpeed engine around a `Policy`, parameters sharded as they are loaded."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    settings = deepspeed_config(config)
    sharding = HfDeepSpeedConfig(settings)  # from_pretrained shards at once while this object lives
    policy = Policy(load_lm(config.model.path, config.model.dtype), config.temperature)
    del sharding
    unset_hf_deepspeed_config()
    policy.train()
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )
    engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=settings)
    return engine


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``base``, dictionary by dictionary."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out
