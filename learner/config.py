"""The learner's configuration. Imports neither Ray, torch nor DeepSpeed."""

from dataclasses import dataclass
from pathlib import Path

from volley.model import ModelSpec
from volley.objectives import Objective
from volley.shape import WIDTHS, Shape, micro_batch_tokens
from volley.update import LearnerSpec, Optimizer, PolicyUpdate


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Settings that all ranks of a run share.

    Attributes:
        model: the model training starts from, version 0; also the reference policy.
        learner: ranks, resources, deadlines.
        optimizer: AdamW and its schedule.
        steps: steps of the whole job, at which the cosine schedule reaches zero.
        seed: seed of torch's generators.
        log_dir: rank r logs to ``learner-<r>.log`` in this folder.
        update: the policy loss; None for supervised jobs.
        objective: the k-sample objective; None for supervised jobs.
        temperature: sampling temperature; log-probs are those of the tempered distribution.
        max_lag: how many versions old a token may be when it is trained on.
        ks: pass@k of the batch is reported for each of these k.
        prefix: prefix of the ranks' Ray names, so that runs on one cluster do not clash.
        lends: engines on the ranks' own devices read new weights from the learner's memory.
    """

    model: ModelSpec
    learner: LearnerSpec
    optimizer: Optimizer
    steps: int
    seed: int
    log_dir: Path
    update: PolicyUpdate | None = None
    objective: Objective | None = None
    temperature: float = 1.0
    max_lag: int = 0
    ks: tuple[int, ...] = ()
    prefix: str = ""
    lends: bool = False

    @property
    def micro_batch_tokens(self) -> int:
        """Padded tokens of a rank's forward pass."""
        return micro_batch_tokens(self.learner, Shape.of(self.model.folder), WIDTHS[self.model.dtype])
