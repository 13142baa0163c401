"""The policy: a causal language model that returns log-probs of given tokens."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from learner.engine import Engine
from learner.layout import MicroBatch, Piece, micro_batches
from learner.linear import speed_up
from learner.logprobs import TokenScorer
from learner.lora import add_adapters, without_adapters
from learner.sequence import RowSplit, attends_to_all, check_model, whole_rows
from volley.errors import JobError
from volley.model import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

LEAST_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # of a log-prob, for different orders of summation
ROUNDINGS = 4  # of the largest logit: what they may add to a log-prob
PROBE_PROMPT, PROBE_LENGTH, PROBE_RANKS = 4, 3, (0, 1, 8)


class Policy(nn.Module):
    """Log-probs of sample tokens under ``lm``.

    Args:
        lm: a Hugging Face causal language model.
        temperature: sampling temperature of the samples.
        entropy_gradient: whether the loss uses the entropy.
        split: splits rows over ranks; None without sequence parallelism.

    Raises:
        JobError: the model has no linear output embedding, or its rows cannot be split.
    """

    def __init__(
        self,
        lm: "PreTrainedModel",
        temperature: float,
        *,
        entropy_gradient: bool = False,
        split: RowSplit | None = None,
    ) -> None:
        super().__init__()
        self.lm, self.split = lm, split
        if split is not None:
            check_model(lm.config, split.size)
        head = lm.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise JobError(f"models of type {lm.config.model_type} have no linear output embedding; use a causal LM")
        self.scorer = TokenScorer(head, temperature, entropy_gradient=entropy_gradient)

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each sample token of the micro-batch, float32 [T]."""
        if self.split is None:
            return self._scores(batch)
        part = self.split.part(batch)
        return self.split.joined(self._scores(part), part.index_T, len(batch.token_T))

    def _scores(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        hidden_RLH = self.lm.base_model(
            input_ids=batch.ids_RL,
            position_ids=batch.positions_RL,
            attention_mask=batch.mask(self.lm.dtype),
            use_cache=False,
        ).last_hidden_state
        scores: tuple[Tensor, Tensor] = self.scorer(hidden_RLH.flatten(0, 1).index_select(0, batch.at_T), batch.token_T)
        return scores


def load_lm(path: Path, dtype: str, *, attention: str | None = None, checkpointed: bool = False) -> Any:
    """The causal language model at ``path``.

    Args:
        attention: an implementation, as transformers names it; None lets transformers choose.
        checkpointed: each layer keeps only its input and is recomputed in the backward pass.

    Raises:
        JobError: the model does not load, or does not support these options.
    """
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, path, dtype, attention, checkpointed)


def load_trained(model: ModelSpec, seed: int, *, attention: str | None = None, checkpointed: bool = False) -> Any:
    """The causal language model to train; if the job uses LoRA, with new adapters initialised from ``seed``.

    Raises:
        JobError: see `load_lm`; or the model cannot have these adapters.
    """
    lm = load_lm(model.folder, model.dtype, attention=attention, checkpointed=checkpointed)
    return lm if model.lora is None else add_adapters(lm, model, model.lora, seed)


class StartingPolicy:
    """The policy without its adapters, which is the model before training: a reference that needs no extra memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Same as `Policy`."""
        with without_adapters(self._engine.module):
            scores: tuple[Tensor, Tensor] = self._engine(batch)
        return scores


def load_trunk(path: Path, dtype: str, *, attention: str | None = None, checkpointed: bool = False) -> Any:
    """Like `load_lm`, without the output embedding."""
    from transformers import AutoModel

    return _load(AutoModel, path, dtype, attention, checkpointed)


def _load(kind: type["_BaseAutoModelClass"], path: Path, dtype: str, attention: str | None, checkpointed: bool) -> Any:
    from safetensors import SafetensorError

    asked = {"attn_implementation": attention} if attention else {}
    try:
        model = kind.from_pretrained(path, dtype=getattr(torch, dtype), **asked)
    except ImportError as error:
        raise JobError(f"learner.attention: {attention} is not available here; write sdpa: {_line(error)}") from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise JobError(f"model {path} does not load: {_line(error)}") from error
    speed_up(model)
    model.eval()  # dropout would make the policy differ from the one that sampled
    if checkpointed:
        checkpoint_layers(model)
    return model


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def checkpoint_layers(model: "PreTrainedModel") -> None:
    """Make each layer of ``model`` keep only its input and recompute itself in the backward pass.

    Raises:
        JobError: transformers cannot checkpoint layers of this type of model.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        kind = model.config.model_type
        raise JobError(f"models of type {kind} have no layers to checkpoint: drop learner.gradient_checkpointing")
    model.gradient_checkpointing_enable()
    for layer in layers:
        layer.training = (
            True  # transformers checkpoints only in training mode; submodules stay in eval mode, without dropout
        )
        for name in [name for name, value in vars(layer).items() if "dropout" in name and isinstance(value, float)]:
            setattr(layer, name, 0.0)  # some layers apply dropout themselves


@torch.no_grad()
def probe_layouts(policy: Policy, dtype: str, device: torch.device) -> bool:
    """Check a few log-probs of the policy against the model's own logits; returns whether shared rows are exact too.

    Every rank must call it.

    Raises:
        JobError: they differ, so this type of model changes its logits in a way that the policy does not reproduce.
    """
    with whole_rows(policy.lm):
        group = _probe(policy, device)
    flat_T = _logprobs(policy, [group], device, shared=False)
    with whole_rows(policy.lm):
        own = [_own_logprobs(policy, piece, device) for piece in group.split(1)]
    own_T = torch.cat([logprob_T for logprob_T, _ in own])
    rounding = ROUNDINGS * torch.finfo(getattr(torch, dtype)).eps * max(largest for _, largest in own)
    tolerance = max(LEAST_TOLERANCE[dtype], rounding)
    if not torch.allclose(flat_T, own_T, atol=tolerance, rtol=0):
        raise JobError(
            f"models of type {policy.lm.config.model_type} are not supported: log-probs from the last hidden state "
            f"differ from those of the model's logits by {float((flat_T - own_T).abs().max()):.3g}, where rounding "
            f"explains {tolerance:.2g}{'' if policy.split is None else '; try learner.sequence_parallel: 1'}"
        )
    if not _takes_masks(policy.lm.config):
        return False
    shared_T = _logprobs(policy, [group], device, shared=True)
    return torch.allclose(shared_T, own_T, atol=tolerance, rtol=0)


def _probe(policy: Policy, device: torch.device) -> Piece:
    """A short prompt and three samples that the model itself would draw.

    They begin with its most likely token and two less likely ones and go on greedily. Of tokens that it would never
    draw, log-probs are near -30, where bfloat16 rounds a logit by more than many a real difference.
    """
    vocabulary = policy.lm.get_input_embeddings().num_embeddings
    prompt_p = (1 + np.arange(PROBE_PROMPT, dtype=np.int32) * 7) % vocabulary
    ranks = [min(rank, vocabulary - 1) for rank in PROBE_RANKS]
    row_1L = torch.from_numpy(prompt_p.astype(np.int64)).to(device)[None]
    first_V = policy.lm(input_ids=row_1L, use_cache=False).logits[0, -1]
    first_n = first_V.argsort(descending=True)[torch.tensor(ranks, device=device)]
    rows_nL = torch.cat([row_1L.expand(len(ranks), -1), first_n[:, None]], dim=1)
    for _ in range(PROBE_LENGTH - 1):
        next_n = policy.lm(input_ids=rows_nL, use_cache=False).logits[:, -1].argmax(-1)
        rows_nL = torch.cat([rows_nL, next_n[:, None]], dim=1)
    tokens_T = rows_nL[:, PROBE_PROMPT:].flatten().cpu().numpy().astype(np.int32)
    return Piece(prompt_p, tokens_T, np.full(len(ranks), PROBE_LENGTH, np.int32), np.arange(len(tokens_T)))


def _takes_masks(config: "PretrainedConfig") -> bool:
    """Whether a layer attends exactly where its mask says: no window, no recurrence, no kernel without masks."""
    return attends_to_all(config) and config._attn_implementation == "sdpa"


def _logprobs(policy: Policy, groups: list[Piece], device: torch.device, *, shared: bool) -> Tensor:
    # With this width, attention counts as free in the layout, so the whole group shares a row if it may.
    (batch,) = micro_batches(groups, 1 << 20, width=1 << 20, allow_shared=shared)
    scores_T: Tensor = policy(batch.to(device))[0]
    out_T = torch.empty_like(scores_T)
    out_T[batch.index_T] = scores_T
    return out_T


def _own_logprobs(policy: Policy, piece: Piece, device: torch.device) -> tuple[Tensor, float]:
    """Log-probs of one sample's tokens from the model's own logits, [T], and the largest of those logits."""
    row = torch.from_numpy(np.concatenate([piece.prompt_p, piece.tokens_T]).astype(np.int64)).to(device)
    logit_LV: Tensor = policy.lm(input_ids=row[None], use_cache=False).logits[0]
    wide = torch.promote_types(logit_LV.dtype, torch.float32)
    logit_LV = logit_LV.to(wide) / policy.scorer.temperature
    chosen_T = logit_LV.log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0]
    return chosen_T[len(piece.prompt_p) - 1 :], float(logit_LV.abs().max())
