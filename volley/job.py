"""JobSpec, the configuration of a job. ``volley schema`` prints it as JSON Schema.

RLJob     reinforcement learning with a k-sample objective
SFTJob    supervised fine-tuning on prompt/answer rows
RFTJob    rejection sampling: n samples per prompt, then supervised fine-tuning on the correct ones
EvalJob   n samples per prompt, unbiased pass@k for a list of k
"""

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from volley.base import MOST_AMOUNT, MOST_PROCESSES, Resources, Spec
from volley.data import DataSpec, check_held_out
from volley.gateway import GatewaySpec
from volley.model import ModelSpec
from volley.needed_scores import check_scorer
from volley.objectives import Objective, OverTries, Schedule, check_schedule, resolve
from volley.objectives.tries import Terms, WeightOfK, terms_of
from volley.patterns import NAME
from volley.placement import Placement, check_placement
from volley.rollout import EnvironmentWorkersSpec, Rollout, check_tools
from volley.runtime_env import RuntimeEnvSpec
from volley.sampling import EvalSampling, TrainingSampling, check_refill, check_selection
from volley.scoring import ScorerSpec
from volley.sinks import SinkSpec
from volley.turns import TurnsSpec
from volley.update import LearnerSpec, Optimizer, PolicyOptimizer, PolicyUpdate, check_update
from volley.webhooks import WebhookSpec, check_webhooks

# Limits far beyond any run. Above them, counters overflow or a typing error fills the memory.
MOST_STEPS = 10**9
MOST_ROWS = 10**6  # per batch


class ActorsSpec(Spec):
    """The actors that generate samples, each with its own vLLM engine."""

    renamed_keys: ClassVar[dict[str, str]] = {"most": "max_count"}

    count: int = Field(1, ge=1, le=MOST_PROCESSES)
    max_count: int | None = Field(
        None,
        ge=1,
        le=MOST_PROCESSES,
        description="autoscaling limit while the learner waits for groups; null disables it",
    )
    cpus: float = Field(1, ge=0, le=MOST_AMOUNT, description="Ray CPUs per actor")
    gpus: float = Field(0, ge=0, le=MOST_AMOUNT, description="Ray GPUs per actor")
    resources: Resources = Field(
        default_factory=dict, description="custom Ray resources per actor: {volley_actor: 1} selects its nodes"
    )
    threads: int = Field(1, ge=1, description="OpenMP threads per engine on CPU")
    max_num_seqs: int = Field(256, ge=1, description="samples an engine runs at once")
    kv_cache_gb: float = Field(
        1.0,
        gt=0,
        description="key-value cache per engine on CPU or part of a GPU; whole GPUs use engine.gpu_memory_utilization",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="passed on to vLLM's AsyncEngineArgs")
    max_replacements: int = Field(
        3, ge=0, description="limit on actors replaced within an hour; their groups are generated again"
    )
    start_deadline_s: float = Field(300, gt=0)
    group_deadline_s: float = Field(600, gt=0, description="longest wait for one group")
    hang_deadline_s: float = Field(
        120, gt=0, description="an actor silent for this long is replaced; must exceed an engine's longest step"
    )

    @model_validator(mode="after")
    def _engine_has_its_gpus(self) -> Self:
        """All GPUs of an engine belong to its actor, so Ray must reserve as many as vLLM will use."""
        sizes = [self.engine.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
        if not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise ValueError("engine: tensor_parallel_size and pipeline_parallel_size must be integers of at least 1")
        needed = sizes[0] * sizes[1]
        if max(needed, self.gpus) > 1 and self.gpus != needed:
            more = f", or engine: {{tensor_parallel_size: {math.ceil(self.gpus)}}}" if needed == 1 else ""
            raise ValueError(
                f"engine: the engine uses {sizes[0]} x {sizes[1]} GPUs but its actor reserves {self.gpus:g}: write "
                f"gpus: {needed}{more}"
            )
        return self


class RewardWorkersSpec(Spec):
    """The workers that score samples."""

    renamed_keys: ClassVar[dict[str, str]] = {"most": "max_count"}

    count: int = Field(1, ge=1, le=MOST_PROCESSES)
    max_count: int | None = Field(
        None, ge=1, le=MOST_PROCESSES, description="autoscaling limit while groups wait for a worker; null disables it"
    )
    cpus: float = Field(0.1, ge=0, le=MOST_AMOUNT)
    resources: Resources = Field(default_factory=dict, description="custom Ray resources per worker")
    max_replacements: int = Field(20, ge=0, description="limit on workers replaced within an hour")
    start_deadline_s: float = Field(60, gt=0)
    group_deadline_s: float = Field(120, gt=0, description="longest wait for the scores of one group")


class InfraErrorsSpec(Spec):
    """What a run does when scoring itself fails. Too many unscored samples pause the run."""

    max_share: float = Field(0.25, gt=0, le=1, description="share of unscored samples above which the run pauses")
    window: int = Field(16, ge=1, description="number of latest groups that share is computed over")
    probe_every_s: float = Field(30, gt=0, description="longest wait between scoring attempts while paused")
    give_up_s: float = Field(1800, ge=0, description="a longer pause ends the run")


class InRunEvaluation(Spec):
    """Evaluation on held-out prompts during training."""

    data: DataSpec
    sampling: EvalSampling = EvalSampling(n=16)
    ks: tuple[int, ...] = Field((1, 2, 4, 8, 16), min_length=1)
    weights: WeightOfK | None = Field(
        None, description="also report the mean of pass@k over k with these weights; null: the objective's, if any"
    )
    every: int | None = Field(None, ge=1, description="steps between evaluations; null: only start and end")
    at_start: bool = True

    @model_validator(mode="after")
    def _ks_fit_n(self) -> Self:
        _check_ks(self.ks, self.sampling.n, "evaluation")
        _check_ks(tuple(self.weights or ()), self.sampling.n, "evaluation", "weights")
        return self


class Broadcast(Spec):
    """How new weights reach the actors."""

    transport: Literal["object_store", "collective", "shared_memory"] = Field(
        "object_store",
        description="collective: the learner sends to all engines at once, by NCCL if both have GPUs, else gloo; late "
        "or failed actors fetch from the object store. shared_memory: colocated engines read the learner's memory",
    )
    deadline_s: float = Field(30, gt=0, description="limit of a collective, after which the object store is used")


class CheckpointSpec(Spec):
    """When to write checkpoints."""

    every: int | None = Field(25, ge=1, description="steps between checkpoints; null: only at the end")
    grace_s: float = Field(
        30,
        ge=0,
        le=900,
        description="how long Ctrl-C, SIGTERM, SIGHUP and `volley down` wait for a checkpoint; 0 disables it",
    )
    keep: int = Field(2, ge=1, description="number of latest checkpoints to keep")
    keep_every: int | None = Field(None, ge=1, description="also keep checkpoints at multiples of this step count")
    background: bool = Field(
        True,
        description="copy the state, 12 bytes per trained parameter, and write the copy while training goes on, where "
        "the host's memory has room for it",
    )


class _Job(Spec):
    name: str = Field(pattern=NAME)
    seed: int = Field(0, ge=0, le=2**63 - 1)
    model: ModelSpec
    data: DataSpec
    sinks: tuple[SinkSpec, ...] = Field((), description="where metrics go besides metrics.jsonl")
    notify: tuple[WebhookSpec, ...] = Field(
        (), max_length=16, description="servers that hear of the run's end, pauses and troubles"
    )
    runtime_env: RuntimeEnvSpec | None = Field(None, description="code and settings Ray ships to the run's processes")

    @model_validator(mode="after")
    def _flash_attention_has_its_dtype(self) -> Self:
        learner = getattr(self, "learner", None)  # only some kinds of job train
        if learner is not None and learner.attention == "flash_attention_2" and self.model.dtype == "float32":
            raise ValueError("learner.attention: flash_attention_2 has no float32: write model.dtype: bfloat16")
        return self

    @model_validator(mode="after")
    def _rules_are_about_what_is_reported(self) -> Self:
        ks = getattr(getattr(self, "evaluation", self), "ks", None)  # of an eval job, or of the evaluations of another
        check_webhooks(self.notify, getattr(self, "kind", ""), ks)
        return self


class _Sampled(_Job):
    scorer: ScorerSpec | None = Field(None, description="required, unless a program returns the rewards")
    actors: ActorsSpec = ActorsSpec()
    reward_workers: RewardWorkersSpec = RewardWorkersSpec()

    @model_validator(mode="after")
    def _has_rewards(self) -> Self:
        if self.scorer is None and getattr(self, "rollout", None) is None:
            raise ValueError("scorer: required, but missing")
        return self


class _WithEpisodes(_Sampled):
    rollout: Rollout | None = Field(None, description="a program makes each sample; null: one call does")
    environment_workers: EnvironmentWorkersSpec = EnvironmentWorkersSpec()
    gateway: GatewaySpec = GatewaySpec()

    @model_validator(mode="after")
    def _episodes_fit(self) -> Self:
        if self.rollout is None:
            return self
        if getattr(self, "turns", None) is not None:
            raise ValueError("turns and rollout exclude each other: a program makes its own turns; remove turns")
        plans = [getattr(self, "sampling", None), getattr(getattr(self, "evaluation", None), "sampling", None)]
        most, room = max(plan.n for plan in plans if plan is not None), self.environment_workers.episodes
        if most > room:
            raise ValueError(
                f"environment_workers.episodes {room} < sampling.n {most}: the episodes of a group run on one worker; "
                f"write environment_workers: {{episodes: {most}}}"
            )
        held = getattr(getattr(self, "evaluation", None), "data", self.data)
        chat = any(part.chat for data in (self.data, held) for part in (data, *data.sources))
        parser = self.gateway.tool_parser
        check_tools(self.rollout, scored=self.scorer is not None, parser=parser, chat=chat, episodes=room)
        return self


class _WithTurns(_WithEpisodes):
    turns: TurnsSpec | None = Field(None, description="failed samples observe why and continue; null: one turn")


class RLJob(_WithTurns):
    """Reinforcement learning with a k-sample objective."""

    kind: Literal["rl"] = "rl"
    steps: int = Field(ge=1, le=MOST_STEPS)
    prompts_per_step: int = Field(32, ge=1, le=MOST_ROWS, description="P, groups per batch")
    max_lag: int = Field(
        1, ge=0, le=10_000, description="L, how many versions old a trained token may be; 0 is synchronous"
    )
    sampling: TrainingSampling = TrainingSampling()
    objective: Objective
    schedule: Schedule = Field(Schedule(), description="how the objective changes during the run")
    update: PolicyUpdate = PolicyUpdate()
    optimizer: PolicyOptimizer = PolicyOptimizer()
    learner: LearnerSpec = LearnerSpec()
    placement: Placement = Field(
        "separate",
        description="colocated: actors and learner take turns on the same devices, and give their memory back between",
    )
    broadcast: Broadcast = Broadcast()
    evaluation: InRunEvaluation | None = None
    checkpoint: CheckpointSpec = CheckpointSpec()
    max_dead_batches: int = Field(20, ge=1, description="consecutive batches without signal after which the run ends")
    infra_errors: InfraErrorsSpec = InfraErrorsSpec()
    samples_kept: int = Field(64, ge=0, description="samples logged every tenth step")

    @model_validator(mode="after")
    def _evaluation_is_held_out(self) -> Self:
        if self.evaluation is not None:
            check_held_out(self.data, self.evaluation.data)
        return self

    @model_validator(mode="after")
    def _objective_fits(self) -> Self:
        check_schedule(self.objective, self.schedule, self.sampling.n)
        for step in self.schedule.turning_points:
            objective = resolve(self.objective, self.schedule, step)
            check_update(self.update, objective)
            check_scorer(self.scorer, objective, has_program=self.rollout is not None)
        return self

    @model_validator(mode="after")
    def _sampling_fits(self) -> Self:
        check_refill(self.sampling, self.prompts_per_step, self.update)
        check_selection(self.sampling, self.schedule)
        return self

    @model_validator(mode="after")
    def _adapters_use_the_object_store(self) -> Self:
        if self.model.lora is not None and (transport := self.broadcast.transport) != "object_store":
            raise ValueError(
                f"broadcast.transport: {transport} cannot carry adapters, which actors merge on arrival: write "
                "broadcast: {transport: object_store}"
            )
        return self

    @model_validator(mode="after")
    def _devices_can_be_shared(self) -> Self:
        check_placement(self)
        return self

    @model_validator(mode="after")
    def _ranks_have_groups(self) -> Self:
        spec = self.learner
        if spec.sequence_groups > self.prompts_per_step:
            split = f" / sequence_parallel {spec.sequence_parallel}" if spec.sequence_parallel > 1 else ""
            raise ValueError(
                f"learner.ranks {spec.ranks}{split} > prompts_per_step {self.prompts_per_step}: a group is never "
                "split over ranks; raise prompts_per_step or lower learner.ranks"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_reaches_the_weights(self) -> Self:
        if self.evaluation is None or not self.evaluated_terms:
            return self
        largest, n = self.evaluated_terms[-1][0], self.evaluation.sampling.n
        if largest > n:
            raise ValueError(
                f"evaluation: the objective's weights reach k={largest}, but evaluation.sampling.n is {n}: raise it to "
                f"{largest} or write evaluation.weights, such as {{1: 0.5, {n}: 0.5}}"
            )
        return self

    @property
    def evaluated_terms(self) -> Terms:
        """The k and weights of the evaluation's weighted mean: its own, else the objective's; () for none."""
        if self.evaluation is not None and self.evaluation.weights is not None:
            return terms_of(None, self.evaluation.weights, None)
        weighted = isinstance(self.objective, OverTries) and self.objective.weights is not None
        return self.objective.terms if weighted else ()  # type: ignore[union-attr]

    @property
    def slots(self) -> int:
        """Groups that may be admitted but not yet trained on. This alone bounds the lag."""
        return (self.max_lag + 1) * self.prompts_per_step


class SFTJob(_Job):
    """Supervised fine-tuning, with loss on the answer's tokens and the end token, which is appended to it."""

    kind: Literal["sft"] = "sft"
    steps: int = Field(ge=1, le=MOST_STEPS)
    rows_per_step: int = Field(128, ge=1, le=MOST_ROWS)
    answer_field: str = "answer"
    optimizer: Optimizer = Optimizer(lr=1e-5)
    learner: LearnerSpec = LearnerSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()


class RFTJob(_WithEpisodes):
    """Rejection sampling: sample every prompt, then fine-tune on the correct samples."""

    kind: Literal["rft"] = "rft"
    sampling: EvalSampling = EvalSampling()
    keep: int = Field(
        4,
        ge=1,
        description="M, limit on correct samples kept per prompt; samples in which the model says the same count once",
    )
    correct_from: float = Field(1.0, description="lowest reward of a correct sample", allow_inf_nan=False)
    steps: int | None = Field(None, ge=1, le=MOST_STEPS, description="steps on the kept samples, unless passes is set")
    passes: int | None = Field(None, ge=1, le=MOST_ROWS, description="passes over them, unless steps is set")
    rows_per_step: int = Field(
        128, ge=1, le=MOST_ROWS, description="kept samples per batch; if fewer were kept, all of them"
    )
    optimizer: Optimizer = Optimizer(lr=1e-5)
    learner: LearnerSpec = LearnerSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.passes is None):
            raise ValueError("set exactly one of steps and passes: how long to train on the kept samples")
        return self


class EvalJob(_WithTurns):
    """n samples per prompt and unbiased pass@k for each k."""

    kind: Literal["eval"] = "eval"
    sampling: EvalSampling = EvalSampling(n=64)
    ks: tuple[int, ...] = Field((1, 2, 4, 8, 16, 32, 64), min_length=1)
    weights: WeightOfK | None = Field(None, description="also report the mean of pass@k over k with these weights")
    prompts: int | None = Field(None, ge=1, description="limit on prompts; the first are used")
    version: int = Field(0, ge=0, description="number of steps the model was trained for, which the evaluation states")

    @model_validator(mode="after")
    def _trains_nothing(self) -> Self:
        if self.model.lora is not None:
            raise ValueError("an eval job trains no adapters: remove model.lora and set model.path to a merged model")
        return self

    @model_validator(mode="after")
    def _ks_fit_n(self) -> Self:
        _check_ks(self.ks, self.sampling.n, "the job")
        _check_ks(tuple(self.weights or ()), self.sampling.n, "the job", "weights")
        return self


def _check_ks(ks: tuple[int, ...], n: int, where: str, key: str = "ks") -> None:
    bad = [k for k in ks if not 1 <= k <= n]
    if bad:
        advice = f"raise sampling.n to {max(ks)} or remove them" if max(ks) > n else "remove them"
        raise ValueError(f"{key} {bad} of {where} are not in 1..n={n}: {advice}")


JobSpec = Annotated[RLJob | SFTJob | RFTJob | EvalJob, Field(discriminator="kind")]
JOB: TypeAdapter[RLJob | SFTJob | RFTJob | EvalJob] = TypeAdapter(JobSpec)
