"""Memory of a job: per learner rank, per GPU of an actor, and on a host."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from volley.errors import JobError
from volley.hub import hub_model
from volley.job import RLJob
from volley.model import ModelSpec
from volley.plan.machine import GIB, Hardware
from volley.shape import BF16, FP32, WIDTHS, Shape, micro_batch_tokens

RANK_OVERHEAD = 5 * GIB  # CUDA context, NCCL buffers, layers that ZeRO-3 has gathered (1e9 parameters at most)
ENGINE_OVERHEAD = 5 * GIB  # per GPU of an engine: activations, CUDA graphs
RANK_BYTES, ACTOR_BYTES = int(0.9 * GIB), int(1.6 * GIB)  # of idle processes on a CPU, measured, without the model
DEFAULT_UTILIZATION = 0.92  # vLLM's gpu_memory_utilization
STORED_VERSIONS = 2  # in a node's object store: the one in use and the one being sent
FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})  # model_type
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def shape_of(model: ModelSpec, near: Path, config: Path | None = None) -> Shape:
    """The shape of ``model``, from ``config``, its own ``config.json``, or ``models/NAME.json`` in the folder ``near``.

    Raises:
        JobError: there is no such file, or it describes no dense decoder of the Llama family.
    """
    file = config or _config_file(model, near)
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise JobError(f"{file} is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise JobError(f"{file} must be a mapping, as a model's config.json is")
    if any(tree.get(name) for name in EXPERTS):
        raise JobError(f"{file} describes a mixture of experts, for which there are no formulas")
    if (kind := tree.get("model_type")) is not None and kind not in FAMILY:
        raise JobError(f"{file} has the model_type {kind!r}: the formulas are for {', '.join(sorted(FAMILY))}")
    try:
        return Shape.of_config(tree)
    except ValueError as error:
        raise JobError(f"{file}: {error}") from error
    except KeyError as error:
        raise JobError(
            f"{file} has no {error.args[0]}: the formulas are for decoders of the Llama family (Llama, Qwen, Mistral)"
        ) from error


def _config_file(model: ModelSpec, near: Path) -> Path:
    name = model.name.rpartition("/")[2]
    beside = near / "models" / f"{name.lower()}.json"
    if model.path is not None and (model.path / "config.json").exists():
        return model.path / "config.json"
    if beside.exists():
        return beside
    if model.hub is not None:
        return hub_model(model.hub, model.revision, ("config.json",)) / "config.json"
    raise JobError(
        f"model.path: {model.path} has no config.json: pass the model's with --config FILE, or copy it to {beside}"
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a job in bytes.

    Attributes:
        parameters, trained: numbers of parameters; ``trained`` are the adapters' with LoRA.
        state, offloaded, reference, activations, rank: per learner rank: weights, gradients and AdamW's states on the
            device and on the host; the starting policy; a micro-batch of ``micro_batch`` tokens; all on the device.
        rank_room: what a rank may take on its GPU; infinite on a CPU.
        weights, actor: per GPU of an actor: the model, and everything.
        actor_room: what an actor may take there.
        cache, cache_tokens: of one engine.
        row_tokens: the longest prompt with its sample.
        published: of one version of what is sent to the actors.
        host: of one node's host; on a CPU, of all processes.
        host_room: what the host has; infinite if that is not known.
    """

    parameters: int
    trained: int
    state: float
    offloaded: float
    reference: float
    activations: float
    micro_batch: int
    rank: float
    rank_room: float
    weights: float
    actor: float
    actor_room: float
    cache: float
    cache_tokens: int
    row_tokens: int
    published: int
    host: float
    host_room: float

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not fit, one phrase each; () if the job fits."""
        found = []
        if self.rank > self.rank_room:
            found.append(f"a learner rank needs {gib(self.rank)} of {gib(self.rank_room)} GiB")
        if self.cache_tokens < self.row_tokens:
            found.append(f"an actor's cache holds {self.cache_tokens} tokens and one sample has {self.row_tokens}")
        elif self.actor > self.actor_room:
            found.append(f"an actor needs {gib(self.actor)} of {gib(self.actor_room)} GiB")
        if self.host > self.host_room:
            found.append(f"a host needs {gib(self.host)} of {gib(self.host_room)} GiB")
        return tuple(found)


def gib(count: float) -> str:
    """Bytes as GiB with one decimal."""
    return f"{count / GIB:.1f}"


def memory_of(job: RLJob, shape: Shape, hardware: Hardware, prompt_tokens: int) -> Memory:
    """The memory that ``job`` needs.

    Args:
        prompt_tokens: tokens of a prompt.
    """
    width, ranks, lora = WIDTHS[job.model.dtype], job.learner.ranks, job.model.lora
    row = prompt_tokens + longest_sample(job, prompt_tokens)
    trained = shape.parameters if lora is None else shape.adapters(lora)
    states = state_bytes(width)
    frozen = 0 if lora is None else shape.parameters * width  # ``states`` already includes the trained weights
    offloaded = _offloaded_bytes(job, width)
    on_host = trained * offloaded + (frozen if _offloads(job, "offload_param") else 0)
    state = (trained * states + frozen - on_host) / ranks
    reference = shape.parameters * width / ranks if job.update.kl.wanted and lora is None else 0.0
    kept = shape.kept_bytes(width, checkpointed=job.learner.gradient_checkpointing)
    micro = max(row, micro_batch_tokens(job.learner, shape, width))
    on_gpu = hardware.device.gpu
    rank = state + reference + micro * kept + (RANK_OVERHEAD if on_gpu else RANK_BYTES)

    gpus = max(1, math.ceil(job.actors.gpus))
    weights = shape.parameters * width / gpus
    overhead = ENGINE_OVERHEAD if on_gpu else ACTOR_BYTES
    room = hardware.device.memory_gib * GIB
    cache = _cache(job, room, weights + overhead)
    actor = weights + overhead + cache / gpus
    published = trained * width
    host = STORED_VERSIONS * published + on_host / ranks * _ranks_on_a_node(job, hardware)
    if not on_gpu:
        host += ranks * rank + job.actors.count * actor
    return Memory(
        parameters=shape.parameters,
        trained=trained,
        state=state,
        offloaded=on_host / ranks,
        reference=reference,
        activations=float(micro * kept),
        micro_batch=micro,
        rank=rank,
        rank_room=_rank_room(job, room, actor) if on_gpu else math.inf,
        weights=weights,
        actor=actor,
        actor_room=room if on_gpu else math.inf,
        cache=cache,
        cache_tokens=int(cache / cached_bytes(shape, width, gpus)),
        row_tokens=row,
        published=published,
        host=host,
        host_room=_host_room(hardware),
    )


def cached_bytes(shape: Shape, width: int, gpus: int) -> float:
    """Bytes of key-value cache per token, on all GPUs of an engine; each keeps at least one key-value head."""
    return shape.kv_bytes * width / BF16 * max(1.0, gpus / shape.num_key_value_heads)


def state_bytes(width: int) -> int:
    """Bytes per trained parameter: weight, fp32 gradient and two moments; in bfloat16 also an fp32 master copy."""
    return width + FP32 + 2 * FP32 + (FP32 if width == BF16 else 0)


def longest_sample(job: RLJob, prompt_tokens: int) -> int:
    """Most tokens that may follow a prompt: all turns of a sample, or all of an episode, with what it observes."""
    most = job.sampling.max_tokens
    if job.turns is not None:
        return job.turns.room(most)
    context = None if job.rollout is None else job.rollout.max_context
    return most if context is None else max(most, context - prompt_tokens)


def shares_gpu(job: RLJob) -> bool:
    """Whether an actor takes a part of a GPU, and a learner rank the rest."""
    return job.actors.gpus % 1 > 0


def takes_turns(job: RLJob) -> bool:
    """Whether actors and learner never work at the same time, because they share a GPU or `placement` says so."""
    return shares_gpu(job) or job.placement == "colocated"


def gpus_of(job: RLJob) -> float:
    """GPUs that ``job`` reserves."""
    return job.actors.count * job.actors.gpus + job.learner.ranks * job.learner.gpus_per_rank


def _cache(job: RLJob, room: float, taken: float) -> float:
    """Bytes of an engine's key-value cache; ``taken`` are those of weights and overhead on each of its GPUs."""
    if job.actors.gpus < 1:
        return job.actors.kv_cache_gb * GIB
    utilization = float(job.actors.engine.get("gpu_memory_utilization", DEFAULT_UTILIZATION))
    return max(0.0, utilization * room - taken) * math.ceil(job.actors.gpus)


def _rank_room(job: RLJob, room: float, actor: float) -> float:
    """Bytes that a rank may take on its GPU, which it may share with an actor."""
    if job.placement == "colocated":  # the engine gives all back but its overhead
        return room - ENGINE_OVERHEAD
    return room - actor if shares_gpu(job) else room


def _host_room(hardware: Hardware) -> float:
    """Bytes that a host has; infinite if that is not known."""
    if hardware.host_gib is not None:
        return hardware.host_gib * GIB
    return math.inf if hardware.device.gpu else hardware.device.memory_gib * GIB


def _ranks_on_a_node(job: RLJob, hardware: Hardware) -> int:
    share = job.learner.gpus_per_rank
    return min(job.learner.ranks, int(hardware.gpus_per_node / share + 1e-9)) if share else job.learner.ranks


def _offloads(job: RLJob, part: str) -> bool:
    zero = job.learner.deepspeed.get("zero_optimization", {})
    return bool((zero.get(part) or {}).get("device") == "cpu")


def offloads_optimizer(job: RLJob) -> bool:
    """Whether AdamW's states are kept on the host."""
    return _offloads(job, "offload_optimizer")


def _offloaded_bytes(job: RLJob, width: int) -> int:
    """Bytes per parameter that DeepSpeed keeps in host memory."""
    states = state_bytes(width) - width if offloads_optimizer(job) else 0
    return states + (width if _offloads(job, "offload_param") else 0)
