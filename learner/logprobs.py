"""Log-probability of chosen tokens and entropy, without the whole float32 [tokens, vocabulary].

Shapes: T tokens, H width, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 24  # float32 logits held at once: 64 MiB


def chosen_logprobs(
    head: Callable[[Tensor], Tensor], hidden_TH: Tensor, token_T: Tensor, temperature: float, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Log-prob of ``token_T`` and entropy of its distribution, both float32 [T].

    Args:
        head: maps hidden [t, H] to logits [t, V].
        hidden_TH: what predicts each token.
        token_T: int64.
        temperature: divides the logits.
        vocabulary: V, which sets how many tokens are taken at once. Only one chunk's logits exist at a time; the
            backward pass makes them again.
    """
    step = max(1, CHUNK_ELEMENTS // vocabulary)
    if len(token_T) <= step:
        return _chunk(head, hidden_TH, token_T, temperature)
    parts = [
        checkpoint(_chunk, head, hidden_t, token_t, temperature, use_reentrant=False)
        for hidden_t, token_t in zip(hidden_TH.split(step), token_T.split(step), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    head: Callable[[Tensor], Tensor], hidden_tH: Tensor, token_t: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logprob_tV = (head(hidden_tH).float() / temperature).log_softmax(-1)
    chosen_t = logprob_tV.gather(-1, token_t[:, None])[:, 0]
    entropy_t = -(logprob_tV.exp() * logprob_tV).sum(-1)
    return chosen_t, entropy_t
