"""How a job says what one step does to the policy: the loss, the optimiser, the schedule."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from volley.base import Resources, Spec
from volley.objectives import MajAtK, MaxAtK, MaxRL, Mean, Objective, PassAtKAnalytic


class NoCorrection(Spec):
    """Treat every sample as if the current policy had made it."""

    kind: Literal["none"] = "none"


class TokenCorrection(Spec):
    """Multiply each token's term by ``min(exp(prox - mu), cap)``: truncated importance sampling."""

    kind: Literal["token"] = "token"
    cap: float = Field(2.0, gt=0, description="largest weight a token may have")
    mask: bool = Field(False, description="drop tokens over the cap instead of truncating their weight")


class SequenceCorrection(Spec):
    """Multiply each sample's term by ``min(exp(sum_t prox - mu), cap)``."""

    kind: Literal["sequence"] = "sequence"
    cap: float = Field(2.0, gt=0, description="largest weight a sample may have")
    mask: bool = Field(False, description="drop samples over the cap instead of truncating their weight")


Correction = Annotated[NoCorrection | TokenCorrection | SequenceCorrection, Field(discriminator="kind")]


class KLPenalty(Spec):
    """Pull toward the starting policy. ``coefficient`` 0 only logs the divergence."""

    coefficient: float = Field(0.0, ge=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = "loss"
    logged: bool = Field(True, description="measure it where it is no penalty; false spares a copy of the model")

    @property
    def wanted(self) -> bool:
        """Is the starting policy needed at all?"""
        return self.coefficient > 0 or self.logged

    @property
    def shapes_reward(self) -> bool:
        """Is the divergence subtracted from the rewards?"""
        return self.coefficient > 0 and self.where == "reward"


class ValueModel(Spec):
    """V(x), one scalar per prompt, learned beside the policy: the baseline of ``objective: {kind: mean}``.

    It takes the place of the leave-one-out mean, ``a_i = (R_i - V(x)) / n`` (arXiv 2503.19595, appendix A.4). Rewards
    less V(x) would say nothing to the other objectives: they compare samples of one prompt, all shifted alike.
    """

    lr: float = Field(1e-6, gt=0)
    clip: float = Field(0.2, gt=0, description="alpha of the clipped value loss")


class PolicyUpdate(Spec):
    """The loss of one step. Source of the terms: docs/objectives.md."""

    clip_low: float = Field(0.2, ge=0, lt=1, description="the ratio is clipped from below at 1 - clip_low")
    clip_high: float = Field(0.2, ge=0, description="the ratio is clipped from above at 1 + clip_high")
    ratio: Literal["token", "sequence"] = Field(
        "token",
        description="one ratio per token, or a single ratio pi/pi_old per sample (arXiv 2503.19595, App. A.4)",
    )
    updates_per_batch: int = Field(1, ge=1, description="optimiser updates made from one batch")
    behaviour_correction: Correction = TokenCorrection()
    aggregation: Literal["sequence_sum", "sequence_mean", "token_mean"] = Field(
        "sequence_sum", description="sequence_sum is the estimators' own form"
    )
    kl: KLPenalty = KLPenalty()
    entropy_bonus: float = Field(0.0, ge=0)
    measured_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="share of the groups that are measured whole: entropy, ratio, divergence. Of the others only "
        "samples that give a gradient are computed",
    )
    mask_truncated: bool = Field(
        False, description="samples cut at their length limit leave their group: no gradient, and not part of its n"
    )
    value_model: ValueModel | None = None

    @property
    def acts_on_all(self) -> bool:
        """Has the loss a term for samples whose advantage is 0?"""
        return self.entropy_bonus > 0 or (self.kl.coefficient > 0 and self.kl.where == "loss")


def check_update(update: PolicyUpdate, objective: Objective) -> None:
    """Refuse an update that makes no sense with the objective.

    Raises:
        ValueError: with the change to make.
    """
    if update.value_model is not None and not isinstance(objective, Mean):
        raise ValueError(
            f"update.value_model is the baseline of kind: mean, and {objective.kind} has a baseline of its own: write "
            "value_model: null, or objective: {kind: mean}"
        )
    if update.value_model is not None and (objective.center or objective.normalize != "none"):
        raise ValueError(
            "center and normalize would take the value model's baseline out again: write center: false and "
            "normalize: none, or value_model: null"
        )
    weighs_companions = isinstance(objective, MaxAtK | MajAtK) and objective.companion_weights != "none"
    if weighs_companions and not isinstance(update.behaviour_correction, SequenceCorrection):
        # The objective divides a sample's own weight out of its advantage; only this correction puts it back whole.
        raise ValueError(
            "companion_weights correct the other samples of a set and leave a sample's own weight to the update: write "
            "update.behaviour_correction: {kind: sequence}"
        )
    if update.kl.coefficient and update.kl.where == "loss" and update.kl.estimator == "k1":
        raise ValueError(
            "the gradient of kl.estimator: k1 in the loss is zero on average, noise without a pull: write k2 or k3, or "
            "kl.where: reward"
        )
    if update.kl.shapes_reward and isinstance(objective, PassAtKAnalytic | MaxRL | MajAtK):
        raise ValueError(
            f"a KL penalty in the reward makes rewards that {objective.kind} is not defined for: write kl.where: loss"
        )


class Optimizer(Spec):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float | None = Field(1.0, gt=0, description="global gradient norm; null for no clipping")
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "cosine"] = "constant"


# What the learner sets itself, and what to write instead.
_OWNED = {
    "train_batch_size": "prompts_per_step, or rows_per_step where the job has that",
    "train_micro_batch_size_per_gpu": "learner.tokens_per_micro_batch",
    "gradient_accumulation_steps": "learner.tokens_per_micro_batch",
    "optimizer": "the job's own optimizer: {lr: ...}",
    "scheduler": "optimizer.schedule and optimizer.warmup_steps",
}


class LearnerSpec(Spec):
    """The ranks that update the policy."""

    ranks: int = Field(1, ge=1)
    cpus_per_rank: float = Field(1, gt=0)
    gpus_per_rank: float = Field(0, ge=0)
    resources_per_rank: Resources = Field(default_factory=dict, description="custom Ray resources a rank reserves")
    threads_per_rank: int = Field(1, ge=1, description="torch threads of a rank on CPU")
    tokens_per_micro_batch: int = Field(16384, ge=1, description="padded tokens a rank takes through the model at once")
    gradient_checkpointing: bool = Field(
        False, description="layers are computed again for the backward pass, not kept: less memory, a third more work"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] | None = Field(
        None, description="how attention is computed; null: as transformers finds fit, sdpa for most models"
    )
    bucket_mb: float = Field(64, gt=0, description="weights are gathered and sent in pieces of this size")
    verify_weights: bool = Field(False, description="send a checksum that every actor verifies")
    step_deadline_s: float = Field(600, gt=0)
    max_restarts: int = Field(
        3, ge=0, description="restarts from a checkpoint within an hour, after a rank died or hung"
    )
    deepspeed: dict[str, Any] = Field(default_factory=dict, description="passed through to deepspeed.initialize")

    @model_validator(mode="after")
    def _attention_has_its_device(self) -> Self:
        if self.attention == "flash_attention_2" and not self.gpus_per_rank:
            raise ValueError("attention: flash_attention_2 runs on GPUs alone: write gpus_per_rank: 1, or sdpa")
        return self

    @field_validator("deepspeed")
    @classmethod
    def _not_the_learners_own(cls, options: dict[str, Any]) -> dict[str, Any]:
        for key, instead in _OWNED.items():
            if key in options:
                raise ValueError(f"{key} is the learner's to set: drop it and write {instead}")
        zero = options.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ValueError("zero_optimization is to be a mapping: write zero_optimization: {overlap_comm: true}")
        if zero.get("stage", 3) != 3:
            raise ValueError(f"zero_optimization.stage {zero['stage']}: the learner shards as stage 3; drop it")
        return options
