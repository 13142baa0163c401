"""How samples are drawn, and for which prompts."""

import math

from pydantic import Field

from volley.base import Spec
from volley.objectives import Schedule
from volley.objectives.schedule import SolveRateRule
from volley.objectives.signal import MAX_SAMPLES
from volley.update import PolicyUpdate

MOST_SAMPLES = 10**5  # per prompt; far beyond any run, but a typing error would fill the memory
MOST_TOKENS = 10**7  # per sample


class Sampling(Spec):
    """How samples are drawn."""

    n: int = Field(16, ge=1, le=MOST_SAMPLES, description="samples per prompt")
    temperature: float = Field(1.0, gt=0)
    max_tokens: int = Field(1024, ge=1, le=MOST_TOKENS, description="length limit of one sample")
    seeded: bool = Field(False, description="seed each group: equal weights give equal samples; slower")


class Selection(SolveRateRule):
    """Prompts are skipped with a chance that falls with what their next group should teach (docs/objectives.md)."""

    floor: float = Field(0.1, ge=0.01, le=1, description="least chance that a prompt is taken when its turn comes")


class TrainingSampling(Sampling):
    """How samples are drawn in training, and for which prompts.

    top_p and top_k are not allowed: log-probs must be those of the whole distribution.
    """

    refill: float = Field(
        0.0,
        ge=0,
        le=16,
        description="limit on groups without a gradient that each step replaces, as a multiple of prompts_per_step",
    )
    selection: Selection | None = Field(None, description="prefer prompts whose solve rate promises a large gradient")

    def most_replaced(self, prompts_per_step: int) -> int:
        """Groups without a gradient that may be replaced between two batches."""
        return int(self.refill * prompts_per_step + 1e-9)  # 0.1 of 30 is 3


class EvalSampling(Sampling):
    """Sampling for evaluation, which allows nucleus sampling."""

    top_p: float = Field(1.0, gt=0, le=1)


def check_refill(sampling: TrainingSampling, prompts_per_step: int, update: PolicyUpdate) -> None:
    """Reject a refill that can replace no group.

    Raises:
        ValueError: names the change to make.
    """
    if not sampling.refill:
        return
    if update.gives_all_a_gradient:
        raise ValueError(
            "sampling.refill replaces groups without a gradient, but a value model, an entropy bonus or a KL penalty "
            "gives every group one: write refill: 0, or leave them out of update"
        )
    if prompts_per_step < 2:
        raise ValueError("sampling.refill needs batches of several groups: write prompts_per_step: 2 or more")
    if not sampling.most_replaced(prompts_per_step):
        raise ValueError(
            f"sampling.refill {sampling.refill:g} of prompts_per_step {prompts_per_step} is less than one group: "
            f"write refill: {math.ceil(100 / prompts_per_step) / 100:g} or more"
        )


def check_selection(sampling: TrainingSampling, schedule: Schedule) -> None:
    """Reject a selection of prompts that has nothing to go by.

    Raises:
        ValueError: names the change to make.
    """
    if sampling.selection is None:
        return
    if schedule.adaptive_k is not None:
        raise ValueError(
            "schedule.adaptive_k gives each prompt the k that suits its solve rate, and sampling.selection prefers "
            "prompts whose solve rate suits the objective: remove one of them"
        )
    if sampling.n > MAX_SAMPLES:
        raise ValueError(
            f"sampling.selection computes signals for at most {MAX_SAMPLES} samples, and sampling.n is {sampling.n}: "
            "lower it, or remove selection"
        )
