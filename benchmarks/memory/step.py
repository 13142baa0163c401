"""Peak resident memory of a process that trains a model: the learner's rank, and plain PyTorch on the same batches.

    python -m benchmarks.memory.step MODEL [--steps 3]

A batch has the size of that of examples/smollm2/job.yaml: 4 prompts of 40 to 45 random tokens with 16 samples of 4 to
24. Everything is in float32, in one thread and without a starting policy. Each line is a process of its own:

    learner rank                 ZeRO-3 on one rank, as a job has it, publishing after each step
    plain PyTorch                the same loss, micro-batches and chunks of logits, but torch's AdamW on the plain model
    plain PyTorch, full logits   the same with log-softmax over all logits of a micro-batch
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.objectives.report import print_table
from learner.batch import Packer, rank_batch
from learner.config import LearnerConfig
from learner.layout import MicroBatch
from learner.policy import Policy, load_lm
from learner.records import ScoredGroup
from learner.reinforce import Reinforcer
from tests.learner_batches import random_group, scored
from tests.plain_engine import PlainEngine, process_group_of_one
from volley.memory import peak_memory
from volley.model import ModelSpec
from volley.objectives import Mean
from volley.records import Group
from volley.update import LearnerSpec, PolicyOptimizer, PolicyUpdate

GIB = 2**30
PROMPTS, SAMPLES, FLOAT32 = 4, 16, 4
TEMPERATURE = 0.7
LEARNER, PLAIN, FULL = WAYS = ("learner rank", "plain PyTorch", "plain PyTorch, full logits")
UPDATE = PolicyUpdate.model_validate({"kl": {"logged": False}})
Step = Callable[[list[Group], list[ScoredGroup]], object]


class FullLogits(Policy):
    """The policy with the logits of all tokens at once."""

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Same as `Policy`."""
        logit_RLV = self.lm(
            input_ids=batch.ids_RL,
            position_ids=batch.positions_RL,
            attention_mask=batch.mask(self.lm.dtype),
            use_cache=False,
        ).logits
        logprob_TV = (logit_RLV.flatten(0, 1).index_select(0, batch.at_T) / TEMPERATURE).log_softmax(-1)
        entropy_T = -(logprob_TV.detach().exp() * logprob_TV.detach()).sum(-1)
        return logprob_TV.gather(-1, batch.token_T[:, None])[:, 0], entropy_T


class Nowhere:
    """An object store that keeps nothing."""

    def put(self, value: Any, /) -> Any:
        return len(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=WAYS, help="train in this process, and print its peak in bytes")
    args = parser.parse_args()
    if args.only:
        print(peak_of(args.only, args.model, args.steps))
    else:
        report(args.model, peaks(args.model, args.steps))


def peaks(model: Path, steps: int) -> dict[str, int]:
    """The peak of each way in bytes, of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory.step", str(model), "--steps", str(steps), "--only"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    found = {}
    for way in WAYS:
        run = subprocess.run([*command, way], env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(run.stderr)
        found[way] = int(run.stdout.split()[-1])
    return found


def report(model: Path, found: dict[str, int]) -> None:
    """Print the peaks, also in bytes per parameter."""
    rows = [(way, peak / GIB, peak / parameters_of(model)) for way, peak in found.items()]
    print_table(("a process that trains", "peak, GiB", "bytes per parameter"), rows)


def parameters_of(model: Path) -> int:
    """The number of parameters of a float32 ``model``."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) // FLOAT32


def peak_of(way: str, model: Path, steps: int) -> int:
    """Train in this process, and return its peak in bytes."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        config = LearnerConfig(
            ModelSpec(path=model),
            LearnerSpec(),
            PolicyOptimizer(lr=1e-5),
            100,
            0,
            Path(folder),
            UPDATE,
            Mean(),
            TEMPERATURE,
        )
        with learner(config) if way == LEARNER else plain(config, Policy if way == PLAIN else FullLogits) as step:
            for _ in range(steps):
                step(*batch(rng))
    return peak_memory()


def batch(rng: np.random.Generator) -> tuple[list[Group], list[ScoredGroup]]:
    """Groups of random tokens; half of each group's samples have a reward."""
    groups = [
        random_group(rng, number, n=SAMPLES, vocabulary=1000, prompt=(40, 46), length=(4, 25))
        for number in range(PROMPTS)
    ]
    return groups, [scored(group, (rng.permutation(SAMPLES) % 2).tolist()) for group in groups]


@contextmanager
def learner(config: LearnerConfig) -> Iterator[Step]:
    """A rank's step, after which it publishes the weights."""
    import learner.libraries  # noqa: F401
    from learner.engine import open_store
    from learner.rank_worker import RankWorker

    worker = RankWorker.start(config, 0, open_store("127.0.0.1", 0, 1), object_store=Nowhere())

    def step(groups: list[Group], columns: list[ScoredGroup]) -> None:
        worker.step(columns, groups, 0, Mean(), None)
        worker.publish(1)
        worker.published(1)

    yield step


@contextmanager
def plain(config: LearnerConfig, kind: type[Policy]) -> Iterator[Step]:
    """The same step without DeepSpeed."""
    policy = kind(load_lm(config.model.folder, "float32"), TEMPERATURE)
    engine = PlainEngine(policy, config.optimizer, config.steps)
    width = policy.lm.config.hidden_size
    packer = Packer(config.micro_batch_tokens, width, allow_shared=True, device=engine.device)
    reinforcer = Reinforcer(UPDATE, engine, packer)  # type: ignore[arg-type]
    with process_group_of_one():
        yield lambda groups, columns: reinforcer.step(
            rank_batch(groups, columns, version=0, mask_truncated=False), Mean(), 0
        )


if __name__ == "__main__":
    main()
