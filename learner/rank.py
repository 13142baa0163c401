"""One learner rank: the Ray actor that owns one shard of the model."""

import faulthandler
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from learner.config import LearnerConfig
from learner.records import ScoredGroup, SFTRow, StepReport
from volley.objectives import Objective
from volley.records import Group, WeightUpdate
from volley.weight_group import WeightGroupTerms

if TYPE_CHECKING:
    from learner.publishing import Publisher


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Where a rank runs; ``port`` is that of the rendezvous, 0 on all ranks but the first."""

    pid: int
    node: str
    host: str
    port: int


class Rank:
    """Called by `learner.group.LearnerGroup`, all ranks alike and in the same order."""

    def __init__(self, config: LearnerConfig, rank: int, log: Path) -> None:
        _redirect_output(log)
        faulthandler.enable()
        self.config, self.rank, self.world = config, rank, config.learner.ranks
        self.steps_taken = 0
        self.publisher: Publisher | None = None

    def open(self) -> RankProcess:
        """Load the libraries; the first rank opens the rendezvous."""
        self.cuda = self.config.learner.gpus_per_rank > 0
        if not self.cuda:
            os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["OMP_NUM_THREADS"] = str(self.config.learner.threads_per_rank)
        import torch

        from learner.engine import open_store

        torch.set_num_threads(self.config.learner.threads_per_rank)
        host, port = ray.util.get_node_ip_address(), 0
        if self.rank == 0:
            self.store = open_store(host, port, self.world)
            port = self.store.port
            self._open_publisher()
        return RankProcess(os.getpid(), ray.get_runtime_context().get_node_id(), host, port)

    def start(self, host: str, port: int) -> None:
        """Join the other ranks at ``host:port`` and load the model.

        Raises:
            JobError: the model does not load, or its log-probs can not be had from its last hidden state.
        """
        import torch

        from learner.batch import Packer
        from learner.engine import Engine, frozen, join_ranks, open_store
        from learner.policy import Policy, StartingPolicy, load_trained, probe_layouts
        from learner.reinforce import Reinforcer
        from learner.value import Critic

        config, update = self.config, self.config.update
        if self.rank != 0:
            self.store = open_store(host, port, self.world)
        torch.manual_seed(config.seed)
        join_ranks(self.rank, self.world, self.store, cuda=self.cuda, deadline_s=config.learner.step_deadline_s)
        dtype, spec = config.model.dtype, config.learner

        def policy(*, entropy_gradient: bool, checkpointed: bool) -> Policy:
            lm = load_trained(config.model, config.seed, attention=spec.attention, checkpointed=checkpointed)
            return Policy(lm, config.temperature, entropy_gradient=entropy_gradient)

        entropy_gradient = update is not None and update.entropy_bonus > 0
        self.engine = Engine(
            lambda: policy(entropy_gradient=entropy_gradient, checkpointed=spec.gradient_checkpointing),
            config.optimizer,
            config,
        )
        self.pack = Packer(
            budget=spec.tokens_per_micro_batch,
            width=self._lm.config.get_text_config().hidden_size,
            allow_shared=probe_layouts(self.engine.module, dtype, self.engine.device),
            device=self.engine.device,
        )
        if self.publisher is not None:
            self.engine.before_update = self.publisher.settle
        self.engines = {"policy": self.engine}
        if update is not None:
            reference: Any = None
            if update.kl.wanted and config.model.lora is not None:
                reference = StartingPolicy(self.engine)
            elif update.kl.wanted:
                reference = frozen(lambda: policy(entropy_gradient=False, checkpointed=False), config)
            critic = None if update.value_model is None else Critic(config, update.value_model)
            if critic is not None:
                self.engines["value"] = critic.engine
            self.reinforcer = Reinforcer(update, self.engine, self.pack, reference=reference, critic=critic)

    def _open_publisher(self) -> None:
        from learner.publishing import Publisher

        spec = self.config.learner
        self.publisher = Publisher(verify=spec.verify_weights, deadline_s=spec.step_deadline_s)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def pulse(self) -> None:
        """Answer, in a thread of its own: the process is not stopped."""

    def step(
        self,
        scored: Sequence[ScoredGroup],
        version: int,
        objective: Objective,
        learning_rate: float | None,
        *groups: Group,
    ) -> StepReport:
        """One PPO step over this rank's groups; metrics are those of all ranks."""
        from learner.batch import rank_batch, usable

        mask_truncated = self.reinforcer.spec.mask_truncated
        pairs, dropped = usable(groups, scored, mask_truncated=mask_truncated)
        batch = rank_batch(
            [group for group, _ in pairs],
            [columns for _, columns in pairs],
            version=version,
            mask_truncated=mask_truncated,
        )
        self.engine.rate = learning_rate
        metrics, advantages = self.reinforcer.step(batch, objective, self.steps_taken)
        self.steps_taken += 1
        lags, counts = np.unique(batch.lag_T, return_counts=True)
        return StepReport(
            metrics=metrics,
            lag_histogram=dict(zip(lags.tolist(), counts.tolist(), strict=True)),
            advantages=advantages,
            dropped=dropped,
        )

    def sft_step(self, rows: Sequence[SFTRow]) -> StepReport:
        """One supervised step over this rank's rows; metrics are those of all ranks."""
        from learner.batch import sft_pieces
        from learner.supervised import supervised_step

        metrics = supervised_step(self.engine, self.pack, sft_pieces(rows), self.steps_taken)
        self.steps_taken += 1
        return StepReport(metrics=metrics)

    def publish(self, version: int) -> None:
        """Gather what is trained bucket by bucket; returns when the next step may begin. Rank 0 stores it meanwhile."""
        from learner.lora import published
        from learner.weights import buckets, gathered_views, resident

        if self.publisher is not None:
            self.publisher.begin(version)
        for bucket in buckets(published(self._lm), self._bucket_bytes):
            views = gathered_views(bucket)
            if self.publisher is not None:
                self.publisher.add(views, resident=resident(bucket))
        if self.publisher is not None:
            self.publisher.end()

    @ray.method(concurrency_group="publish")  # type: ignore[untyped-decorator]
    def published(self, version: int) -> WeightUpdate:
        """The update, once all of it is stored; asked of rank 0, in a thread of its own."""
        return self._first.update(version)

    @ray.method(concurrency_group="join")  # type: ignore[untyped-decorator]
    def join_weight_group(self, terms: WeightGroupTerms) -> bool:
        """Publish to these actors at once from the next version on; asked of rank 0. False if it can not be."""
        return self._first.join(terms)

    def save(self, folder: Path, extra: Mapping[str, Any]) -> str:
        """Write this rank's part of a checkpoint into ``folder``, which is not in use yet; returns why it could not."""
        from learner.checkpoint import save_engine

        problems = [
            save_engine(engine, name, folder, self._bucket_bytes, rank=self.rank, ranks=self.world)
            for name, engine in self.engines.items()
        ]
        if self.rank == 0:
            try:
                (folder / "run.json").write_text(json.dumps({"steps_taken": self.steps_taken, "extra": dict(extra)}))
            except OSError as error:
                problems.append(f"run.json: {error}")
        return next(filter(None, problems), "")

    def load(self, folder: Path) -> dict[str, Any]:
        """Take up a checkpoint of any number of ranks; returns what ``save`` was given as extra.

        Raises:
            JobError: the checkpoint is of another model.
        """
        from learner.checkpoint import load_engine

        if self.publisher is not None:
            self.publisher.settle()
        for name, engine in self.engines.items():
            load_engine(engine, name, folder, rank=self.rank, ranks=self.world)
        run = json.loads((folder / "run.json").read_text())
        self.steps_taken = int(run["steps_taken"])
        return dict(run["extra"])

    def export(self, folder: Path) -> None:
        """Write the Hugging Face model; rank 0 writes."""
        from learner.weights import export

        export(self._lm, self.config.model, folder, self._bucket_bytes, write=self.rank == 0)

    @property
    def _first(self) -> "Publisher":
        if self.publisher is None:
            raise RuntimeError("rank 0 alone publishes")
        return self.publisher

    @property
    def _lm(self) -> Any:
        return self.engine.module.lm

    @property
    def _bucket_bytes(self) -> int:
        return int(self.config.learner.bucket_mb * 2**20)


def _redirect_output(log: Path) -> None:
    """Send this process's output to its own log file, native libraries' output too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
