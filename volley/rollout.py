"""Episodes: a program that calls the model as often as it likes makes one sample."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from volley.base import Resources, Spec
from volley.scoring import RewardValues

PROGRAM_GRACE_S = 30.0  # for an environment worker to report after the last of a group's episodes has timed out


class EpisodeRollout(Spec):
    """What all kinds of episodes have in common.

    ``sampling.n`` counts episodes, and ``sampling.max_tokens`` limits the sampled tokens of one, over all its calls.
    """

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


class ProgramRollout(EpisodeRollout):
    """Your program makes the calls, through any client of OpenAI's API, and returns the reward."""

    kind: Literal["program"] = "program"
    target: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="package.module:function(row, base_url, api_key), `async def` or plain, or a class with a method "
        "run like it; returns a reward, a mapping with reward, answer and detail, or None to have the scorer judge the "
        "last answer",
    )
    python: str | None = Field(
        None,
        min_length=1,
        description="interpreter to run the program with, such as a virtual environment's, 3.10 or later; null: "
        "Volley's own",
    )

    @property
    def program(self) -> str:
        """What makes the calls, for messages."""
        return self.target


class VerifiersRollout(EpisodeRollout):
    """An environment for verifiers 0.4 makes the calls and returns the reward of its rubric."""

    kind: Literal["verifiers"] = "verifiers"
    python: str = Field(min_length=1, description="interpreter with verifiers, as `volley env create` prints it")
    taskset: dict[str, Any] = Field(description="id of the taskset, and fields of its configuration")
    agent: dict[str, Any] = Field(
        default_factory=dict,
        description="fields of the agent's configuration, such as harness or max_turns; without a harness or a runtime "
        "a chat with the taskset's tools, as a subprocess",
    )

    @property
    def program(self) -> str:
        """What makes the calls, for messages."""
        return f"verifiers taskset {self.taskset['id']}"

    @model_validator(mode="after")
    def _names_a_taskset(self) -> Self:
        if not isinstance(self.taskset.get("id"), str) or not self.taskset["id"]:
            raise ValueError("taskset.id: required, but missing: write taskset: {id: PACKAGE}")
        return self


Rollout = Annotated[ProgramRollout | VerifiersRollout, Field(discriminator="kind")]


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
