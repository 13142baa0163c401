"""What a learner is told of its job. Light: importable without Ray, torch or DeepSpeed."""

from dataclasses import dataclass
from pathlib import Path

from volley.job import ModelSpec
from volley.objectives import Objective
from volley.update import LearnerSpec, Optimizer, PolicyUpdate


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Everything the ranks of one run share.

    Attributes:
        model: what training starts from; also the reference policy. It is version 0.
        learner: ranks, resources, deadlines.
        optimizer: AdamW and its schedule.
        steps: steps of the whole job; the cosine schedule ends there.
        seed: of torch's generators.
        log_dir: rank r writes ``learner-<r>.log`` here.
        update: the policy loss; None for supervised jobs.
        objective: the k-sample objective; None for supervised jobs.
        temperature: the samples were drawn at; log-probs are of the tempered distribution.
        max_lag: versions a token may be old.
        ks: the group's pass@k is reported for these k.
        prefix: put before the Ray names of the ranks, so that runs on one cluster do not clash.
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
