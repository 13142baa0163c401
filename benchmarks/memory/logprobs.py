"""Peak memory of log-probs, entropy and their gradients for a large vocabulary: the learner's way and the plain way.

    python -m benchmarks.memory.logprobs [--tokens 1024 --vocabulary 131072 --width 128]

Each way runs in its own process; it prints the peak growth of its resident memory after inputs and weights were
allocated. The plain way is ``log_softmax`` over all logits, the obvious first version.
"""

import argparse
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.objectives.report import print_table
from learner.logprobs import chosen_logprobs

MIB = 2**20
Scores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def plain(hidden_TH: Tensor, weight_VH: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once."""
    logprob_TV = nn.functional.linear(hidden_TH, weight_VH).log_softmax(-1)
    entropy_T = -(logprob_TV.exp() * logprob_TV).sum(-1)
    return logprob_TV.gather(-1, token_T[:, None])[:, 0], entropy_T


def chunked(hidden_TH: Tensor, weight_VH: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
    """The learner's way: in chunks of tokens."""
    return chosen_logprobs(hidden_TH, weight_VH, None, token_T, 1.0, entropy_gradient=True)


WAYS: dict[str, Scores] = {"plain log_softmax": plain, "the learner's": chunked}


def growth(way: str, tokens: int, vocabulary: int, width: int) -> int:
    """Peak growth of this process, in bytes, during one forward and backward pass."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden_TH = torch.randn(tokens, width).requires_grad_()
    weight_VH = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    weight_VH.grad, hidden_TH.grad = torch.zeros_like(weight_VH), torch.zeros_like(hidden_TH)
    token_T = torch.randint(vocabulary, (tokens,))
    WAYS[way](hidden_TH[:1], weight_VH, token_T[:1])  # lets libraries allocate their one-time buffers
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, see proc(5)
    before = resident("VmRSS")
    logprob_T, entropy_T = WAYS[way](hidden_TH, weight_VH, token_T)
    torch.autograd.backward(logprob_T.sum() + 0.01 * entropy_T.sum())
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """One of this process's memory figures in /proc/self/status, bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=131_072)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    whole, weights = args.tokens * args.vocabulary * 4, args.vocabulary * args.width * 4
    print(f"float32 [tokens, vocabulary] {whole / MIB:.0f} MiB; the output embedding {weights / MIB:.0f} MiB\n")
    rows = []
    for way in WAYS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(growth, (way, args.tokens, args.vocabulary, args.width))
        rows.append((way, round(peak / MIB), peak / whole, peak / weights))
    print_table(("way", "peak growth, MiB", "of [tokens, vocabulary]", "of the output embedding"), rows)


if __name__ == "__main__":
    main()
