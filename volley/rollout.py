"""Episodes: a program that calls the model as often as it likes makes one sample."""

from typing import Literal

from pydantic import Field

from volley.base import Resources, Spec
from volley.scoring import RewardValues

PROGRAM_GRACE_S = 30.0  # for an environment worker to report after the last of a group's episodes has timed out


class ProgramRollout(Spec):
    """Your program makes the calls, through any client of OpenAI's API, and returns the reward.

    ``sampling.n`` counts episodes, and ``sampling.max_tokens`` limits the sampled tokens of one, over all its calls.
    """

    kind: Literal["program"] = "program"
    target: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="package.module:function(row, base_url, api_key), `async def` or plain, or a class with a method "
        "run like it; returns a reward, a mapping with reward, answer and detail, or None to have the scorer judge the "
        "last answer",
    )
    values: RewardValues = Field(
        RewardValues(), description="passed: the reward from which a sample passed; failed: that of one that ran out"
    )
    max_calls: int = Field(16, ge=1, le=10_000, description="calls of the model per episode")
    max_context: int | None = Field(
        None, ge=2, description="longest prompt plus answer of a call in tokens; null: the model's length"
    )
    timeout_s: float = Field(600, gt=0, description="seconds per episode")
    on_rewrite: Literal["drop", "keep_longest"] = Field(
        "drop",
        description="episodes whose history was rewritten leave their group, or keep the longest part as sampled",
    )


class EnvironmentWorkersSpec(Spec):
    """The processes that run programs."""

    count: int = Field(1, ge=1)
    max_count: int | None = Field(
        None, ge=1, description="autoscaling limit while groups wait for a worker; null disables it"
    )
    episodes: int = Field(64, ge=1, description="episodes that a worker runs at once")
    cpus: float = Field(0.1, ge=0)
    resources: Resources = Field(default_factory=dict, description="custom Ray resources per worker")
    max_replacements: int = Field(20, ge=0, description="limit on workers replaced within an hour")
    start_deadline_s: float = Field(60, gt=0)
