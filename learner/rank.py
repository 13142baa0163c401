"""One learner rank: the Ray actor that owns one shard of the model."""

import faulthandler
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from learner.config import LearnerConfig
from learner.records import ScoredGroup, SFTRow, StepReport
from volley.checksum import weights_checksum
from volley.objectives import Objective
from volley.records import Group, WeightBucket, WeightUpdate


class Rank:
    """Called by `learner.group.LearnerGroup`, all ranks alike and in the same order."""

    def __init__(self, config: LearnerConfig, rank: int, log: Path) -> None:
        _redirect_output(log)
        faulthandler.enable()
        self.config, self.rank, self.world = config, rank, config.learner.ranks
        self.folder: Path | None = None

    def address(self) -> tuple[str, int]:
        """This host's address and a port that was free a moment ago."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    def start(self, host: str, port: int) -> int:
        """Join the other ranks at ``host:port``, load the model; returns this process's id.

        Raises:
            JobError: the model does not load.
        """
        cuda = self.config.learner.gpus_per_rank > 0
        if not cuda:
            os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["OMP_NUM_THREADS"] = str(self.config.learner.threads_per_rank)
        import torch

        from learner.engine import Policy, join_ranks, load_lm, start_engine
        from learner.steps import Stepper

        torch.set_num_threads(self.config.learner.threads_per_rank)
        torch.manual_seed(self.config.seed)
        join_ranks(self.rank, self.world, host, port, cuda=cuda)
        self.engine = start_engine(self.config)
        reference = None
        if self.config.update is not None and self.config.update.kl.wanted:
            reference = Policy(load_lm(self.config.model.path, self.config.model.dtype), self.config.temperature)
            reference.eval().requires_grad_(False)
        self.stepper = Stepper(
            self.config,
            self.engine,
            reference,
            width=self._lm.config.hidden_size,
            allow_shared=self._lm.config.model_type in SHARED_LAYOUT,
        )
        return os.getpid()

    def step(self, scored: Sequence[ScoredGroup], version: int, objective: Objective, *groups: Group) -> StepReport:
        """One PPO step over this rank's groups; metrics are those of all ranks."""
        from learner.batch import rank_batch

        spec = self.config.update
        batch = rank_batch(groups, scored, version=version, mask_truncated=bool(spec and spec.mask_truncated))
        metrics, advantage_N = self.stepper.reinforce(batch, objective)
        self.stepper.steps_taken += 1
        lags, counts = np.unique(batch.lag_T, return_counts=True)
        ends = np.cumsum([group.n for group in groups])
        return StepReport(
            metrics=metrics,
            lag_histogram=dict(zip(lags.tolist(), counts.tolist(), strict=True)),
            advantages={
                group.group_id: advantage_N[end - group.n : end] for group, end in zip(groups, ends, strict=True)
            },
        )

    def sft_step(self, rows: Sequence[SFTRow]) -> StepReport:
        """One supervised step over this rank's rows; metrics are those of all ranks."""
        from learner.batch import sft_pieces

        metrics = self.stepper.supervised(sft_pieces(rows))
        self.stepper.steps_taken += 1
        return StepReport(metrics=metrics)

    def publish(self, version: int) -> WeightUpdate | None:
        """Gather the weights bucket by bucket; rank 0 puts each into the object store and returns the update."""
        from learner.weights import buckets, gathered, packed

        begun = time.perf_counter()
        stored: list[WeightBucket] = []
        files: list[NDArray[np.uint8]] = []
        for bucket in buckets(self._lm, self._bucket_bytes):
            tensors = gathered(bucket, keep=self.rank == 0)
            if tensors:
                file = packed(tensors)
                stored.append(WeightBucket(ray.put(file), file.nbytes))
                if self.config.learner.verify_weights:
                    files.append(file)
        if self.rank != 0:
            return None
        checksum = weights_checksum(files) if files else None
        return WeightUpdate(version, tuple(stored), checksum, time.perf_counter() - begun)

    def save(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write this rank's part of a checkpoint into ``folder``, which is not in use yet."""
        self.engine.save_checkpoint(str(folder), tag="state", client_state={"steps_taken": self.stepper.steps_taken})
        if self.rank == 0:
            (folder / "run.json").write_text(json.dumps(dict(extra)))

    def load(self, folder: Path) -> dict[str, Any]:
        """Take up a checkpoint; returns what ``save`` was given as extra."""
        _, state = self.engine.load_checkpoint(str(folder), tag="state")
        self.stepper.steps_taken = int(state["steps_taken"])
        extra: dict[str, Any] = json.loads((folder / "run.json").read_text())
        return extra

    def export(self, folder: Path) -> None:
        """Write the Hugging Face model; rank 0 writes."""
        from learner.weights import export

        export(self._lm, self.config.model.path, folder, self._bucket_bytes, write=self.rank == 0)

    @property
    def _lm(self) -> Any:
        return self.engine.module.lm

    @property
    def _bucket_bytes(self) -> int:
        return int(self.config.learner.bucket_mb * 2**20)


# Model types whose attention takes a 4D additive mask as it is, checked against one row a sample by a test.
SHARED_LAYOUT = frozenset({"llama", "qwen2", "qwen3", "mistral"})


def _redirect_output(log: Path) -> None:
    """Send this process's output to its own log file, native libraries' output too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
