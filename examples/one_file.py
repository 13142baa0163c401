"""The whole algorithm in one file: reinforcement learning for a model that gets k tries, with samples that lag behind.

    python -m examples.one_file                    # warm up a small model, then train it for pass@4: a few minutes
    python -m examples.one_file --k 1              # the same for one try, the usual objective
    python -m examples.one_file --lag 4            # train on samples that are four versions old

Each command prints pass@k before and after training.

One step, and where the service does the same:

    sample    draw n samples per prompt, and record the log-prob of every token        actors/          vLLM
    score     check whether each answer is correct                                     reward_servers/  sandboxes
    advantage compute how much each sample adds to the best of k                       volley/objectives
    update    PPO with a correction for old samples, AdamW                             learner/         ZeRO-3
    train     decide which version samples while newer ones are trained                services/        Ray

The service runs all of these at once on many machines, so samples are a few versions old when they are trained on. Here
one process does them in turn, and ``--lag`` deliberately samples from an older copy of the weights.
`tests/integration/test_one_file.py` compares this file's updates with those of the service's learner.

The task is countdown: "3 7 2=13:" asks for an expression in + - * that uses each number once and equals 13.

Shapes: P prompts; n samples per prompt; N = P n samples, ordered by prompt; p prompt tokens; T sample tokens;
V vocabulary.
"""

import argparse
import copy
import random
import re
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.countdown import make_data, make_model

CLIP = 0.2  # a token's ratio is clipped to 1 +- CLIP
CORRECTION_CAP = 2.0  # the largest importance weight of an old token
MAX_TOKENS = 10  # per sample
Row = dict[str, Any]


# ---- samples --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples and their prompts. Prompts are padded on the left so that all samples start in the same column.

    Attributes:
        prompt_Np: int64 token ids.
        prompt_real_Np: bool, False at padding.
        token_NT: int64 token ids, including the end token unless the sample was cut.
        real_NT: bool, False after the end.
        logprob_NT: float32, the log-prob of each token under the policy that sampled it (mu); 0 after the end.
        version: version of the weights that sampled them: the number of training steps before.
    """

    prompt_Np: Tensor
    prompt_real_Np: Tensor
    token_NT: Tensor
    real_NT: Tensor
    logprob_NT: Tensor
    version: int


def padded(rows: Sequence[Sequence[int]], *, left: bool, pad: int) -> tuple[Tensor, Tensor]:
    """Rows of unequal length as one tensor, and a mask that is False at padding."""
    width = max(map(len, rows))
    ids, real = [], []
    for row in rows:
        gap = width - len(row)
        ids.append([pad] * gap + list(row) if left else list(row) + [pad] * gap)
        real.append([False] * gap + [True] * len(row) if left else [True] * len(row) + [False] * gap)
    return torch.tensor(ids), torch.tensor(real)


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: Sequence[str], n: int, *, version: int = 0) -> Samples:
    """Draw n samples per prompt, token by token, at temperature 1 without top-k or top-p.

    The recorded log-probs are then those of the distribution sampled from, which importance weights rely on.
    """
    prompt_Np, prompt_real_Np = padded([tokenizer(text)["input_ids"] for text in prompts], left=True, pad=0)
    prompt_Np, prompt_real_Np = prompt_Np.repeat_interleave(n, 0), prompt_real_Np.repeat_interleave(n, 0)
    ids, seen, cache = prompt_Np, prompt_real_Np, None  # seen: attention mask of all columns so far
    running_N = torch.ones(len(ids), dtype=torch.bool)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    while len(columns) < MAX_TOKENS and running_N.any():
        # The cache holds the keys and values of earlier columns, so each pass computes only the newest ones.
        out = model(
            input_ids=ids,
            attention_mask=seen,
            position_ids=positions(seen)[:, -ids.shape[1] :],
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        logprob_NV = out.logits[:, -1].log_softmax(-1)
        token_N1 = torch.multinomial(logprob_NV.exp(), 1)
        logprob_N = logprob_NV.gather(-1, token_N1)[:, 0]
        columns.append((token_N1[:, 0], running_N, torch.where(running_N, logprob_N, 0.0)))
        ids, seen = token_N1, torch.cat([seen, running_N[:, None]], dim=1)
        running_N = running_N & (token_N1[:, 0] != tokenizer.eos_token_id)
    token_NT, real_NT, logprob_NT = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    return Samples(prompt_Np, prompt_real_Np, token_NT, real_NT, logprob_NT, version)


def positions(real_NL: Tensor) -> Tensor:
    """Position ids: 0, 1, 2 ... over the columns that are not padding."""
    return (real_NL.long().cumsum(-1) - 1).clamp(min=0)


def logprobs(model: Any, samples: Samples) -> Tensor:
    """The log-prob of every sample token under ``model``, [N, T], in one pass over the whole sequences."""
    ids_NL = torch.cat([samples.prompt_Np, samples.token_NT], dim=1)
    real_NL = torch.cat([samples.prompt_real_Np, samples.real_NT], dim=1)
    logit_NLV = model(input_ids=ids_NL, attention_mask=real_NL, position_ids=positions(real_NL)).logits
    # The column before a token predicts it.
    logit_NTV = logit_NLV[:, samples.prompt_Np.shape[1] - 1 : -1]
    chosen_NT: Tensor = logit_NTV.log_softmax(-1).gather(-1, samples.token_NT[..., None])[..., 0]
    return chosen_NT


def texts(tokenizer: Any, samples: Samples) -> list[str]:
    """The samples as text."""
    rows = zip(samples.token_NT, samples.real_NT, strict=True)
    return [tokenizer.decode(token_T[real_T], skip_special_tokens=True) for token_T, real_T in rows]


# ---- rewards --------------------------------------------------------------------------------------------------------


def score(row: Row, text: str) -> float:
    """1 if ``text`` is an expression without parentheses that uses the row's numbers and equals its target, else 0."""
    if not re.fullmatch(r"\d+([-+*]\d+)*", text):
        return 0.0
    numbers = [int(digits) for digits in re.findall(r"\d+", text)]
    if sorted(numbers) != sorted(row["numbers"]):
        return 0.0
    return float(make_data.value(numbers, re.findall(r"[-+*]", text)) == row["target"])


# ---- the objective: the best of k -----------------------------------------------------------------------------------


def max_at_k_advantages(reward_Pn: Tensor, k: int) -> Tensor:
    """a_i such that sum_i a_i grad log pi(y_i) is an unbiased estimate of the gradient of E[max(g_1 .. g_k)], [P, n].

    Among the C(n, k) subsets of k samples, sample i matters in those in which it is the best, and there by its lead
    over the second best, which would be the best without i (PKPO, arXiv 2505.15201, eq. 33). With rewards ascending,

        a_i = 1/C(n,k) sum_{j<i} C(j-1, k-2) (g_i - g_j)

    because j is second best to i in as many subsets as there are ways to choose the other k - 2 from the j - 1 samples
    below j. For k = 1 there is no second best; the mean of the other samples takes its place, which is REINFORCE with a
    leave-one-out baseline.
    """
    n = reward_Pn.shape[-1]
    if k == 1:
        return (reward_Pn - reward_Pn.mean(-1, keepdim=True)) / (n - 1)
    g_Pn, order_Pn = reward_Pn.sort(dim=-1)
    lead_Pij = g_Pn[:, :, None] - g_Pn[:, None, :]
    share_j = torch.tensor([comb(j, k - 2) / comb(n, k) for j in range(n)], dtype=reward_Pn.dtype)
    a_Pn = (lead_Pij * share_j).tril(-1).sum(-1)
    return torch.empty_like(a_Pn).scatter(-1, order_Pn, a_Pn)


def pass_at_k(right: int, n: int, k: int) -> float:
    """Unbiased estimate of pass@k: the chance that k of n samples, ``right`` of them correct, contain a correct one."""
    return 1 - comb(n - right, k) / comb(n, k)


# ---- the update -----------------------------------------------------------------------------------------------------


def policy_loss(theta_NT: Tensor, prox_NT: Tensor, samples: Samples, advantage_N: Tensor, prompts: int) -> Tensor:
    """The loss to minimise. It involves three policies that are easy to confuse:

        mu      the policy that drew the samples, some versions ago; its log-probs came with the samples
        prox    the policy before this update, which theta should stay close to
        theta   the policy being updated; only its log-probs have a gradient

    PPO clips the ratio theta/prox, so that moving it beyond 1 +- CLIP gains nothing (arXiv 1707.06347). The weight
    prox/mu corrects for samples that come from mu instead of prox; large weights are truncated, which adds a little
    bias and removes much variance (decoupled PPO, arXiv 2110.00641; truncated importance sampling).

    The loss sums over a sample's tokens and over a prompt's samples, because a_i are weights of a sum; it averages over
    prompts.
    """
    real = samples.real_NT
    ratio = (theta_NT - prox_NT)[real].exp()
    correction = correction_of(prox_NT, samples)
    advantage = advantage_N[:, None].expand_as(theta_NT)[real]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -(correction * gain).sum() / prompts


def correction_of(prox_NT: Tensor, samples: Samples) -> Tensor:
    """The importance weight prox/mu of every real token; 1 if the samples are not old."""
    return (prox_NT - samples.logprob_NT)[samples.real_NT].exp().clamp(max=CORRECTION_CAP)


def update(
    model: Any, optimizer: torch.optim.Optimizer, samples: Samples, reward_Pn: Tensor, *, k: int, updates: int = 1
) -> dict[str, float]:
    """Improve ``model`` by ``updates`` PPO steps on one batch; returns the metrics of the last one."""
    advantage_N = max_at_k_advantages(reward_Pn.double(), k).flatten().float()
    with torch.no_grad():
        prox_NT = logprobs(model, samples)
    for _ in range(updates):
        theta_NT = logprobs(model, samples)
        loss = policy_loss(theta_NT, prox_NT, samples, advantage_N, len(reward_Pn))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        optimizer.step()
    ratio = (theta_NT - prox_NT).detach()[samples.real_NT].exp()
    correction = correction_of(prox_NT, samples)
    return {
        "loss": float(loss.detach()),
        "grad_norm": float(norm),
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "correction_mean": float(correction.mean()),
        "truncated_share": float((correction == CORRECTION_CAP).float().mean()),
    }


# ---- the loop -------------------------------------------------------------------------------------------------------


def train(model: Any, tokenizer: Any, rows: Iterable[Row], args: argparse.Namespace) -> None:
    """Alternate sampling and updating; version s is the policy after s steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    actor = copy.deepcopy(model)  # samples with the oldest of the published weights
    published = deque([weights(model)], maxlen=args.lag + 1)
    rows = iter(rows)
    print(f"{'step':>5} {'lag':>4} {'pass@1':>8} {f'pass@{args.k}':>8} {'correction':>11} {'grad norm':>10}")
    for step in range(args.steps):
        batch = [next(rows) for _ in range(args.prompts)]
        actor.load_state_dict(published[0])
        version = step - (len(published) - 1)
        samples = sample(actor, tokenizer, [row["prompt"] for row in batch], args.n, version=version)
        reward_Pn = rewards(tokenizer, batch, samples)
        metrics = update(model, optimizer, samples, reward_Pn, k=args.k, updates=args.updates)
        published.append(weights(model))
        if step % args.every == 0 or step == args.steps - 1:
            shown = f"{reward_Pn.mean():8.3f} {mean_pass_at_k(reward_Pn, args.k):8.3f}"
            print(
                f"{step:5d} {step - version:4d} {shown} {metrics['correction_mean']:11.4f} {metrics['grad_norm']:10.3f}"
            )


def rewards(tokenizer: Any, rows: Sequence[Row], samples: Samples) -> Tensor:
    """The reward of each sample of each row, [P, n]."""
    answers = texts(tokenizer, samples)
    n = len(answers) // len(rows)
    return torch.tensor([score(rows[i // n], text) for i, text in enumerate(answers)]).reshape(-1, n)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's current weights."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def mean_pass_at_k(reward_Pn: Tensor, k: int) -> float:
    """Pass@k, averaged over prompts."""
    n = reward_Pn.shape[-1]
    return sum(pass_at_k(int(right), n, k) for right in reward_Pn.sum(-1)) / len(reward_Pn)


# ---- before and after -----------------------------------------------------------------------------------------------


def warm_up(model: Any, tokenizer: Any, rows: Iterable[Row], steps: int, size: int = 128) -> None:
    """Train on correct answers: reinforcement learning needs a model that is sometimes right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    rows = iter(rows)
    for step in range(steps):
        batch = [next(rows) for _ in range(size)]
        prompt_Np, prompt_real_Np = padded([tokenizer(row["prompt"])["input_ids"] for row in batch], left=True, pad=0)
        answers = [[*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id] for row in batch]
        token_NT, real_NT = padded(answers, left=False, pad=0)
        given = Samples(prompt_Np, prompt_real_Np, token_NT, real_NT, torch.zeros(token_NT.shape), version=0)
        loss = -logprobs(model, given)[real_NT].mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"warm-up {step:4d}  loss {loss:.3f}")


def evaluate(model: Any, tokenizer: Any, rows: Sequence[Row], title: str) -> None:
    """Print pass@k on ``rows``, estimated from 64 samples per prompt."""
    samples = sample(model, tokenizer, [row["prompt"] for row in rows], 64)
    reward_Pn = rewards(tokenizer, rows, samples)
    print(f"{title:>16}: " + "  ".join(f"pass@{k} {mean_pass_at_k(reward_Pn, k):.3f}" for k in (1, 2, 4, 8, 16, 32)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="start from this model instead of warming up a new one")
    parser.add_argument("--k", type=int, default=4, help="tries that the model will get; 1 is the usual objective")
    parser.add_argument("--n", type=int, default=16, help="samples per prompt, at least k")
    parser.add_argument("--lag", type=int, default=1, help="number of versions by which samples lag behind")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--updates", type=int, default=1, help="updates per batch")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--warm-up", type=int, default=150, help="supervised steps")
    parser.add_argument("--numbers", type=int, default=3, help="numbers per prompt")
    parser.add_argument("--held-out", type=int, default=50, help="number of prompts to evaluate on")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=10, help="steps between progress lines")
    args = parser.parse_args()
    if not 1 <= args.k <= args.n or args.n < 2:
        parser.error("--k must be from 1 to --n, and --n at least 2")
    torch.manual_seed(args.seed)
    held_out = list(make_data.rows(random.Random(f"{args.seed} held out"), args.held_out, args.numbers, set()))
    taken: set[tuple[object, ...]] = {(*sorted(row["numbers"]), row["target"]) for row in held_out}  # type: ignore[call-overload]
    fresh = make_data.rows(random.Random(args.seed), 10**9, args.numbers, taken)  # an endless supply
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or make_model.make(Path(folder), seed=args.seed)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
    if args.model is None:
        warm_up(model, tokenizer, fresh, args.warm_up)
    evaluate(model, tokenizer, held_out, "before")
    train(model, tokenizer, fresh, args)
    evaluate(model, tokenizer, held_out, "after")


if __name__ == "__main__":
    main()
