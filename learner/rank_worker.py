"""What one learner rank does: steps, publishing weights, checkpoints. Needs no Ray; `learner.rank.Rank` wraps it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from learner.attention import implementation
from learner.batch import Packer, rank_batch, sft_pieces, usable
from learner.checkpoint import Snapshot, engine_files, load_engine, state_bytes, text_parts, write_file
from learner.compiled import compile_layers
from learner.config import LearnerConfig
from learner.contributor import Contributor
from learner.engine import Engine, another_group, frozen, join_ranks
from learner.layout import Piece
from learner.lora import published
from learner.policy import Policy, StartingPolicy, load_trained, probe_layouts
from learner.publishing import ObjectStore, Publisher, Source
from learner.records import ScoredGroup, SFTRow, StepReport
from learner.reinforce import Reinforcer
from learner.sequence import ATTENTION, RowSplit, split_rows
from learner.staging import Staging
from learner.supervised import supervised_step
from learner.value import Critic
from learner.weights import Bucket, buckets, export, gathered_views, in_checkpoint_form, resident, sent_to_first
from volley.files import is_full
from volley.memory import available_memory, peak_above_now, return_freed_memory, total_memory
from volley.objectives import Objective
from volley.records import Group, WeightUpdate
from volley.update import PolicyUpdate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]
    from transformers import PreTrainedModel

RUN_FILE = "run.json"  # in a checkpoint: steps taken, and what the caller of `save` or `capture` adds
GRACE_SECONDS = 30.0  # how much longer than the coordinator a rank waits, so that the error is the coordinator's
SPARE_MEMORY = 0.1  # of the host's, which a copy of the state leaves free: Ray ends processes when 5% are left


class RankWorker:
    """One rank: its shard of the models, and its part of every call. All ranks must make the same calls in order.

    Args:
        engine: the policy under ZeRO-3.
        pack: lays out micro-batches.
        reinforcer: takes reinforcement steps; None in supervised jobs.
        publisher: stores and sends weights; None on all ranks but the first.
        gathering: the process group of all ranks that publishes in the background; None if one rank has all weights,
            or if they are gathered before the next step.
    """

    def __init__(
        self,
        config: LearnerConfig,
        rank: int,
        engine: Engine,
        pack: Packer,
        reinforcer: Reinforcer | None = None,
        publisher: Publisher | None = None,
        gathering: "ProcessGroup | None" = None,
    ) -> None:
        self._config, self._rank = config, rank
        self._engine, self._pack = engine, pack
        self._reinforcer, self._gathering = reinforcer, gathering
        self._publisher = publisher
        self._contributor = Contributor(f"learner-{rank}", config.learner.step_deadline_s + GRACE_SECONDS)
        engine.before_update = self._settle
        self._engines = {"policy": engine}
        if reinforcer is not None and reinforcer.critic is not None:
            self._engines["value"] = reinforcer.critic.engine
        self._steps_taken = 0
        self._captured: Snapshot | None = None
        self._lending = False

    @classmethod
    def start(cls, config: LearnerConfig, rank: int, store: "TCPStore", *, object_store: ObjectStore) -> "RankWorker":
        """Join the other ranks through ``store`` and load the models.

        Raises:
            JobError: the model does not load, or its log-probs cannot be computed from its last hidden state.
        """
        spec = config.learner
        torch.set_num_threads(spec.threads_per_rank)
        torch.manual_seed(config.seed)
        patience = spec.step_deadline_s + GRACE_SECONDS
        join_ranks(rank, spec.ranks, store, cuda=spec.gpus_per_rank > 0, deadline_s=patience)
        split = split_rows(rank, spec, patience)
        engine = _policy_engine(config, split)
        exact_shared = probe_layouts(engine.module, config.model.dtype, engine.device)
        pack = Packer(
            budget=config.micro_batch_tokens * spec.sequence_parallel,
            width=engine.module.lm.config.get_text_config().hidden_size,
            allow_shared=spec.shares_rows and exact_shared,
            device=engine.device,
        )
        publisher = None
        if rank == 0:
            staging = Staging(engine.device, _bucket_bytes(config))
            publisher = Publisher(
                object_store, verify=spec.verify_weights, deadline_s=patience, staging=staging, lends=config.lends
            )
        background = spec.ranks > 1 and not spec.gpus_per_rank
        gathering = another_group(patience) if background else None
        reinforcer = None if config.update is None else _reinforcer(config, config.update, engine, pack, split)
        return cls(config, rank, engine, pack, reinforcer, publisher, gathering)

    @property
    def publisher(self) -> Publisher:
        """Rank 0's."""
        if self._publisher is None:
            raise RuntimeError("only rank 0 publishes")
        return self._publisher

    def step(
        self,
        scored: Sequence[ScoredGroup],
        groups: Sequence[Group],
        version: int,
        objective: Objective,
        learning_rate: float | None,
    ) -> StepReport:
        """One PPO step over this rank's groups; its metrics are those of all ranks.

        Args:
            scored: the groups' verdicts, in the same order.
            version: the learner's version before the step.
            learning_rate: replaces the schedule's, unless None.
        """
        if self._reinforcer is None:
            raise RuntimeError("a supervised job takes no reinforcement steps")
        mask_truncated = self._reinforcer.spec.mask_truncated
        pairs, dropped = usable(groups, scored, mask_truncated=mask_truncated)
        batch = rank_batch(
            [group for group, _ in pairs],
            [columns for _, columns in pairs],
            version=version,
            mask_truncated=mask_truncated,
        )
        self._engine.rate = learning_rate
        metrics, advantages = self._reinforcer.step(batch, objective, self._steps_taken)
        self._steps_taken += 1
        lags, counts = np.unique(batch.lag_T, return_counts=True)
        return StepReport(
            metrics=metrics,
            lag_histogram=dict(zip(lags.tolist(), counts.tolist(), strict=True)),
            advantages=advantages,
            dropped=dropped,
        )

    def sft_step(self, rows: Sequence[SFTRow]) -> StepReport:
        """One supervised step over this rank's rows; its metrics are those of all ranks."""
        metrics = supervised_step(self._engine, self._pack, sft_pieces(rows), self._steps_taken)
        self._steps_taken += 1
        return StepReport(metrics=metrics)

    @torch.no_grad()
    def score(self, group: Group) -> NDArray[np.float32]:
        """Log-probs of a group's tokens under the current weights, float32 [T]. All ranks take the same group."""
        tokens = len(group.tokens_T)
        whole = Piece(
            group.prompt_p,
            group.tokens_T,
            group.lengths_n,
            np.arange(tokens),
            group.observation_S,
            group.observation_at_S,
        )
        logprob_T = torch.empty(tokens)
        for micro in self._pack([whole]):
            logprob_T[micro.index_T.cpu()] = self._engine(micro)[0].float().cpu()
        scored: NDArray[np.float32] = logprob_T.numpy()
        return scored

    def publish(self, version: int) -> None:
        """Start publishing the trained weights, bucket by bucket; returns when the next step may begin."""
        if self._publisher is not None:
            self._publisher.begin(version)
        self._contributor.begin(version)
        # Page-locked memory has sizes that are powers of two: the header has to fit too.
        for bucket in buckets(published(self._lm), self._bucket_bytes * 63 // 64):
            if self._gathering is None:
                self._publish_gathered(bucket)
            elif self._publisher is None:
                self._contributor.add(partial(sent_to_first, bucket, self._gathering))
            else:
                self._publisher.add(partial(self._received, bucket, self._gathering), Source.ON_DEMAND)
        if self._publisher is not None:
            self._publisher.end()

    def _publish_gathered(self, bucket: Bucket) -> None:
        if resident(bucket) and self._publisher is not None:
            self._publisher.add(lambda: self._served(gathered_views(bucket)), Source.WEIGHTS)
            return
        views = gathered_views(bucket)
        if self._publisher is not None:
            self._publisher.add(partial(self._served, views), Source.GATHERED)

    def _received(self, bucket: Bucket, group: "ProcessGroup") -> dict[str, torch.Tensor]:
        return self._served(sent_to_first(bucket, group))

    def _served(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors as the actors load them."""
        return tensors if self._config.model.lora is not None else in_checkpoint_form(self._lm, tensors)

    def published(self, version: int) -> WeightUpdate | None:
        """Wait, in a thread other than that of the steps, until ``version`` is stored; None on all ranks but the first.

        Raises whatever `Publisher.update` raises, or RuntimeError if another rank has ended.
        """
        if self._publisher is not None:
            return self._publisher.update(version)
        self._contributor.settle()
        return None

    def lend(self) -> None:
        """Let engines on this rank's device read the published weights: empty a GPU but for them. Then call `sleep`."""
        self._settle()
        if self._engine.device.type == "cuda":
            from learner.offload import move_away

            move_away(self._engines.values(), self._frozen, lent=self._engine)
        self._lending = True
        return_freed_memory()

    def sleep(self) -> None:
        """Leave the device to actors until `wake`: empty a GPU, or give back what a CPU's allocator keeps."""
        self._settle()
        if self._engine.device.type == "cuda":
            from learner.offload import move_away, move_lent_away

            if self._lending:
                move_lent_away(self._engine)
            else:
                move_away(self._engines.values(), self._frozen)
        self._lending = False
        return_freed_memory()

    def wake(self) -> None:
        """Take the device back."""
        if self._publisher is not None:
            self._publisher.leave_device()
        if self._engine.device.type == "cuda":
            from learner.offload import move_back

            move_back(self._engines.values(), self._frozen, self._engine.device)

    @property
    def _frozen(self) -> nn.Module | None:
        """The reference policy, if it has weights of its own."""
        reference = None if self._reinforcer is None else self._reinforcer.reference
        return reference if isinstance(reference, nn.Module) else None

    def _settle(self) -> None:
        """Wait until the weights may change."""
        if self._publisher is not None:
            self._publisher.settle()
        self._contributor.settle()

    def has_room_for_checkpoint(self) -> bool:
        """Whether this host's memory has room for the whole state, should all ranks be on this host.

        Room is left for what the ranks need within a step, by this rank's peak so far.
        """
        state = sum(map(state_bytes, self._engines.values()))
        within_step = self._config.learner.ranks * peak_above_now()
        return state + within_step + SPARE_MEMORY * total_memory() < available_memory()

    def capture(self, extra: Mapping[str, Any]) -> None:
        """Copy this rank's part of a checkpoint, for `write_captured`."""
        snapshot = Snapshot()
        for file, parts in self._checkpoint_files(extra):
            snapshot.add(file, parts)
        self._captured = snapshot

    def write_captured(self, folder: Path) -> str:
        """Write what `capture` copied into ``folder``, from any thread; steps may run meanwhile.

        Returns:
            Why a file could not be written, or ""; then it may be called again.
        """
        if self._captured is None:
            raise RuntimeError("nothing was captured")
        return self._captured.write(folder)

    def drop_captured(self) -> None:
        """Give the memory that `capture` took back to the host."""
        self._captured = None
        return_freed_memory()

    def save(self, folder: Path, extra: Mapping[str, Any]) -> str:
        """Write this rank's part of a checkpoint into ``folder`` file by file, which takes little memory.

        Returns:
            The first reason why a file could not be written, or "". It does not raise, because the other ranks wait
            for this one in every gather.
        """
        problem = ""
        for file, parts in self._checkpoint_files(extra):
            problem = problem or write_file(folder / file, parts)
            del parts  # before the next file is gathered
        return problem

    def _checkpoint_files(self, extra: Mapping[str, Any]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        ranks = self._config.learner.ranks
        for name, engine in self._engines.items():
            yield from engine_files(engine, name, self._bucket_bytes, rank=self._rank, ranks=ranks)
        if self._rank == 0:
            run: dict[str, Any] = {"steps_taken": self._steps_taken, "extra": dict(extra)}
            if self._reinforcer is not None and self._reinforcer.spec.kl.target is not None:
                run["kl_coefficient"] = self._reinforcer.kl_coefficient
            yield RUN_FILE, text_parts(json.dumps(run))

    def load(self, folder: Path) -> dict[str, Any]:
        """Resume from a checkpoint saved by any number of ranks; returns the ``extra`` passed to `save` or `capture`.

        Raises:
            JobError: the checkpoint belongs to another model.
        """
        self._settle()
        for name, engine in self._engines.items():
            load_engine(engine, name, folder, rank=self._rank, ranks=self._config.learner.ranks)
        run = json.loads((folder / RUN_FILE).read_text())
        self._steps_taken = int(run["steps_taken"])
        if self._reinforcer is not None and "kl_coefficient" in run:
            self._reinforcer.kl_coefficient = float(run["kl_coefficient"])
        return dict(run["extra"])

    def export(self, folder: Path) -> str:
        """Take part in gathering the model; rank 0 writes it to ``folder`` in Hugging Face format.

        Returns:
            Why the disk has no space for it, or "".
        """
        try:
            export(self._lm, self._config.model, folder, self._bucket_bytes, write=self._rank == 0)
        except Exception as error:  # safetensors has a type of its own
            if not is_full(error):
                raise
            return str(error)
        return ""

    @property
    def _lm(self) -> "PreTrainedModel":
        return self._engine.module.lm

    @property
    def _bucket_bytes(self) -> int:
        return _bucket_bytes(self._config)


def _bucket_bytes(config: LearnerConfig) -> int:
    return int(config.learner.bucket_mb * 2**20)


def _policy(config: LearnerConfig, split: RowSplit | None, *, entropy_gradient: bool, checkpointed: bool) -> Policy:
    attention = implementation(config) if split is None else ATTENTION
    lm = load_trained(config.model, config.seed, attention=attention, checkpointed=checkpointed)
    if config.learner.compile:
        compile_layers(lm, cuda=config.learner.gpus_per_rank > 0)
    return Policy(lm, config.temperature, entropy_gradient=entropy_gradient, split=split)


def _policy_engine(config: LearnerConfig, split: RowSplit | None) -> Engine:
    entropy_gradient = config.update is not None and config.update.entropy_bonus > 0
    checkpointed = config.learner.gradient_checkpointing
    return Engine(
        lambda: _policy(config, split, entropy_gradient=entropy_gradient, checkpointed=checkpointed),
        config.optimizer,
        config,
    )


def _reinforcer(
    config: LearnerConfig, update: PolicyUpdate, engine: Engine, pack: Packer, split: RowSplit | None
) -> Reinforcer:
    """The reinforcement step with its reference policy and value model, if the job needs them."""
    reference = None
    if update.kl.wanted and config.model.lora is not None:
        reference = StartingPolicy(engine)
    elif update.kl.wanted:
        reference = frozen(lambda: _policy(config, split, entropy_gradient=False, checkpointed=False), config)
    critic = None if update.value_model is None else Critic(config, update.value_model)
    return Reinforcer(update, engine, pack, reference=reference, critic=critic)
