"""Configuration of the policy update: the loss, the optimiser, the learner's ranks."""

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from volley.base import MOST_AMOUNT, MOST_PROCESSES, Resources, Spec
from volley.objectives import MaxAtK, Mean, Objective, Softmax
from volley.objectives.spec import ObjectiveOverSets, weighs_companions


class NoCorrection(Spec):
    """Treat every sample as if the current policy had drawn it."""

    kind: Literal["none"] = "none"


class TokenCorrection(Spec):
    """Multiply each token's term by ``min(exp(prox - mu), cap)``: truncated importance sampling."""

    kind: Literal["token"] = "token"
    cap: float = Field(2.0, gt=0, description="largest weight of a token")
    mask: bool = Field(False, description="drop tokens above the cap instead of truncating their weight")
    floor: float = Field(0.0, ge=0, le=1, description="drop tokens whose weight is below this")

    @model_validator(mode="after")
    def _floor_fits(self) -> Self:
        _check_floor(self.floor, self.cap)
        return self


class SequenceCorrection(Spec):
    """Multiply each sample's term by ``min(exp(sum_t prox - mu), cap)``."""

    kind: Literal["sequence"] = "sequence"
    cap: float = Field(2.0, gt=0, description="largest weight of a sample")
    mask: bool = Field(False, description="drop samples above the cap instead of truncating their weight")
    floor: float = Field(0.0, ge=0, le=1, description="drop samples whose weight is below this")

    @model_validator(mode="after")
    def _floor_fits(self) -> Self:
        _check_floor(self.floor, self.cap)
        return self


def _check_floor(floor: float, cap: float) -> None:
    if floor > cap:
        raise ValueError(f"floor {floor} is above cap {cap}, so every weight would be dropped: lower the floor")


Correction = Annotated[NoCorrection | TokenCorrection | SequenceCorrection, Field(discriminator="kind")]


class KLPenalty(Spec):
    """Penalty on the divergence from the starting policy. With ``coefficient`` 0 it is only logged."""

    coefficient: float = Field(0.0, ge=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = "loss"
    target: float | None = Field(
        None,
        gt=0,
        description="divergence to keep, in nats per token: the coefficient doubles after a step with `kl_k3` above "
        "1.5 times this, and halves, but never below `coefficient`, after one with less than two thirds of it (after "
        "arXiv 1707.06347, section 4)",
    )
    logged: bool = Field(True, description="log it even with coefficient 0, which takes a copy of the starting model")

    @model_validator(mode="after")
    def _target_has_a_start(self) -> Self:
        if self.target is not None and not self.coefficient:
            raise ValueError(
                f"target: {self.target} adapts the coefficient, and 0 stays 0: write the coefficient to begin with, "
                "for example 0.02"
            )
        return self

    @property
    def wanted(self) -> bool:
        """True if the starting policy is needed at all."""
        return self.coefficient > 0 or self.logged

    @property
    def shapes_reward(self) -> bool:
        """True if the divergence is subtracted from the rewards."""
        return self.coefficient > 0 and self.where == "reward"


class ValueModel(Spec):
    """V(x), one scalar per prompt learned beside the policy: an additional baseline (arXiv 2503.19595, appendix A.4).

    It replaces the leave-one-out mean of `mean`: ``a_i = (R_i - V(x)) / n``. For objectives over sets, and `softmax`,
    V(x) learns the advantages and is subtracted from them: ``A_i - V(x)``.
    """

    lr: float = Field(1e-6, gt=0)
    clip: float = Field(0.2, gt=0, description="alpha of the clipped value loss")


class PolicyUpdate(Spec):
    """The loss of one step. docs/objectives.md has the sources of its terms."""

    renamed_keys: ClassVar[dict[str, str]] = {"measured_share": "kl_sample_fraction"}

    clip_low: float = Field(0.2, ge=0, le=1, description="the ratio is clipped below 1 - clip_low; 1: no lower bound")
    clip_high: float = Field(0.2, ge=0, description="the ratio is clipped above 1 + clip_high")
    ratio: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="one ratio per token, one ratio pi/pi_old per sample (arXiv 2503.19595, App. A.4), or the "
        "geometric mean of a sample's token ratios (GSPO, arXiv 2507.18071)",
    )
    surrogate: Literal["ppo", "cispo"] = Field(
        "ppo",
        description="ppo: a clipped token has no gradient; cispo: it keeps one, weighted by the clipped ratio "
        "(arXiv 2506.13585)",
    )
    updates_per_batch: int = Field(1, ge=1, description="optimiser updates per batch")
    behaviour_correction: Correction = TokenCorrection()
    off_policy_mask: float | None = Field(
        None,
        gt=0,
        description="drop samples with a negative advantage whose tokens have become less likely than when they were "
        "drawn by more than this many nats on average (arXiv 2512.02556)",
    )
    aggregation: Literal["sequence_sum", "sequence_mean", "token_mean"] = Field(
        "sequence_sum", description="sequence_sum matches the estimators' derivation"
    )
    kl: KLPenalty = KLPenalty()
    entropy_bonus: float = Field(0.0, ge=0)
    kl_sample_fraction: float = Field(
        0.25,
        gt=0,
        le=1,
        description="share of groups of which every sample is computed, for the entropy, ratio and divergence metrics; "
        "the other groups skip samples without a gradient",
    )
    mask_truncated: bool = Field(
        False, description="drop samples cut at the length limit: no gradient, not counted in the group's n"
    )
    value_model: ValueModel | None = None

    @model_validator(mode="after")
    def _terms_fit(self) -> Self:
        if self.ratio == "geometric" and self.aggregation != "sequence_sum":
            raise ValueError(
                f"ratio: geometric divides a sample's gradient by its length, and aggregation: {self.aggregation} "
                "would divide it again: write aggregation: sequence_sum"
            )
        if self.surrogate == "cispo" and self.ratio != "token":
            raise ValueError(
                f"surrogate: cispo weights every token by its own ratio, and ratio: {self.ratio} has one per sample: "
                "write ratio: token, or surrogate: ppo"
            )
        return self

    @property
    def acts_on_all(self) -> bool:
        """True if the loss has a term for samples with advantage 0."""
        return self.entropy_bonus > 0 or (self.kl.coefficient > 0 and self.kl.where == "loss")

    @property
    def gives_all_a_gradient(self) -> bool:
        """True if groups whose samples earned the same have a gradient too."""
        return self.acts_on_all or self.value_model is not None or self.kl.shapes_reward


def check_update(update: PolicyUpdate, objective: Objective) -> None:
    """Reject an update that makes no sense with the objective.

    Raises:
        ValueError: names the change to make.
    """
    if update.value_model is not None:
        _check_value_model(objective)
    if weighs_companions(objective) and not isinstance(update.behaviour_correction, SequenceCorrection):
        # The objective divides a sample's own weight out of its advantage; only this correction restores it fully.
        raise ValueError(
            "companion_weights correct for the other samples of a set and leave a sample's own weight to the update: "
            "write update.behaviour_correction: {kind: sequence}"
        )
    if weighs_companions(objective) and update.ratio == "geometric":
        raise ValueError(
            "companion_weights estimate the gradient of whole samples, which ratio: geometric divides by their "
            "lengths: write update.ratio: sequence or token, or companion_weights: none"
        )
    _check_kl(update.kl, objective)


def _check_value_model(objective: Objective) -> None:
    if not isinstance(objective, Mean | Softmax | ObjectiveOverSets):
        raise ValueError(
            f"update.value_model is a baseline for mean, softmax, max_at_k, maj_at_k and best_of_k, not for "
            f"{objective.kind}: write value_model: null, or objective: {{kind: mean}}"
        )
    if objective.focal:
        raise ValueError(
            "focal weighs the advantages of a group, and a value model is subtracted from them: write focal: 0, or "
            "value_model: null"
        )
    if objective.center or objective.normalize != "none":
        raise ValueError(
            "center and normalize would remove the value model's baseline again: write center: false and "
            "normalize: none, or value_model: null"
        )
    if weighs_companions(objective):
        raise ValueError(
            "companion_weights spread the advantages too far for a value model to learn: write companion_weights: "
            "none, or value_model: null"
        )
    if isinstance(objective, MaxAtK) and objective.baseline == "subset_loo":
        raise ValueError(
            "baseline: subset_loo makes the advantages of every group sum to zero, so a value model has nothing to "
            "learn: write baseline: loo_minus_one, or value_model: null"
        )


def _check_kl(kl: KLPenalty, objective: Objective) -> None:
    if kl.coefficient and kl.where == "loss" and kl.estimator == "k1":
        raise ValueError(
            "kl.estimator: k1 in the loss has a gradient of zero on average, which is only noise: write k2 or k3, or "
            "kl.where: reward"
        )
    if kl.shapes_reward and kl.estimator != "k1":
        raise ValueError(
            f"kl.estimator: {kl.estimator} in the reward does not follow the gradient of the divergence, and can push "
            "the policy away from the starting policy: write kl.estimator: k1, or kl.where: loss"
        )
    if kl.shapes_reward and objective.normalize == "std":
        raise ValueError(
            "normalize: std divides by the spread of the rewards with the KL penalty in them, so a group of equal "
            "rewards gets advantages of full size from the penalty alone: write kl.where: loss, or normalize: none"
        )
    if kl.shapes_reward and objective.focal:
        raise ValueError(
            "focal weighs a group by its mean reward, which is no solve rate with a KL penalty in it: write "
            "kl.where: loss, or focal: 0"
        )
    if kl.shapes_reward and not isinstance(objective, Mean):
        # The divergence depends on the policy itself. Only where every sample counts alike is the mean of that part 0.
        raise ValueError(
            f"a KL penalty in the reward is exact for kind: mean only, and biased for {objective.kind}: write "
            "kl.where: loss with kl.estimator: k2 or k3"
        )


class Optimizer(Spec):
    """AdamW and its schedule, as for supervised steps, whose gradient is a mean over tokens."""

    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decay of matrices; norms and biases do not decay")
    clip_norm: float | None = Field(1.0, gt=0, description="largest global gradient norm; null disables clipping")
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "cosine"] = "constant"

    def clips(self, grad_norm: float) -> bool:
        """Whether a gradient of this norm is clipped."""
        return self.clip_norm is not None and grad_norm > self.clip_norm


class PolicyOptimizer(Optimizer):
    """AdamW and its schedule for reinforcement, without clipping by default.

    The gradient is a sum over the tokens of a sample, so its norm grows with their length and a fixed limit would cut
    every step to one size, whatever signal its batch carries. Adam's step does not depend on the scale of the gradient.
    """

    clip_norm: float | None = Field(
        None,
        gt=0,
        description="largest global gradient norm, such as 4 times the usual grad_norm; null for no clipping",
    )


# DeepSpeed options that the learner sets, and what to write instead.
_OWNED = {
    "train_batch_size": "prompts_per_step, or rows_per_step in supervised jobs",
    "train_micro_batch_size_per_gpu": "learner.tokens_per_micro_batch",
    "gradient_accumulation_steps": "learner.tokens_per_micro_batch",
    "optimizer": "the job's optimizer: {lr: ...}",
    "gradient_clipping": "optimizer.clip_norm",
    "sequence_parallel_size": "learner.sequence_parallel",
    "scheduler": "optimizer.schedule and optimizer.warmup_steps",
}


class LearnerSpec(Spec):
    """The learner ranks, which update the policy."""

    ranks: int = Field(1, ge=1, le=MOST_PROCESSES)
    cpus_per_rank: float = Field(1, gt=0, le=MOST_AMOUNT)
    gpus_per_rank: float = Field(0, ge=0, le=MOST_AMOUNT)
    resources_per_rank: Resources = Field(default_factory=dict, description="custom Ray resources per rank")
    threads_per_rank: int = Field(1, ge=1, description="torch threads per rank on CPU")
    tokens_per_micro_batch: int | None = Field(
        None,
        ge=1,
        description="padded tokens per forward pass of a rank; null: 16384; on a CPU 2048, or fewer (512 at least) "
        "if that many would keep more than 2 GiB of activations",
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute layers in the backward pass: less memory, a third more compute"
    )
    compile: bool = Field(
        False,
        description="compile layers with torch when they are first used, which takes 10 to 60 s, for faster steps; on "
        "a CPU it needs g++",
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] | None = Field(
        None,
        description="attention implementation; null: on GPUs in bfloat16 flash_attention_2 if installed, else sdpa",
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="ranks that split the positions of each row and so share its activations; must divide `ranks` and "
        "the model's query heads",
    )
    shared_rows: bool | None = Field(
        None,
        description="samples of a group may share a row with one copy of their prompt, where that is cheaper and the "
        "model allows it; null: on CPUs only, since masks rule out flash attention and grow with the square of a row",
    )
    bucket_mb: float = Field(64, gt=0, description="weights are gathered and sent in pieces of this size")
    verify_weights: bool = Field(False, description="send a checksum that every actor verifies")
    start_deadline_s: float = Field(
        300, gt=0, description="longest wait for the ranks to load the model; raise it for models that load slowly"
    )
    step_deadline_s: float = Field(600, gt=0)
    max_restarts: int = Field(3, ge=0, description="limit on restarts from a checkpoint within an hour")
    deepspeed: dict[str, Any] = Field(default_factory=dict, description="passed on to deepspeed.initialize")

    @model_validator(mode="after")
    def _has_its_devices(self) -> Self:
        if self.gpus_per_rank > 1 or (self.ranks > 1 and 0 < self.gpus_per_rank <= 0.5):  # NCCL refuses two on one
            raise ValueError("gpus_per_rank: every rank uses one GPU, and no two the same: write gpus_per_rank: 1")
        if self.attention == "flash_attention_2" and not self.gpus_per_rank:
            raise ValueError("attention: flash_attention_2 needs a GPU: write gpus_per_rank: 1, or attention: sdpa")
        return self

    @model_validator(mode="after")
    def _shared_rows_have_masks(self) -> Self:
        if self.shared_rows and self.sequence_parallel > 1:
            raise ValueError("shared_rows: true has no split rows: write shared_rows: null, or sequence_parallel: 1")
        if self.shared_rows and self.attention not in (None, "sdpa"):
            raise ValueError(
                f"shared_rows: true needs masks, which attention: {self.attention} does not take here: write "
                "attention: sdpa, or shared_rows: null"
            )
        return self

    @model_validator(mode="after")
    def _rows_can_be_split(self) -> Self:
        size = self.sequence_parallel
        if self.ranks % size:
            whole = -(-self.ranks // size) * size
            raise ValueError(
                f"sequence_parallel: {size} does not divide ranks: {self.ranks}: write ranks: {whole}, or "
                f"sequence_parallel: {math.gcd(size, self.ranks)}"
            )
        if size > 1 and self.attention not in (None, "sdpa"):
            raise ValueError(
                f"sequence_parallel: {size} has its own attention, by sdpa: write attention: sdpa, or "
                "sequence_parallel: 1"
            )
        return self

    @model_validator(mode="after")
    def _compiled_rows_are_whole(self) -> Self:
        if self.compile and self.sequence_parallel > 1:
            raise ValueError("compile: true has no split rows: write compile: false, or sequence_parallel: 1")
        return self

    @property
    def sequence_groups(self) -> int:
        """How many parts a batch is dealt to: groups of ranks that split rows, or single ranks."""
        return self.ranks // self.sequence_parallel

    @property
    def shares_rows(self) -> bool:
        """Whether samples of a group may share a row, if the model allows it."""
        if self.shared_rows is None:
            return not self.gpus_per_rank and self.sequence_parallel == 1 and self.attention in (None, "sdpa")
        return self.shared_rows

    @field_validator("deepspeed")
    @classmethod
    def _not_the_learners_own(cls, options: dict[str, Any]) -> dict[str, Any]:
        for key, instead in _OWNED.items():
            if key in options:
                raise ValueError(f"{key} is set by the learner: remove it and write {instead}")
        zero = options.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ValueError("zero_optimization must be a mapping: write zero_optimization: {overlap_comm: true}")
        if zero.get("stage", 3) != 3:
            raise ValueError(f"zero_optimization.stage {zero['stage']}: the learner always uses stage 3; remove it")
        return options
