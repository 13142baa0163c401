"""Whether the learner computes on this device what it should: log-probs, layouts, and steps against plain PyTorch."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu.setting import WHOLE, Row, Setting, batch_of, engine_of, groups_of
from learner.batch import Packer, RankBatch
from learner.layout import Piece, micro_batches
from learner.logprobs import chosen_logprobs
from learner.policy import Policy, load_lm, probe_layouts
from learner.reinforce import Reinforcer
from learner.weights import gathered
from tests.plain_engine import PlainEngine
from volley.objectives import MaxAtK
from volley.update import Optimizer

STEPS = 3


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this section."""
    torch.backends.cuda.matmul.allow_tf32 = False
    setting.join()
    yield from _scorer(setting)
    yield from _layouts(setting)
    yield from _steps(setting, "float32")
    yield from _steps(setting, "bfloat16")


def _row(what: str, figure: str) -> Row:
    return Row("exactness", what, figure)


def _scorer(setting: Setting) -> Iterator[Row]:
    """The chunked log-probs and their gradients against float32 logits of the same bfloat16 values."""
    torch.manual_seed(1)
    lm = load_lm(setting.model(), "bfloat16").to(setting.device)
    head = lm.get_output_embeddings().weight.detach()
    tokens = 64 if setting.small else 2048
    ids_L = torch.randint(setting.vocabulary, (tokens,), device=setting.device)
    with torch.no_grad():
        hidden_TH = lm.base_model(input_ids=ids_L[None]).last_hidden_state[0]
    token_T = torch.randint(setting.vocabulary, (tokens,), device=setting.device)
    weight_T = torch.randn(tokens, device=setting.device)

    def full(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
        logits_TV = hidden_TH.float() @ head_VH.float().t()
        return logits_TV.log_softmax(-1).gather(-1, token_T[:, None])[:, 0]

    def chunked(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
        return chosen_logprobs(hidden_TH, head_VH, None, token_T, 1.0, entropy_gradient=False)[0]

    def rounded(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
        logits_TV = (hidden_TH @ head_VH.t()).float()
        return logits_TV.log_softmax(-1).gather(-1, token_T[:, None])[:, 0]

    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"full": full, "chunked": chunked, "rounded": rounded}
    values: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name, way in ways.items():
        hidden, weight = (each.detach().clone().requires_grad_() for each in (hidden_TH, head))
        out_T = way(hidden, weight)
        torch.autograd.backward((out_T * weight_T).sum())
        values[name] = out_T.detach(), _gradient(hidden), _gradient(weight)
    for name in ("chunked", "rounded"):
        apart = (values[name][0] - values["full"][0]).abs().max()
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(values[name][1:], values["full"][1:], strict=True)]
        label = "chunked log-probs" if name == "chunked" else "for comparison: logits rounded to bfloat16"
        yield _row(
            f"{label} against full float32 logits",
            f"log-prob {apart:.1e}, gradients (relative) {errors[0]:.1e} hidden, {errors[1]:.1e} head",
        )


def _gradient(tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        raise ValueError("no gradient reached this tensor")
    return tensor.grad.float()


def _layouts(setting: Setting) -> Iterator[Row]:
    """What a rank checks as it starts, and how far the two layouts are apart on rows of a usual length."""
    lm = load_lm(setting.model(), "bfloat16").to(setting.device)
    policy = Policy(lm, 1.0)
    device = torch.device(setting.device)
    allowed = probe_layouts(policy, "bfloat16", device)
    yield _row("probe at start", f"shared rows {'allowed' if allowed else 'not allowed'}")
    prompt, lengths = (8, (4, 9)) if setting.small else (256, (100, 200))
    (group,), _ = groups_of(setting, 1, n=8, prompt=prompt, lengths=lengths)
    piece = Piece(group.prompt_p, group.tokens_T, group.lengths_n, np.arange(len(group.tokens_T)))
    wide = Policy(load_lm(setting.model(), "float32").to(setting.device), 1.0)
    exact_T = _logprobs(wide, piece, device, shared=False)
    values = {name: _logprobs(policy, piece, device, shared=name == "shared") for name in ("flat", "shared")}
    for name, value_T in values.items():
        off_T = (value_T - exact_T).abs()
        yield _row(f"{name} rows in bfloat16 against float32", f"mean {off_T.mean():.1e}, largest {off_T.max():.1e}")


@torch.no_grad()
def _logprobs(policy: Policy, piece: Piece, device: torch.device, *, shared: bool) -> Tensor:
    """The policy's log-probs of the piece's tokens, [T]."""
    out_T = torch.empty(len(piece.tokens_T), device=device)
    for micro in micro_batches([piece], 1 << 20, width=1 << 20, allow_shared=shared):
        out_T[micro.index_T.to(device)] = policy(micro.to(device))[0]
    return out_T


class _Widened(PlainEngine):
    """Plain PyTorch in the arithmetic of ZeRO-3 under bf16: gradients are summed, and weights kept, in float32."""

    def __init__(self, module: nn.Module, spec: Optimizer, device: str) -> None:
        super().__init__(module, spec)
        self.device = torch.device(device)
        self.narrow = list(module.parameters())
        self.wide = [nn.Parameter(each.detach().float().clone()) for each in self.narrow]
        self.adam = torch.optim.AdamW(self.wide, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=0.0)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)
        for narrow, wide in zip(self.narrow, self.wide, strict=True):
            if narrow.grad is not None:
                wide.grad = narrow.grad.float() if wide.grad is None else wide.grad + narrow.grad.float()
                narrow.grad = None

    def update(self, step: int) -> tuple[float, float]:
        for group in self.adam.param_groups:
            group["lr"] = self.spec.lr
        norm = float(
            torch.linalg.vector_norm(torch.stack([each.grad.norm() for each in self.wide if each.grad is not None]))
        )
        self.adam.step()
        self.adam.zero_grad()
        with torch.no_grad():
            for narrow, wide in zip(self.narrow, self.wide, strict=True):
                narrow.copy_(wide)
        return norm, self.spec.lr


def _steps(setting: Setting, dtype: str) -> Iterator[Row]:
    """Three steps of the learner and of plain PyTorch from the same weights on the same batch."""
    size = "tiny" if setting.small else "135M"
    here = replace(setting, size=size)
    config = here.config(dtype=dtype)
    prompt, lengths = (5, (3, 9)) if setting.small else (64, (30, 90))
    batch = batch_of(*groups_of(here, 4, n=8, prompt=prompt, lengths=lengths))
    plain_lm = load_lm(here.model(), dtype).to(setting.device)
    start = {name: each.detach().float().clone() for name, each in plain_lm.named_parameters()}
    plain = _Widened(Policy(plain_lm, 1.0), config.optimizer, setting.device)
    zero = engine_of(config)
    norms = [_train(engine, batch, plain_lm.config.hidden_size) for engine in (plain, zero)]
    whole = gathered(list(zero.module.lm.named_parameters()), keep=True)
    apart, moved, same, total = 0.0, 0.0, 0, 0
    for name, each in plain_lm.named_parameters():
        mine = whole[name].to(setting.device)
        apart = max(apart, float((mine.float() - each.detach().float()).abs().max()))
        moved = max(moved, float((each.detach().float() - start[name]).abs().max()))
        same, total = same + int((mine == each.detach()).sum()), total + each.numel()
    yield _row(
        f"{STEPS} steps of ZeRO-3 in {dtype} against plain PyTorch ({size})",
        f"weights apart by {apart:.1e} at most, moved by {moved:.1e}; {100 * same / total:.2f} % equal to the bit; "
        f"gradient norms {norms[0]:.6g} and {norms[1]:.6g}",
    )


def _train(engine: Any, batch: RankBatch, width: int) -> float:
    worker = Reinforcer(WHOLE, engine, Packer(512, width, allow_shared=False, device=engine.device))
    return [worker.step(batch, MaxAtK(k=4), step)[0]["grad_norm"] for step in range(STEPS)][-1]
