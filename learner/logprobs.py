"""Log-probs of given tokens and entropies, without a float32 tensor of [tokens, vocabulary].

Shapes: T tokens, t tokens of one chunk, H width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learner.linear import add_product, wide_factor, wide_product

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}  # logits held at once: 16 MiB (a cache), 512 MiB of float32


class TokenScorer(nn.Module):
    """Computes log-probs of given tokens from an output embedding, instead of logits.

    It is a separate module so that ZeRO-3 gathers the embedding once per pass, whatever the number of chunks.
    The parameters still belong to the language model.

    Args:
        head: the model's output embedding.
        temperature: divides the logits.
        entropy_gradient: whether the loss uses the entropy.
    """

    def __init__(self, head: nn.Linear, temperature: float, *, entropy_gradient: bool) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple, because it is already registered under the language model
        self.temperature, self.entropy_gradient = temperature, entropy_gradient

    @property
    def parameters_used(self) -> list[nn.Parameter]:
        """The head's parameters, which this module uses but does not own."""
        return list(self._head[0].parameters())

    def forward(self, hidden_TH: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
        """Log-prob of each token and entropy of its distribution, both [T], float32 or wider."""
        (head,) = self._head
        return chosen_logprobs(
            hidden_TH, head.weight, head.bias, token_T, self.temperature, entropy_gradient=self.entropy_gradient
        )


def chosen_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    token_T: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Log-prob of ``token_T`` under ``softmax((hidden weight' + bias) / temperature)``, and that softmax's entropy.

    Logits exist for one chunk of tokens at a time; the backward pass recomputes them.

    Args:
        hidden_TH: the hidden state that predicts each token.
        token_T: int64.
        entropy_gradient: whether a gradient flows from the entropy.
    """
    out: tuple[Tensor, Tensor] = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, bias_V, token_T, temperature, entropy_gradient
    )
    return out


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        token_T: Tensor,
        temperature: float,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        logprob_T, entropy_T, lse_T = (hidden_TH.new_empty(len(token_T), dtype=wide) for _ in range(3))
        factor_VH = wide_factor(weight_VH)
        for part in _chunks(hidden_TH, weight_VH):
            logit_tV = _logits(hidden_TH[part], factor_VH, bias_V, temperature)
            lse_T[part] = logit_tV.logsumexp(-1)
            logprob_T[part] = logit_tV.gather(-1, token_T[part, None])[:, 0] - lse_T[part]
            share_tV = (logit_tV - lse_T[part, None]).exp_()
            entropy_T[part] = lse_T[part] - torch.einsum("tv,tv->t", share_tV, logit_tV)
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, token_T, lse_T, entropy_T)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With ``d logprob / d logit_j = [j chosen] - p_j``, ``d entropy / d logit_j = -p_j (log p_j + entropy)``."""
        grad_logprob_T, grad_entropy_T = grads
        hidden_TH, weight_VH, bias_V, token_T, lse_T, entropy_T = ctx.saved_tensors
        out_TH, factor_VH = torch.empty_like(hidden_TH), wide_factor(weight_VH)
        # Gradients of chunks are summed in float32 and rounded once, at the end.
        out_VH = torch.zeros_like(weight_VH, dtype=lse_T.dtype) if ctx.needs_input_grad[1] else None
        out_V = torch.zeros_like(bias_V, dtype=lse_T.dtype) if ctx.needs_input_grad[2] else None
        for part in _chunks(hidden_TH, weight_VH):
            logprob_tV = _logits(hidden_TH[part], factor_VH, bias_V, ctx.temperature).sub_(lse_T[part, None])
            share_tV = logprob_tV.exp()
            grad_tV = share_tV * -grad_logprob_T[part, None]
            if ctx.entropy_gradient:
                surprise_tV = logprob_tV.add_(entropy_T[part, None])
                grad_tV.addcmul_(share_tV * surprise_tV, grad_entropy_T[part, None], value=-1)
            grad_tV.scatter_add_(-1, token_T[part, None], grad_logprob_T[part, None])
            grad_tV.div_(ctx.temperature)
            out_TH[part] = wide_product(grad_tV.to(factor_VH.dtype), factor_VH.t())
            if out_VH is not None:
                add_product(out_VH, grad_tV, hidden_TH[part])
            if out_V is not None:
                out_V += grad_tV.sum(0)
        narrow = weight_VH.dtype
        return (
            out_TH,
            None if out_VH is None else out_VH.to(narrow),
            None if out_V is None else out_V.to(narrow),
            None,
            None,
            None,
        )


def _chunks(hidden_TH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS[hidden_TH.device.type] // len(weight_VH))
    for start in range(0, len(hidden_TH), step):
        yield slice(start, start + step)


def _logits(hidden_tH: Tensor, factor_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """Logits in float32 or wider; rounding them to bfloat16 would change log-probs by 0.01 and more."""
    logit_tV = wide_product(hidden_tH.to(factor_VH.dtype), factor_VH)
    if bias_V is not None:
        logit_tV += bias_V
    return logit_tV if temperature == 1.0 else logit_tV.div_(temperature)
