"""Chunked log-probs and entropy equal the plain formula, without a tensor of [tokens, vocabulary]."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from learner import logprobs
from learner.logprobs import chosen_logprobs

T, H, V = 7, 4, 11


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {"cpu": 2 * V})


def tensors(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return normal(T, H), normal(V, H), normal(V) if bias else None, torch.randint(V, (T,), generator=generator)


def naive(hidden: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor, temperature: float) -> tuple[Tensor, ...]:
    logprob = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return logprob.gather(-1, token[:, None])[:, 0], -(logprob.exp() * logprob).sum(-1)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equal_to_the_plain_formula(temperature: float, bias: bool) -> None:
    hidden, weight, offset, token = tensors(bias=bias)
    leaves = [each for each in (hidden, weight, offset) if each is not None]
    got = chosen_logprobs(hidden, weight, offset, token, temperature, entropy_gradient=True)
    expected = naive(hidden, weight, offset, token, temperature)
    mix = torch.randn(2, T, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    mine_grads = torch.autograd.grad((mix[0] * got[0] + mix[1] * got[1]).sum(), leaves)
    their_grads = torch.autograd.grad((mix[0] * expected[0] + mix[1] * expected[1]).sum(), leaves)
    for mine, theirs in zip(mine_grads, their_grads, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.usefixtures("_small_chunks")
def test_no_gradient_flows_from_an_entropy_that_is_only_measured() -> None:
    hidden, weight, offset, token = tensors()
    logprob, entropy = chosen_logprobs(hidden, weight, offset, token, 1.0, entropy_gradient=False)
    assert not entropy.requires_grad
    (mine,) = torch.autograd.grad(logprob.sum(), hidden)
    (theirs,) = torch.autograd.grad(naive(hidden, weight, offset, token, 1.0)[0].sum(), hidden)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_bfloat16_head_loses_nothing_but_what_its_factors_lack(temperature: float) -> None:
    """Log-probs and entropies are those of exact logits: rounded ones would be off by 0.01."""
    hidden, weight, offset, token = tensors(torch.bfloat16)
    assert offset is not None
    got = chosen_logprobs(hidden, weight, offset, token, temperature, entropy_gradient=True)
    exact_leaves = [each.detach().double().requires_grad_() for each in (hidden, weight, offset)]
    exact = naive(exact_leaves[0], exact_leaves[1], exact_leaves[2], token, temperature)
    for mine, theirs in zip(got, exact, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=1e-5)
    grads = torch.autograd.grad((got[0] + got[1]).sum(), (hidden, weight, offset))
    for mine, theirs in zip(grads, torch.autograd.grad((exact[0] + exact[1]).sum(), exact_leaves), strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), theirs, rtol=2**-8, atol=1e-6)  # rounded once


def test_a_bfloat16_heads_gradient_is_added_up_over_chunks_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 chunks: rounded after each, the gradient would be off by 1 %."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {"cpu": 2 * V})
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1024, H, generator=generator).bfloat16()
    weight, offset = (torch.randn(*shape, generator=generator).bfloat16().requires_grad_() for shape in ((V, H), (V,)))
    token = torch.randint(V, (1024,), generator=generator)
    got = torch.autograd.grad(
        chosen_logprobs(hidden, weight, offset, token, 1.0, entropy_gradient=False)[0].sum(), (weight, offset)
    )
    exact = (weight.detach().double().requires_grad_(), offset.detach().double().requires_grad_())
    expected = torch.autograd.grad(naive(hidden.double(), *exact, token, 1.0)[0].sum(), exact)
    for mine, theirs in zip(got, expected, strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 2.5e-3


def test_a_rank_without_tokens_still_gives_gradients() -> None:
    hidden, weight, offset, _ = tensors()
    none = torch.zeros(0, dtype=torch.int64)
    logprob, _ = chosen_logprobs(hidden[:0], weight, offset, none, 1.0, entropy_gradient=False)
    (grad,) = torch.autograd.grad(logprob.sum(), weight)
    assert not grad.any()


def test_no_tensor_is_as_large_as_tokens_times_vocabulary() -> None:
    tokens, width, vocabulary = 256, 8, 128 * 1024
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    token = torch.randint(vocabulary, (tokens,))
    with LargestTensor() as seen:
        logprob, _ = chosen_logprobs(hidden, weight, None, token, 1.0, entropy_gradient=False)
        torch.autograd.backward(logprob.sum())
    assert seen.elements == logprobs.CHUNK_ELEMENTS["cpu"]
    assert seen.elements * 8 <= tokens * vocabulary


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes every tensor that an operation creates, including the backward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return out
