"""What to change first: each candidate is planned anew, and the sentences quote the difference."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from pydantic import ValidationError

from volley.base import replaced
from volley.job import RLJob
from volley.plan.machine import GIB
from volley.plan.memory import DEFAULT_UTILIZATION, gib, gpus_of, offloads_optimizer, shares_gpu, takes_turns
from volley.plan.report import Plan, plan_of_change
from volley.plan.split import apart, apart_text, with_counts
from volley.plan.stages import samples_per_step
from volley.shape import BF16, WIDTHS, micro_batch_tokens

WORTH = 1.03  # a change that gains less than this factor is not advised
MOST_TENSOR_PARALLEL = 8


@dataclass(frozen=True, slots=True)
class Change:
    """A change to a job.

    Attributes:
        text: what to write into the job file.
    """

    text: str
    job: RLJob


def _change(text: str, make: Callable[[], RLJob]) -> Change | None:
    """The change to the job that ``make`` returns; None if that would be no valid job."""
    try:
        return Change(text, make())
    except ValidationError:
        return None


def _to_learner(job: RLJob, text: str, **changes: object) -> Change | None:
    """The change of some of the learner's keys; None if that would make no valid job."""
    return _change(text, lambda: replaced(job, learner=replaced(job.learner, **changes)))


def advise(plan: Plan) -> str:
    """One or two sentences: what makes the job fit, or what makes it faster."""
    memory = plan.memory
    if not memory.problems:
        return _to_gain(plan)
    problem = f"does not fit: {'; '.join(memory.problems)}."
    if memory.rank > memory.rank_room:
        return f"{problem} {_to_fit_rank(plan)}"
    if memory.cache_tokens < memory.row_tokens or memory.actor > memory.actor_room:
        return f"{problem} {_to_fit_actor(plan)}"
    return f"{problem} Use hosts with more memory, or a smaller actors.kv_cache_gb or learner.tokens_per_micro_batch."


# ---- memory ------------------------------------------------------------------------------------------------------


def _fewer_tokens(plan: Plan, job: RLJob) -> Change | None:
    row = plan.memory.row_tokens
    if plan.memory.micro_batch <= row:
        return None
    return _to_learner(job, f"learner.tokens_per_micro_batch: {row}", tokens_per_micro_batch=row)


def _checkpointing(plan: Plan, job: RLJob) -> Change | None:
    if job.learner.gradient_checkpointing:
        return None
    return _to_learner(job, "learner.gradient_checkpointing: true", gradient_checkpointing=True)


def _more_ranks(plan: Plan, job: RLJob) -> Change | None:
    """As many ranks as there are GPUs and prompts for."""
    if shares_gpu(job) or not job.learner.gpus_per_rank:
        return None
    free = plan.hardware.gpus - job.actors.count * job.actors.gpus
    ranks = min(job.prompts_per_step, int(free / job.learner.gpus_per_rank + 1e-9))
    if ranks <= job.learner.ranks:
        return None
    return _change(f"learner.ranks: {ranks}", lambda: with_counts(job, job.actors.count, ranks))


def _offloading(plan: Plan, job: RLJob) -> Change | None:
    if offloads_optimizer(job) or not job.learner.gpus_per_rank:
        return None
    zero = {**job.learner.deepspeed.get("zero_optimization", {}), "offload_optimizer": {"device": "cpu"}}
    text = "learner.deepspeed.zero_optimization.offload_optimizer.device: cpu"
    return _to_learner(job, text, deepspeed={**job.learner.deepspeed, "zero_optimization": zero})


_SMALLER: tuple[Callable[[Plan, RLJob], Change | None], ...] = (
    _fewer_tokens,
    _checkpointing,
    _more_ranks,
    _offloading,
)


def _to_fit_rank(plan: Plan) -> str:
    """The first change after which a rank fits; if none suffices alone, the first several that do."""
    for make in _SMALLER:
        change = make(plan, plan.job)
        if change is not None and (saved := _saved(plan, change.job)) is not None:
            return f"{change.text} saves {saved} per rank, which suffices."
    job, texts = plan.job, list[str]()
    for make in _SMALLER:
        change = make(plan, job)
        if change is None:
            continue
        job, texts = change.job, [*texts, change.text]
        if (saved := _saved(plan, job)) is not None:
            return f"{', '.join(texts)} together save {saved} per rank, which suffices."
    return "Use GPUs with more memory, more of them for the learner, or a shorter sampling.max_tokens."


def _saved(plan: Plan, job: RLJob) -> str | None:
    """What ``job`` saves per rank, if it then fits."""
    after = plan_of_change(plan, job).memory
    return f"{gib(plan.memory.rank - after.rank)} GiB" if after.rank <= after.rank_room else None


def _to_fit_actor(plan: Plan) -> str:
    job, memory = plan.job, plan.memory
    if job.actors.gpus < 1:
        if memory.cache_tokens < memory.row_tokens:
            row = memory.row_tokens * plan.shape.kv_bytes * WIDTHS[job.model.dtype] / BF16
            return f"A whole sample needs actors.kv_cache_gb: {math.ceil(100 * row / GIB) / 100:g}."
        return "Lower actors.kv_cache_gb, or give the actor a GPU of its own: actors.gpus: 1."
    for change in _larger_caches(plan):
        after = plan_of_change(plan, change.job).memory
        if after.cache_tokens >= after.row_tokens and after.actor <= after.actor_room:
            return f"{change.text} suffices."
    return "Use GPUs with more memory, or a shorter sampling.max_tokens."


def _larger_caches(plan: Plan) -> Iterator[Change]:
    """Changes that give an engine a larger part of its GPUs, or more GPUs, as far as there are any and heads divide."""
    job = plan.job
    actors, engine = job.actors, job.actors.engine
    if engine.get("gpu_memory_utilization", DEFAULT_UTILIZATION) < DEFAULT_UTILIZATION:
        more = {**engine, "gpu_memory_utilization": DEFAULT_UTILIZATION}
        text = f"actors.engine.gpu_memory_utilization: {DEFAULT_UTILIZATION}"
        yield Change(text, replaced(job, actors=replaced(actors, engine=more)))
    size = 2 * math.ceil(actors.gpus)
    while size <= MOST_TENSOR_PARALLEL and plan.shape.num_attention_heads % size == 0:
        wider = {**engine, "tensor_parallel_size": size, "pipeline_parallel_size": 1}
        changed = replaced(job, actors=replaced(actors, gpus=size, engine=wider))
        if gpus_of(changed) <= plan.hardware.gpus:
            yield Change(f"actors.gpus: {size} with actors.engine: {{tensor_parallel_size: {size}}}", changed)
        size *= 2


# ---- speed -------------------------------------------------------------------------------------------------------


def _to_gain(plan: Plan) -> str:
    """The change to the job that gains most on this hardware, or what more hardware would gain."""
    before, bounds = plan.samples_per_second, _what_bounds(plan)
    changes = [(plan_of_change(plan, each.job), each.text) for each in _faster(plan) if each]
    fitting = [(changed.samples_per_second, text) for changed, text in changes if changed.fits]
    after, text = max(fitting, default=(0.0, ""))
    if after >= before * WORTH:
        return f"{bounds}: {text} raises samples/s from {before:.3g} to {after:.3g}."
    more = [f"{text} to {rate:.3g}" for text, rate in _with_more(plan) if rate >= before * WORTH]
    if more:
        return f"{bounds}. On more GPUs, {' and '.join(more)} would raise samples/s from {before:.3g}."
    return f"{bounds}. No single change to the job's counts or options gains {WORTH - 1:.0%}."


def _what_bounds(plan: Plan) -> str:
    stages, lag = plan.stages, plan.job.max_lag
    if lag and stages.step > 1.001 * sum(stages.seconds.values()) / (lag + 1):
        both = takes_turns(plan.job) and stages.step > 1.001 * max(stages.seconds.values())
        return "generation and training take turns" if both else f"{_NOUNS[stages.bounds]} bounds"
    return f"max_lag {lag} bounds, and of the stages {_NOUNS[stages.bounds]} is the slowest"


_NOUNS = {"generate": "generation", "score": "scoring", "train": "training", "publish": "publishing"}


def _faster(plan: Plan) -> Iterator[Change | None]:
    """Changes that this hardware allows, and None for those that the job does not."""
    job, split = plan.job, plan.split
    if split is not None and (not shares_gpu(job) or plan.hardware.gpus > 1):
        whole = f"{apart_text(job)}," if shares_gpu(job) else ""
        counts = f"actors.count: {split.actors} with learner.ranks: {split.ranks}{whole}"
        yield _change(counts, lambda: with_counts(apart(job), split.actors, split.ranks))
    yield _change(f"max_lag: {job.max_lag + 1}", lambda: replaced(job, max_lag=job.max_lag + 1))
    if (workers := _workers_that_keep_up(plan)) > (scoring := job.reward_workers).count:
        counted = partial(replaced, scoring, count=workers, max_count=None)
        yield _change(f"reward_workers.count: {workers}", lambda: replaced(job, reward_workers=counted()))
    separate = job.placement == "separate"
    if separate and (broadcast := job.broadcast).transport == "object_store" and job.model.lora is None:
        directly = partial(replaced, broadcast, transport="collective")
        yield _change("broadcast.transport: collective", lambda: replaced(job, broadcast=directly()))
    for factor in (2, 4, 8):  # fewer micro-batches: fewer exchanges between the ranks
        tokens = factor * micro_batch_tokens(job.learner, plan.shape, WIDTHS[job.model.dtype])
        yield _to_learner(job, f"learner.tokens_per_micro_batch: {tokens}", tokens_per_micro_batch=tokens)
    if job.learner.gradient_checkpointing:
        yield _to_learner(job, "learner.gradient_checkpointing: false", gradient_checkpointing=False)


def _workers_that_keep_up(plan: Plan) -> int:
    """Reward workers with which scoring is no slower than the slowest of the other stages."""
    others = max(seconds for stage, seconds in plan.stages.seconds.items() if stage != "score")
    return math.ceil(samples_per_step(plan.job) * plan.load.score_seconds / others)


def _with_more(plan: Plan) -> Iterator[tuple[str, float]]:
    """What one more actor, and twice the ranks, would give on that many more GPUs."""
    job = plan.job
    if shares_gpu(job) or not job.actors.gpus:
        return
    choices = [("one more actor", job.actors.count + 1, job.learner.ranks)]
    if 2 * job.learner.ranks <= job.prompts_per_step:
        choices.append(("twice the ranks", job.actors.count, 2 * job.learner.ranks))
    for text, actors, ranks in choices:
        changed = with_counts(job, actors, ranks)
        hardware = replaced(plan.hardware, gpus=max(plan.hardware.gpus, math.ceil(gpus_of(changed))))
        larger = Plan(plan.job, plan.shape, hardware, plan.load, plan.memory, plan.stages, None)
        after = plan_of_change(larger, changed)
        if after.fits:
            yield text, after.samples_per_second
