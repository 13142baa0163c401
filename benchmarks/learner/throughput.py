"""CPU seconds of one reinforcement step: the learner's step, compared with a plain PyTorch loop.

The plain loop is the obvious first version: one padded row per sample with its prompt in front, log-softmax over all
logits, the same loss, gradient clipping, AdamW. The learner trains on the same batch on one rank, with plain PyTorch
and under ZeRO-3, with one row per sample (flat) and with samples that share one prompt's row (shared). The last line
has a job's default settings: divergence measured on a share of the groups, samples without a gradient left out. The
methods take turns; figures are medians of CPU time, which other load on the machine changes little.

    OMP_NUM_THREADS=1 python -m benchmarks.learner.throughput [--prompt 11 --length 4 14 --groups 32]
        [--model FOLDER] [--methods "plain padded loop" "learner, ZeRO-3, shared"]

The first method is the one that others are compared with. The model is untrained unless ``--model`` names one.
"""

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.objectives.report import print_table
from examples.countdown.make_model import make
from learner.batch import Packer, RankBatch, rank_batch
from learner.config import LearnerConfig
from learner.engine import Engine, join_ranks, open_store
from learner.policy import Policy, load_lm
from learner.reinforce import Reinforcer
from tests.learner_batches import random_group, scored
from tests.plain_engine import PlainEngine
from volley.model import ModelSpec
from volley.objectives import MaxAtK, advantages
from volley.records import Group
from volley.update import LearnerSpec, Optimizer, PolicyUpdate

SAMPLES = 16
OBJECTIVE = MaxAtK(k=8)
OPTIMIZER = Optimizer(lr=1e-5)
WHOLE = PolicyUpdate.model_validate({"kl": {"logged": False}, "kl_sample_fraction": 1.0})  # the plain loop's work
AS_IF_LARGE = {"stage3_param_persistence_threshold": 100_000, "memory_efficient_linear": True}
METHODS = (
    "plain padded loop",
    "learner, plain PyTorch, flat",
    "learner, plain PyTorch, shared",
    "learner, ZeRO-3 as of a large model, flat",
    "learner, ZeRO-3, flat",
    "learner, ZeRO-3, shared",
    "learner, ZeRO-3, as a job has it",
)
Method = Callable[[], object]


def main() -> None:
    args = arguments()
    report(make_batch(args), measure(args))


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """CPU seconds of each method's turns. It joins a process group, so call it once per process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    join_ranks(0, 1, open_store("127.0.0.1", 0, 1), cuda=False, deadline_s=600)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make(
            Path(folder) / "model", layers=arguments.layers, width=arguments.width, length=4096
        )
        known = make_methods(model, Path(folder), make_batch(arguments), arguments)
        methods = {name: known[name]() for name in arguments.methods}
        times: dict[str, list[float]] = {name: [] for name in methods}
        for turn in range(arguments.turns + 1):  # the first is a warm-up
            for name, method in methods.items():
                begun = time.process_time()
                method()
                if turn:
                    times[name].append(time.process_time() - begun)
    return times


def make_batch(arguments: argparse.Namespace) -> RankBatch:
    """A batch of groups of unequal lengths, all with a learning signal."""
    rng = np.random.default_rng(0)
    prompt = (arguments.prompt, arguments.prompt + 1)
    groups = [
        random_group(rng, i, n=SAMPLES, vocabulary=22, prompt=prompt, length=tuple(arguments.length))
        for i in range(arguments.groups)
    ]
    columns = [scored(group, rng.integers(0, 2, SAMPLES).astype(float).tolist()) for group in groups]
    return rank_batch(groups, columns, version=0, mask_truncated=False)


def make_methods(
    model: Path, folder: Path, batch: RankBatch, arguments: argparse.Namespace
) -> dict[str, Callable[[], Method]]:
    """By name, what makes each way to take one step."""
    config = LearnerConfig(
        model=ModelSpec(path=model),
        learner=LearnerSpec(),
        optimizer=OPTIMIZER,
        steps=1000,
        seed=0,
        log_dir=folder,
    )

    def learner(engine: Callable[[], Any], *, shared: bool, spec: PolicyUpdate = WHOLE) -> Method:
        budget = arguments.budget or config.micro_batch_tokens
        width = AutoConfig.from_pretrained(model).hidden_size
        reference = Policy(load_lm(model, "float32"), 1.0) if spec.kl.wanted else None
        worker = Reinforcer(spec, engine(), Packer(budget, width, shared, engine().device), reference=reference)
        return lambda: worker.step(batch, OBJECTIVE, 0)

    def policy() -> Policy:
        return Policy(load_lm(model, "float32"), 1.0)

    @functools.cache
    def plain() -> PlainEngine:
        return PlainEngine(policy(), OPTIMIZER)

    @functools.cache
    def zero() -> Engine:
        return Engine(policy, OPTIMIZER, config)

    @functools.cache
    def large() -> Engine:
        sharded = LearnerSpec.model_validate({"deepspeed": {"zero_optimization": AS_IF_LARGE}})
        return Engine(policy, OPTIMIZER, replace(config, learner=sharded))

    return {
        "plain padded loop": lambda: padded_loop(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), batch
        ),
        "learner, plain PyTorch, flat": lambda: learner(plain, shared=False),
        "learner, plain PyTorch, shared": lambda: learner(plain, shared=True),
        "learner, ZeRO-3 as of a large model, flat": lambda: learner(large, shared=False),
        "learner, ZeRO-3, flat": lambda: learner(zero, shared=False),
        "learner, ZeRO-3, shared": lambda: learner(zero, shared=True),
        "learner, ZeRO-3, as a job has it": lambda: learner(zero, shared=True, spec=PolicyUpdate()),
    }


def padded_loop(lm: Any, batch: RankBatch) -> Method:
    """A step with one padded batch of all samples: one forward pass, one backward pass, AdamW."""
    optimizer = torch.optim.AdamW(lm.parameters(), lr=OPTIMIZER.lr)

    def step() -> None:
        ids_RL, at_RL, mu_RL, advantage_R1 = padded(batch)
        logprob_RLV = lm(input_ids=ids_RL, attention_mask=(ids_RL != 0).long()).logits[:, :-1].log_softmax(-1)
        theta_RL = logprob_RLV.gather(-1, ids_RL[:, 1:, None])[..., 0]
        ratio_RL = torch.exp(theta_RL - theta_RL.detach())
        correction_RL = torch.exp(theta_RL.detach() - mu_RL).clamp(max=2.0)
        clipped_RL = ratio_RL.clamp(0.8, 1.2)
        gain_RL = torch.minimum(ratio_RL * advantage_R1, clipped_RL * advantage_R1)
        torch.autograd.backward(-(at_RL * correction_RL * gain_RL).sum() / len(batch.groups))
        nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def padded(batch: RankBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids [R, L]; for the L - 1 predictions whether they are sample tokens, and mu; advantages [R, 1]."""
    rows = [(group, start, end) for group in batch.groups for start, end in _spans(group)]
    length = max(len(group.prompt_p) + end - start for group, start, end in rows)
    ids_RL, mu_RL = np.zeros((len(rows), length), np.int64), np.zeros((len(rows), length - 1), np.float32)
    at_RL = np.zeros((len(rows), length - 1), np.float32)
    for row, (group, start, end) in enumerate(rows):
        prompt, stop = len(group.prompt_p), len(group.prompt_p) + end - start
        ids_RL[row, :stop] = np.concatenate([group.prompt_p, group.tokens_T[start:end]])
        mu_RL[row, prompt - 1 : stop - 1] = group.logprobs_T[start:end]
        at_RL[row, prompt - 1 : stop - 1] = 1
    advantage_Gn = advantages(batch.per_group(batch.rewards), OBJECTIVE)
    advantage_R1 = torch.from_numpy(advantage_Gn.reshape(-1, 1)).float()
    return torch.from_numpy(ids_RL), torch.from_numpy(at_RL), torch.from_numpy(mu_RL), advantage_R1


def _spans(group: Group) -> list[tuple[int, int]]:
    ends = np.cumsum(group.lengths_n).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def report(batch: RankBatch, times: dict[str, list[float]]) -> None:
    prompts = sum(len(group.prompt_p) for group in batch.groups)
    print(
        f"{len(batch.groups)} prompts of {prompts / len(batch.groups):.0f} tokens, {SAMPLES} samples each of "
        f"{batch.lengths_N.min()} to {batch.lengths_N.max()}, mean {batch.lengths_N.mean():.1f}; one thread\n"
    )
    base = statistics.median(next(iter(times.values())))
    rows = []
    for name, values in times.items():
        median = statistics.median(values)
        rows.append((name, median, min(values), round(batch.tokens / median), base / median))
    print_table(("method", "CPU s, median", "best", "sample tokens/CPU s", "speed"), rows)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or ``given`` instead of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=11)
    parser.add_argument("--length", type=int, nargs=2, default=(4, 15), help="sample lengths, half open")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--budget", type=int, default=0, help="tokens per micro-batch; 0: the job's default")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--model", type=Path, help="a pretrained model's folder")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help="default: all")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
