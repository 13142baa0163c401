"""Seconds per step of each stage, from the job, the model's shape and the hardware. README.md has the formulas."""

import math
from dataclasses import dataclass

from volley.job import RLJob
from volley.objectives.spec import weighs_companions
from volley.plan.machine import Hardware
from volley.plan.memory import (
    Memory,
    cached_bytes,
    gpus_of,
    longest_sample,
    offloads_optimizer,
    shares_gpu,
    takes_turns,
)
from volley.shape import BF16, FP32, WIDTHS, Shape, micro_batch_tokens, samples_sharing_row

ACTIVATION_PASSES = 4  # activations are written and read once, and so are their gradients
LOGIT_PASSES = 20  # of reading or writing float32 logits, in `learner.logprobs`
HOST_ADAM = 50e9  # bytes per second that AdamW reads and writes on the host, for offload_optimizer
WHOLE_BYTES = 64 << 20  # a model up to this size is whole on every rank
SCORE_SECONDS = {"code": 0.5}  # of a sample, by kind of scorer
OTHER_SCORE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Load:
    """What a job's steps contain.

    Attributes:
        prompt: tokens of a prompt.
        sample: tokens of a sample on average.
        score_seconds: a reward worker's seconds per sample.
    """

    prompt: int
    sample: float
    score_seconds: float


@dataclass(frozen=True, slots=True)
class Generation:
    """Seconds to generate a batch, and what an engine does meanwhile.

    Attributes:
        running: samples that an engine runs at once.
        step_seconds: of a token step of an engine.
        tokens_per_second: of all actors.
    """

    seconds: float
    running: float
    step_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Training:
    """Seconds that a rank takes for a batch: ``max(compute, exchange) + optimizer``.

    Attributes:
        compute: of the forward and backward passes.
        exchange: of gathering weights and summing gradients over the ranks, which overlaps with computing.
        optimizer: of AdamW, and of what else an update takes whatever its size.
        row_samples: samples that share a row.
        micro_batches: of a rank, in one pass over the batch.
    """

    compute: float
    exchange: float
    optimizer: float
    row_samples: int
    micro_batches: int

    @property
    def seconds(self) -> float:
        return max(self.compute, self.exchange) + self.optimizer


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds per step of each stage, and of the whole step."""

    generation: Generation
    training: Training
    score: float
    publish: float
    step: float

    @property
    def seconds(self) -> dict[str, float]:
        """By stage, in the order of a group's way."""
        return {
            "generate": self.generation.seconds,
            "score": self.score,
            "train": self.training.seconds,
            "publish": self.publish,
        }

    @property
    def bounds(self) -> str:
        """The slowest stage."""
        return max(self.seconds, key=self.seconds.__getitem__)


def default_score_seconds(job: RLJob) -> float:
    """Seconds to score a sample, by the kind of scorer; 0 if a program returns the rewards."""
    return 0.0 if job.scorer is None else SCORE_SECONDS.get(job.scorer.kind, OTHER_SCORE_SECONDS)


def stages_of(job: RLJob, shape: Shape, hardware: Hardware, memory: Memory, load: Load) -> Stages:
    """Predict the stages of ``job``."""
    generation = generate(job, shape, hardware, memory, load)
    training = train(job, shape, hardware, memory, load)
    score, sent = score_seconds(job, load), publish(job, shape, hardware, memory, gpus_of(job))
    step = step_seconds(job, generation.seconds, score, training.seconds, sent)
    return Stages(generation, training, score, sent, step)


def step_seconds(job: RLJob, generate: float, score: float, train: float, publish: float) -> float:
    """Seconds from one update to the next.

    The slowest stage bounds them. So do the slots: ``max_lag + 1`` batches are on their way at once, each for the sum
    of all stages. Actors and ranks that share devices take turns.
    """
    total = generate + score + train + publish
    slowest = max(generate + train if takes_turns(job) else generate, score, train, publish)
    return max(slowest, total / (job.max_lag + 1))


def samples_per_step(job: RLJob) -> int:
    return job.prompts_per_step * job.sampling.n


def generate(job: RLJob, shape: Shape, hardware: Hardware, memory: Memory, load: Load) -> Generation:
    """Seconds of a token step, and of the prompts before.

    In each step, reading the weights or FLOPs bound the matmuls, and reading the cache or FLOPs bound attention.
    """
    device, width = hardware.device, WIDTHS[job.model.dtype]
    gpus = max(1, math.ceil(job.actors.gpus))
    flops, bandwidth = device.tflops * 1e12 * device.prefill_share, device.memory_gb_s * 1e9 * device.decode_share
    weights, kv_bytes = shape.layer_parameters + shape.head_parameters, cached_bytes(shape, width, gpus)
    reducing = _reduced_bytes(shape, width, gpus) / (device.link_gb_s * 1e9)
    context = load.prompt + load.sample / 2
    in_flight = job.slots * job.sampling.n
    busy = min(job.actors.count, job.slots)  # a group is generated by one actor
    running = max(1.0, min(job.actors.max_num_seqs, in_flight / busy, memory.cache_tokens / context))

    matmuls = max(weights * width / bandwidth, running * 2 * weights / flops) / gpus
    attention = running * max(context * kv_bytes / bandwidth, attention_flops(shape, context) / flops) / gpus
    per_layer = device.decode_layer_us + running * device.sample_layer_us
    overhead = device.step_us + running * device.sample_us + shape.num_hidden_layers * per_layer
    step = matmuls + attention + running * reducing + overhead / 1e6

    computed = _prompt_tokens(load.prompt, job.sampling.n, device.cache_block)
    per_token = 2 * shape.layer_parameters + attention_flops(shape, load.prompt / 2)
    group = job.sampling.n * load.sample * step / running + computed * (per_token / (gpus * flops) + reducing)
    seconds = job.prompts_per_step * group / busy
    return Generation(seconds, running, step, samples_per_step(job) * load.sample / seconds)


def _reduced_bytes(shape: Shape, width: int, gpus: int) -> float:
    """Bytes that each of an engine's GPUs sends for a token: activations are summed twice per layer, over a ring."""
    return 2 * shape.num_hidden_layers * shape.hidden_size * width * 2 * (gpus - 1) / gpus


def attention_flops(shape: Shape, context: float) -> float:
    """FLOPs of one token that attends to ``context`` others, in all layers."""
    return 4 * shape.num_hidden_layers * shape.q_size * context


def _prompt_tokens(prompt: int, n: int, block: int) -> int:
    """Tokens computed for the prompt of a group: the prefix cache shares whole blocks, except the last token's."""
    return prompt + (n - 1) * (prompt - (prompt - 1) // block * block)


def score_seconds(job: RLJob, load: Load) -> float:
    """Seconds until all reward workers have scored a batch."""
    if job.scorer is None:
        return 0.0
    return samples_per_step(job) * load.score_seconds / job.reward_workers.count


def train(job: RLJob, shape: Shape, hardware: Hardware, memory: Memory, load: Load) -> Training:
    """Matmuls and activations of all passes; or what the ranks exchange meanwhile; then AdamW."""
    spec, device, width, n = job.learner, hardware.device, WIDTHS[job.model.dtype], job.sampling.n
    budget, groups = micro_batch_tokens(spec, shape, width), math.ceil(job.prompts_per_step / spec.ranks)
    shared = _samples_per_row(job, shape, load, budget)
    row, rows = load.prompt + shared * load.sample, math.ceil(groups * n / shared)
    micro_batches = math.ceil(rows / max(1, min(rows, int(budget // row))))

    context = row if shared > 1 else row / 2  # a mask makes a shared row attend to all of itself
    forward = row * (2 * shape.layer_parameters + attention_flops(shape, context))
    logits = 2 * shared * load.sample * shape.head_parameters
    updates, passes, alone = job.update.updates_per_batch, _passes(job), _passes_without_gradient(job)
    # The backward pass always computes the logits again.
    head_passes = 4 if job.model.lora is None else 3
    flops = rows * (updates * (passes * forward + head_passes * logits) + alone * (forward + logits))
    moved = row * shape.activation_bytes(width) * ACTIVATION_PASSES
    moved += shared * load.sample * shape.vocab_size * FP32 * LOGIT_PASSES
    bandwidth = device.memory_gb_s * 1e9
    launched = micro_batches * shape.num_hidden_layers * device.train_layer_us / 1e6
    compute = flops / (device.tflops * 1e12 * device.train_share)
    compute += rows * updates * moved / ((device.write_gb_s or device.memory_gb_s) * 1e9)
    compute += launched * (updates * passes + alone) / 3

    exchange = _exchange(job, hardware, memory, micro_batches, alone)
    traffic = memory.trained * _adam_bytes(width) / spec.ranks * updates
    optimizer = traffic / bandwidth
    if offloads_optimizer(job):
        crossing = memory.trained * (FP32 + width) / spec.ranks * updates
        optimizer = traffic / HOST_ADAM + crossing / (device.host_gb_s * 1e9)
    optimizer += updates * device.update_us / 1e6
    return Training(compute, exchange, optimizer, shared, micro_batches)


def _samples_per_row(job: RLJob, shape: Shape, load: Load, budget: int) -> int:
    if not job.learner.shares_rows:
        return 1
    longest = longest_sample(job, load.prompt)
    return samples_sharing_row(
        load.prompt, load.sample, longest, job.sampling.n, budget=budget, width=shape.hidden_size
    )


def _passes(job: RLJob) -> int:
    """Cost of an update in forward passes: a backward pass costs two, or one if the weights are frozen."""
    return (3 if job.model.lora is None else 2) + (1 if job.learner.gradient_checkpointing else 0)


def _passes_without_gradient(job: RLJob) -> float:
    """Forward passes before the update, of the policy and of the starting policy."""
    update = job.update
    policy = update.updates_per_batch > 1 or update.kl.shapes_reward or weighs_companions(job.objective)
    starting = 0.0
    if update.kl.wanted:
        starting = 1.0 if update.kl.coefficient else update.kl_sample_fraction
    return float(policy) + starting


def _exchange(job: RLJob, hardware: Hardware, memory: Memory, micro_batches: int, alone: float) -> float:
    """Seconds in which ZeRO-3 gathers weights and sums float32 gradients, for each micro-batch."""
    ranks, updates, width = job.learner.ranks, job.update.updates_per_batch, WIDTHS[job.model.dtype]
    weights = memory.parameters * width
    gathers = updates * (3 if job.learner.gradient_checkpointing else 2) + alone
    gathered = 0.0 if weights <= WHOLE_BYTES else gathers * weights
    each = gathered + updates * memory.trained * FP32
    gpus = ranks * job.learner.gpus_per_rank
    return micro_batches * each * (ranks - 1) / ranks / hardware.link_bytes(gpus)


def _adam_bytes(width: int) -> int:
    """Bytes that AdamW reads and writes per parameter: gradient, float32 weight, two moments; the bfloat16 weight."""
    return FP32 + 2 * FP32 + 4 * FP32 + (BF16 if width == BF16 else 0)


def publish(job: RLJob, shape: Shape, hardware: Hardware, memory: Memory, gpus: float) -> float:
    """Seconds until every actor has new weights: out of the learner, from node to node, into the actors' GPUs.

    Args:
        gpus: those of all actors and ranks, which fill one node after another.
    """
    device = hardware.device
    host = device.host_gb_s * 1e9
    overhead = (device.publish_us + shape.num_hidden_layers * device.publish_layer_us) / 1e6
    receiving = 0 if shares_gpu(job) else min(job.actors.count, hardware.nodes(gpus) - 1)
    rounds = math.ceil(math.log2(receiving + 1))
    if job.broadcast.transport == "collective":
        rounds = min(1, receiving)
    sending = rounds * memory.published / hardware.nic_bytes
    return overhead + memory.published / host + sending + device.load_copies * memory.weights / host
