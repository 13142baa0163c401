"""The Ray actor of one learner rank.

The module is light because the coordinator imports it too. `learner.rank_worker.RankWorker` does the work; the rank's
process imports it after setting the environment variables that torch and DeepSpeed read.
"""

import faulthandler
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from numpy.typing import NDArray

from learner.config import LearnerConfig
from learner.records import ScoredGroup, SFTRow, StepReport
from volley.objectives import Objective
from volley.processes import redirect_output
from volley.records import Group, WeightUpdate
from volley.weight_group import WeightGroupTerms

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from learner.rank_worker import RankWorker


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Where a rank runs; ``port`` is the rendezvous port on rank 0 and 0 on the others."""

    pid: int
    node: str
    host: str
    port: int


class Rank:
    """Called by `learner.pool.LearnerPool`, which calls every rank alike and in the same order."""

    def __init__(self, config: LearnerConfig, rank: int, log: Path) -> None:
        redirect_output(log)
        faulthandler.enable()
        self._config, self._rank = config, rank
        self._store: TCPStore | None = None
        self._worker: RankWorker | None = None

    def open(self) -> RankProcess:
        """Import the libraries; rank 0 opens the rendezvous."""
        _set_environment(self._config)
        import learner.libraries  # noqa: F401
        from learner.engine import open_store

        host, port = ray.util.get_node_ip_address(), 0
        if self._rank == 0:
            self._store = open_store(host, port, self._config.learner.ranks)
            port = self._store.port
        return RankProcess(os.getpid(), ray.get_runtime_context().get_node_id(), host, port)

    def start(self, host: str, port: int) -> None:
        """Join the other ranks at ``host:port`` and load the model. Raises whatever `RankWorker.start` raises."""
        from learner.engine import open_store
        from learner.rank_worker import RankWorker

        if self._store is None:
            self._store = open_store(host, port, self._config.learner.ranks)
        self._worker = RankWorker.start(self._config, self._rank, self._store, object_store=ray)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def pulse(self) -> None:
        """Return at once, from a separate thread: an answer shows that the process is not stopped."""

    def step(
        self,
        scored: Sequence[ScoredGroup],
        version: int,
        objective: Objective,
        learning_rate: float | None,
        *groups: Group,
    ) -> StepReport:
        """See `RankWorker.step`. The pool passes references as ``groups``, which Ray resolves to the groups."""
        return self._started.step(scored, groups, version, objective, learning_rate)

    def sft_step(self, rows: Sequence[SFTRow]) -> StepReport:
        """See `RankWorker.sft_step`."""
        return self._started.sft_step(rows)

    def score(self, group: Group) -> NDArray[np.float32]:
        """See `RankWorker.score`. The pool passes a reference, which Ray resolves."""
        return self._started.score(group)

    def publish(self, version: int) -> None:
        """See `RankWorker.publish`."""
        self._started.publish(version)

    @ray.method(concurrency_group="publish")  # type: ignore[untyped-decorator]
    def published(self, version: int) -> WeightUpdate | None:
        """See `RankWorker.published`. Runs in a separate thread."""
        return self._started.published(version)

    @ray.method(concurrency_group="store")  # type: ignore[untyped-decorator]
    def store(self, version: int) -> WeightUpdate:
        """See `Publisher.store`. Only for rank 0; runs in a separate thread."""
        return self._started.publisher.store(version)

    @ray.method(concurrency_group="join")  # type: ignore[untyped-decorator]
    def join_weight_group(self, terms: WeightGroupTerms) -> bool:
        """See `Publisher.join`. Only for rank 0; runs in a separate thread."""
        return self._started.publisher.join(terms)

    def lend(self) -> None:
        """See `RankWorker.lend`."""
        self._started.lend()

    def sleep(self) -> None:
        """See `RankWorker.sleep`."""
        self._started.sleep()

    def wake(self) -> None:
        """See `RankWorker.wake`."""
        self._started.wake()

    def has_room_for_checkpoint(self) -> bool:
        """See `RankWorker.has_room_for_checkpoint`."""
        return self._started.has_room_for_checkpoint()

    def capture(self, extra: Mapping[str, Any]) -> None:
        """See `RankWorker.capture`."""
        self._started.capture(extra)

    @ray.method(concurrency_group="checkpoint")  # type: ignore[untyped-decorator]
    def write_captured(self, folder: Path) -> str:
        """See `RankWorker.write_captured`. Runs in a separate thread."""
        return self._started.write_captured(folder)

    @ray.method(concurrency_group="checkpoint")  # type: ignore[untyped-decorator]
    def drop_captured(self) -> None:
        """See `RankWorker.drop_captured`."""
        self._started.drop_captured()

    def save(self, folder: Path, extra: Mapping[str, Any]) -> str:
        """See `RankWorker.save`."""
        return self._started.save(folder, extra)

    def load(self, folder: Path) -> dict[str, Any]:
        """See `RankWorker.load`."""
        return self._started.load(folder)

    def export(self, folder: Path) -> str:
        """See `RankWorker.export`."""
        return self._started.export(folder)

    @property
    def _started(self) -> "RankWorker":
        if self._worker is None:
            raise RuntimeError(f"learner rank {self._rank} was not started")
        return self._worker


def _set_environment(config: LearnerConfig) -> None:
    """Set what torch and DeepSpeed read when they are imported."""
    spec = config.learner
    if spec.gpus_per_rank:
        # Micro-batches differ in shape: without it their freed memory is split into useless pieces. But another process
        # could open such memory only with the rights of a debugger.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{not config.lends}")
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = str(spec.threads_per_rank)
