"""Log-probability of chosen tokens and entropy, without the whole float32 [tokens, vocabulary].

Shapes: T tokens, t tokens of one chunk, H width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learner.linear import product

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}  # logits held at once: 16 MiB (a cache), 512 MiB of float32


class TokenScorer(nn.Module):
    """Asks an output embedding for log-probs of given tokens instead of logits.

    A module of its own, so that ZeRO-3 gathers the embedding once per pass, however many chunks a rank takes.
    Its parameters stay the language model's.

    Args:
        head: the model's output embedding.
        temperature: divides the logits.
        entropy_gradient: does the loss use the entropy?
    """

    def __init__(self, head: nn.Linear, temperature: float, *, entropy_gradient: bool) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple: it is registered under the language model already
        self.temperature, self.entropy_gradient = temperature, entropy_gradient

    @property
    def parameters_used(self) -> list[nn.Parameter]:
        """The head's parameters, which the module reads without owning them."""
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

    Logits exist for one chunk of tokens at a time; the backward pass makes them again.

    Args:
        hidden_TH: what predicts each token.
        token_T: int64.
        entropy_gradient: False where nothing is to flow back from the entropy.
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
        for part in _chunks(hidden_TH, weight_VH):
            logit_tV = _logits(hidden_TH[part], weight_VH, bias_V, temperature)
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
        out_TH = torch.empty_like(hidden_TH)
        out_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        out_V = None if bias_V is None or not ctx.needs_input_grad[2] else torch.zeros_like(bias_V)
        for part in _chunks(hidden_TH, weight_VH):
            logprob_tV = _logits(hidden_TH[part], weight_VH, bias_V, ctx.temperature).sub_(lse_T[part, None])
            share_tV = logprob_tV.exp()
            grad_tV = share_tV * -grad_logprob_T[part, None]
            if ctx.entropy_gradient:
                surprise_tV = logprob_tV.add_(entropy_T[part, None])
                grad_tV.addcmul_(share_tV * surprise_tV, grad_entropy_T[part, None], value=-1)
            grad_tV.scatter_add_(-1, token_T[part, None], grad_logprob_T[part, None])
            grad_tV = grad_tV.div_(ctx.temperature).to(weight_VH.dtype)
            out_TH[part] = product(grad_tV, weight_VH.t())
            if out_VH is not None:
                out_VH.addmm_(grad_tV.T, hidden_TH[part])
            if out_V is not None:
                out_V += grad_tV.sum(0)
        return out_TH, out_VH, out_V, None, None, None


def _chunks(hidden_TH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS[hidden_TH.device.type] // len(weight_VH))
    for start in range(0, len(hidden_TH), step):
        yield slice(start, start + step)


def _logits(hidden_tH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logit_tV = product(hidden_tH, weight_VH, bias_V)
    wide = torch.promote_types(logit_tV.dtype, torch.float32)
    return logit_tV.to(wide) if temperature == 1.0 else logit_tV.to(wide) / temperature
