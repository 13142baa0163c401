"""JobSpec: the one configuration tree. ``volley schema`` prints it as JSON Schema.

RLJob     reinforcement learning of a k-sample objective
SFTJob    supervised fine-tuning on prompt/answer rows, on the same learner
RFTJob    rejection sampling: n samples per prompt, supervised fine-tuning on the correct ones
EvalJob   n samples per prompt, unbiased pass@k for a list of k
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from volley.base import Resources, Spec
from volley.data import DataSpec
from volley.lora import LoraSpec
from volley.objectives import Objective, Schedule, check_schedule, resolve
from volley.runtime_env import RuntimeEnvSpec
from volley.scoring import ScorerSpec
from volley.sinks import SinkSpec
from volley.turns import TurnsSpec
from volley.update import LearnerSpec, Optimizer, PolicyUpdate, check_update

# Far beyond any run; past them counters overflow or a typing error fills the memory.
MOST_STEPS = 10**9
MOST_ROWS = 10**6  # of one batch
MOST_SAMPLES = 10**5  # of one prompt
MOST_TOKENS = 10**7  # of one sample


class ModelSpec(Spec):
    """A causal language model in Hugging Face format."""

    path: Path = Field(description="folder with config.json, safetensors weights and a tokenizer")
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: LoraSpec | None = Field(None, description="train adapters in place of the whole model; null: the whole model")


class Sampling(Spec):
    """How samples are drawn. Training has no top_p or top_k: the log-probs are those of the distribution."""

    n: int = Field(16, ge=1, le=MOST_SAMPLES, description="samples per prompt")
    temperature: float = Field(1.0, gt=0)
    max_tokens: int = Field(1024, ge=1, le=MOST_TOKENS, description="length limit of one sample")
    seeded: bool = Field(False, description="one seed per group: same weights, same samples; slower sampling")


class EvalSampling(Sampling):
    """Sampling for evaluation, where nucleus sampling is allowed."""

    top_p: float = Field(1.0, gt=0, le=1)


class ActorsSpec(Spec):
    """The actors that generate, each owning one vLLM engine."""

    count: int = Field(1, ge=1)
    most: int | None = Field(None, ge=1, description="the run may grow to so many while the learner starves; null: no")
    cpus: float = Field(1, ge=0, description="Ray CPUs an actor reserves")
    gpus: float = Field(0, ge=0, description="Ray GPUs an actor reserves")
    resources: Resources = Field(
        default_factory=dict, description="custom Ray resources an actor reserves: {volley_actor: 1} names its nodes"
    )
    threads: int = Field(1, ge=1, description="OpenMP threads of an engine on CPU")
    max_num_seqs: int = Field(256, ge=1, description="samples an engine runs at once")
    kv_cache_gb: float = Field(1.0, gt=0, description="key-value cache of an engine on CPU")
    engine: dict[str, Any] = Field(default_factory=dict, description="passed through to vLLM's AsyncEngineArgs")
    max_replacements: int = Field(
        3, ge=0, description="actors that may die within an hour and be replaced, their groups made again elsewhere"
    )
    start_deadline_s: float = Field(300, gt=0)
    group_deadline_s: float = Field(600, gt=0, description="longest wait for one group")
    hang_deadline_s: float = Field(
        120, gt=0, description="an actor without a sign of life for so long is replaced; an engine's step takes less"
    )

    @model_validator(mode="after")
    def _engine_has_its_gpus(self) -> Self:
        """All GPUs of an engine are its actor's, on one node: Ray has to reserve as many as vLLM will take."""
        sizes = [self.engine.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
        if not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise ValueError("engine: tensor_parallel_size and pipeline_parallel_size are numbers of GPUs, 1 or more")
        wanted = sizes[0] * sizes[1]
        if wanted > 1 and self.gpus != wanted:
            raise ValueError(
                f"engine: an engine of {sizes[0]} x {sizes[1]} GPUs in an actor that reserves {self.gpus:g}: write "
                f"gpus: {wanted}"
            )
        return self


class RewardWorkersSpec(Spec):
    """The workers that score."""

    count: int = Field(1, ge=1)
    most: int | None = Field(None, ge=1, description="the run may grow to so many while groups wait; null: no")
    cpus: float = Field(0.1, ge=0)
    resources: Resources = Field(default_factory=dict, description="custom Ray resources a worker reserves")
    max_replacements: int = Field(20, ge=0, description="workers that may die within an hour and be replaced")
    start_deadline_s: float = Field(60, gt=0)
    group_deadline_s: float = Field(120, gt=0, description="longest wait for the scores of one group")


class InfraErrorsSpec(Spec):
    """What a run does when scoring itself fails: the samples leave their groups, and too many of them pause it."""

    max_share: float = Field(0.25, gt=0, le=1, description="share of unscored samples above which the run pauses")
    window: int = Field(16, ge=1, description="newest groups the share is taken over")
    probe_every_s: float = Field(30, gt=0, description="longest wait between groups tried while paused")
    give_up_s: float = Field(1800, ge=0, description="a pause that lasts longer ends the run")


class InRunEvaluation(Spec):
    """Evaluation on held-out prompts while training."""

    data: DataSpec
    sampling: EvalSampling = EvalSampling(n=16)
    ks: tuple[int, ...] = Field((1, 2, 4, 8, 16), min_length=1)
    every: int | None = Field(None, ge=1, description="steps between evaluations; null: only at start and end")
    at_start: bool = True

    @model_validator(mode="after")
    def _ks_fit_n(self) -> Self:
        _check_ks(self.ks, self.sampling.n, "evaluation")
        return self


class Broadcast(Spec):
    """How new weights reach the actors."""

    transport: Literal["object_store", "collective"] = Field(
        "object_store",
        description="collective: the learner sends to all engines at once, over NCCL where both have GPUs, over gloo "
        "elsewhere; the object store has each version too, for actors that join or were lost on the way",
    )
    deadline_s: float = Field(30, gt=0, description="bound of each collective; then the object store takes its place")


class CheckpointSpec(Spec):
    """When to write resumable checkpoints."""

    every: int | None = Field(None, ge=1, description="steps between checkpoints; null: only at the end")
    grace_s: float = Field(
        30, ge=0, le=900, description="Ctrl-C, SIGTERM and `volley down` wait so long for a checkpoint; 0: not at all"
    )
    keep: int = Field(2, ge=1, description="newest checkpoints kept")
    keep_every: int | None = Field(
        None, ge=1, description="checkpoints at multiples of so many steps are kept for good"
    )


class _Job(Spec):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    seed: int = Field(0, ge=0, le=2**63 - 1)
    model: ModelSpec
    data: DataSpec
    sinks: tuple[SinkSpec, ...] = Field((), description="where metrics go besides metrics.jsonl")
    runtime_env: RuntimeEnvSpec | None = Field(None, description="what Ray brings to the processes of the run")

    @model_validator(mode="after")
    def _flash_attention_is_narrow(self) -> Self:
        learner = getattr(self, "learner", None)  # of the kinds that train
        if learner is not None and learner.attention == "flash_attention_2" and self.model.dtype == "float32":
            raise ValueError("learner.attention: flash_attention_2 takes no float32: write model.dtype: bfloat16")
        return self


class _Sampled(_Job):
    scorer: ScorerSpec
    actors: ActorsSpec = ActorsSpec()
    reward_workers: RewardWorkersSpec = RewardWorkersSpec()


class RLJob(_Sampled):
    """Reinforcement learning of a k-sample objective."""

    kind: Literal["rl"] = "rl"
    steps: int = Field(ge=1, le=MOST_STEPS)
    prompts_per_step: int = Field(32, ge=1, le=MOST_ROWS, description="P, groups in one batch")
    max_lag: int = Field(
        1, ge=0, le=10_000, description="L, versions a token may be old when trained on; 0 is synchronous"
    )
    sampling: Sampling = Sampling()
    turns: TurnsSpec | None = Field(None, description="samples that fail are shown why and go on; null: one turn")
    objective: Objective
    schedule: Schedule = Field(Schedule(), description="how the objective changes over the run")
    update: PolicyUpdate = PolicyUpdate()
    optimizer: Optimizer = Optimizer()
    learner: LearnerSpec = LearnerSpec()
    broadcast: Broadcast = Broadcast()
    evaluation: InRunEvaluation | None = None
    checkpoint: CheckpointSpec = CheckpointSpec()
    max_dead_batches: int = Field(20, ge=1, description="batches in a row without signal that end the run with advice")
    infra_errors: InfraErrorsSpec = InfraErrorsSpec()
    samples_kept: int = Field(64, ge=0, description="samples written to the excerpt every tenth step")

    @model_validator(mode="after")
    def _objective_fits(self) -> Self:
        check_schedule(self.objective, self.schedule, self.sampling.n)
        for step in (0, *(stage.at for stage in self.schedule.stages)):
            check_update(self.update, resolve(self.objective, self.schedule, step))
        return self

    @model_validator(mode="after")
    def _adapters_travel_alone(self) -> Self:
        if self.model.lora is not None and self.broadcast.transport == "collective":
            raise ValueError(
                "broadcast.transport collective is for whole models, and adapters are merged on the way: write "
                "broadcast: {transport: object_store}, which they are small enough for"
            )
        return self

    @model_validator(mode="after")
    def _ranks_have_groups(self) -> Self:
        if self.learner.ranks > self.prompts_per_step:
            raise ValueError(
                f"learner.ranks {self.learner.ranks} > prompts_per_step {self.prompts_per_step}: a group is never "
                "split over ranks; raise prompts_per_step or lower learner.ranks"
            )
        return self

    @property
    def slots(self) -> int:
        """Groups that may be admitted and not yet trained: this alone bounds the lag."""
        return (self.max_lag + 1) * self.prompts_per_step


class SFTJob(_Job):
    """Supervised fine-tuning: loss on the answer's tokens only."""

    kind: Literal["sft"] = "sft"
    steps: int = Field(ge=1, le=MOST_STEPS)
    rows_per_step: int = Field(128, ge=1, le=MOST_ROWS)
    answer_field: str = "answer"
    optimizer: Optimizer = Optimizer(lr=1e-5)
    learner: LearnerSpec = LearnerSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()


class RFTJob(_Sampled):
    """Rejection sampling fine-tuning: sample every prompt, then train on its correct samples as on supervised rows."""

    kind: Literal["rft"] = "rft"
    sampling: EvalSampling = EvalSampling()
    keep: int = Field(4, ge=1, description="M, samples kept of a prompt at most: correct ones with different texts")
    correct_from: float = Field(1.0, description="reward from which a sample is correct", allow_inf_nan=False)
    steps: int | None = Field(None, ge=1, le=MOST_STEPS, description="steps on the kept samples; or give passes")
    passes: int | None = Field(None, ge=1, le=MOST_ROWS, description="passes over the kept samples; or give steps")
    rows_per_step: int = Field(
        128, ge=1, le=MOST_ROWS, description="kept samples in one batch; all of them where fewer were kept"
    )
    optimizer: Optimizer = Optimizer(lr=1e-5)
    learner: LearnerSpec = LearnerSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.passes is None):
            raise ValueError("give one of steps and passes: it says how long to train on the kept samples")
        return self


class EvalJob(_Sampled):
    """n samples per prompt and unbiased pass@k for each k."""

    kind: Literal["eval"] = "eval"
    sampling: EvalSampling = EvalSampling(n=64)
    turns: TurnsSpec | None = Field(None, description="samples that fail are shown why and go on; null: one turn")
    ks: tuple[int, ...] = Field((1, 2, 4, 8, 16, 32, 64), min_length=1)
    prompts: int | None = Field(None, ge=1, description="take only the first so many prompts")

    @model_validator(mode="after")
    def _trains_nothing(self) -> Self:
        if self.model.lora is not None:
            raise ValueError("an eval job trains no adapter: drop model.lora, and give model.path the merged model")
        return self

    @model_validator(mode="after")
    def _ks_fit_n(self) -> Self:
        _check_ks(self.ks, self.sampling.n, "the job")
        return self


def _check_ks(ks: tuple[int, ...], n: int, where: str) -> None:
    bad = [k for k in ks if not 1 <= k <= n]
    if bad:
        way_out = f"raise sampling.n to {max(ks)} or drop them" if max(ks) > n else "drop them"
        raise ValueError(f"ks {bad} of {where} are not in 1..n={n}: {way_out}")


JobSpec = Annotated[RLJob | SFTJob | RFTJob | EvalJob, Field(discriminator="kind")]
JOB: TypeAdapter[RLJob | SFTJob | RFTJob | EvalJob] = TypeAdapter(JobSpec)
