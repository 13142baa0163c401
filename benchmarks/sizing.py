"""Check whether jobs fit their GPUs: the arithmetic of docs/gpu.md, from the job file and the shape of the model.

    python -m benchmarks.sizing deploy/jobs/*.yaml [--gpu-gib 80] [--nic-gbit 100] [--prompt-tokens 512]

Nothing is measured: each line follows from the job and the constants below. The model's shape is read from its
``config.json``, or from ``deploy/jobs/models/<name>.json`` if the model is not on this machine.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from volley.job import JOB, RLJob
from volley.shape import BF16, FP32, Shape, micro_batch_tokens

GIB = 1 << 30
SHAPES = Path(__file__).parents[1] / "deploy" / "jobs" / "models"

# ZeRO-3 under bf16, bytes per parameter, all sharded: weight 2, gradient 4, master copy 4, two moments 8.
STATE_BYTES = BF16 + FP32 + FP32 + 2 * FP32
OFFLOADED_BYTES = {"offload_param": BF16, "offload_optimizer": STATE_BYTES - BF16}  # bytes per parameter on the host
RANK_OVERHEAD = 5 * GIB  # CUDA context, NCCL buffers, layers that ZeRO-3 has gathered (1e9 parameters at most)
ENGINE_OVERHEAD = 5 * GIB  # per GPU of an engine: activations, CUDA graphs
DEFAULT_UTILIZATION = 0.9  # vLLM's gpu_memory_utilization
PCIE = 20e9  # bytes per second between host and GPU
NIC_SHARE = 0.7  # share of the line rate that object transfer is assumed to reach


def shape_of(model: Path) -> Shape:
    """The shape of ``model``. Raises FileNotFoundError if neither the model nor its shape file exists."""
    own = model / "config.json"
    return Shape.of_config(json.loads((own if own.exists() else SHAPES / f"{model.name}.json").read_text()))


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a job needs. Memory is in bytes; ``state`` to ``rank_room`` are per rank, ``weights`` per GPU."""

    parameters: int
    state: float
    host: float
    reference: float
    activations: float
    rank: float
    rank_room: float
    weights: float
    cache: float
    cache_tokens: int
    cache_sequences: int
    row_tokens: int
    slots: int
    samples_in_flight: int
    running: int
    tokens_in_flight: int
    published: int
    broadcast_rounds: int
    broadcast_seconds: float

    @property
    def fits(self) -> bool:
        """Whether a rank fits its memory and an engine's cache holds at least one whole sample."""
        return self.rank <= self.rank_room and self.cache_tokens >= self.row_tokens


def size(job: RLJob, shape: Shape, *, gpu_bytes: float, nic_gbit: float, prompt_tokens: int) -> Sizing:
    """Compute what ``job`` needs.

    Args:
        gpu_bytes: memory of one GPU.
        nic_gbit: line rate between two nodes, in gigabits per second.
        prompt_tokens: length of a prompt.
    """
    row = prompt_tokens + job.sampling.max_tokens
    ranks, lora = job.learner.ranks, job.model.lora
    trained = shape.parameters if lora is None else shape.adapters(lora)
    frozen = 0 if lora is None else shape.parameters * BF16  # STATE_BYTES already includes the trained weights
    offloaded = _offloaded_bytes(job)
    on_host = trained * offloaded + (frozen if offloaded in (BF16, STATE_BYTES) else 0)
    state = (trained * STATE_BYTES + frozen - on_host) / ranks
    reference = shape.parameters * BF16 / ranks if job.update.kl.wanted and lora is None else 0.0
    kept = shape.kept_bytes(BF16, checkpointed=job.learner.gradient_checkpointing)
    activations = float(max(row, micro_batch_tokens(job.learner, shape, BF16)) * kept)

    gpus = max(1, math.ceil(job.actors.gpus))
    utilization = float(job.actors.engine.get("gpu_memory_utilization", DEFAULT_UTILIZATION))
    shared = job.actors.gpus % 1 > 0  # the learner uses the rest of the same GPU
    weights = shape.parameters * BF16 / gpus
    cache = max(0.0, utilization * gpu_bytes - weights - ENGINE_OVERHEAD) * gpus
    samples = job.slots * job.sampling.n
    rounds = math.ceil(math.log2(job.actors.count + 1))
    published = trained * BF16
    sending = 0.0 if shared else rounds * published / (nic_gbit / 8 * 1e9 * NIC_SHARE)
    return Sizing(
        parameters=shape.parameters,
        state=state,
        host=on_host / ranks,
        reference=reference,
        activations=activations,
        rank=state + reference + activations + RANK_OVERHEAD,
        rank_room=gpu_bytes * (1 - utilization) if shared else gpu_bytes,
        weights=weights,
        cache=cache,
        cache_tokens=int(cache / shape.kv_bytes),
        cache_sequences=int(cache / shape.kv_bytes / row),
        row_tokens=row,
        slots=job.slots,
        samples_in_flight=samples,
        running=min(samples, job.actors.count * job.actors.max_num_seqs),
        tokens_in_flight=samples * job.sampling.max_tokens,
        published=published,
        broadcast_rounds=rounds,
        broadcast_seconds=published / PCIE + sending + weights / PCIE,
    )


def _offloaded_bytes(job: RLJob) -> int:
    """Bytes per parameter that DeepSpeed keeps in host memory."""
    zero = job.learner.deepspeed.get("zero_optimization", {})
    return sum(each for part, each in OFFLOADED_BYTES.items() if zero.get(part, {}).get("device") == "cpu")


def page(jobs: Sequence[tuple[RLJob, Sizing]], gpu_gib: float, nic_gbit: float) -> str:
    """A Markdown table with one column per job."""
    columns = [_column(job, made, gpu_gib, nic_gbit) for job, made in jobs]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [
        ("quantity", *(job.name for job, _ in jobs)),
        ("---",) * (len(jobs) + 1),
        *((label, *(column.get(label, "") for column in columns)) for label in labels),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _column(job: RLJob, made: Sizing, gpu_gib: float, nic_gbit: float) -> dict[str, str]:
    ranks, actors, offloaded = job.learner.ranks, job.actors, _offloaded_bytes(job)
    formula = f" = {STATE_BYTES - offloaded} B x parameters / {ranks}" if job.model.lora is None else ""
    tokens = max(made.row_tokens, micro_batch_tokens(job.learner, None, BF16))
    return {
        f"fits GPUs of {gpu_gib:g} GiB": "yes" if made.fits else "no",
        "parameters": f"{made.parameters / 1e9:.2f} billion",
        "learner: states per rank": f"{made.state / GIB:.1f} GiB{formula}",
        **({"learner: states on the host, per rank": f"{made.host / GIB:.1f} GiB"} if offloaded else {}),
        "learner: starting policy per rank": f"{made.reference / GIB:.1f} GiB",
        "learner: activations per rank": f"{made.activations / GIB:.1f} GiB for {tokens} tokens",
        f"learner: total per rank, with {RANK_OVERHEAD / GIB:.0f} GiB of overhead": (
            f"{made.rank / GIB:.1f} of {made.rank_room / GIB:.1f} GiB"
        ),
        "actor: weights per GPU": f"{made.weights / GIB:.1f} GiB",
        "actor: key-value cache": f"{made.cache / GIB:.1f} GiB = {made.cache_tokens:,} tokens",
        "actor: full-length samples in the cache, of those that may run": (
            f"{made.cache_sequences} of {actors.max_num_seqs}, {made.row_tokens} tokens each"
        ),
        "samples in flight": f"{made.samples_in_flight} = {made.slots} slots x {job.sampling.n}",
        "samples running at once, at most": f"{made.running}",
        "tokens in flight, at most": f"{made.tokens_in_flight:,}",
        "weights published per step": f"{made.published / GIB:.1f} GiB",
        f"broadcast at {nic_gbit:g} Gbit/s: time, rounds": f"{made.broadcast_seconds:.1f} s, {made.broadcast_rounds}",
    }


def main() -> None:
    """Print the sizing of job files; exit with code 1 if one does not fit."""
    parser = argparse.ArgumentParser(description="Check whether jobs fit their GPUs.")
    parser.add_argument("jobs", type=Path, nargs="+", metavar="JOB.yaml")
    parser.add_argument("--gpu-gib", type=float, default=80)
    parser.add_argument("--nic-gbit", type=float, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    options = parser.parse_args()
    sized = []
    for path in options.jobs:
        job = JOB.validate_python(yaml.safe_load(path.read_text()))
        if not isinstance(job, RLJob):
            parser.error(f"{path} is a job of kind {job.kind}; only rl jobs have actors and a learner")
        gpu_bytes, shape = options.gpu_gib * GIB, shape_of(job.model.path)
        made = size(job, shape, gpu_bytes=gpu_bytes, nic_gbit=options.nic_gbit, prompt_tokens=options.prompt_tokens)
        sized.append((job, made))
    print(page(sized, options.gpu_gib, options.nic_gbit))
    raise SystemExit(0 if all(made.fits for _, made in sized) else 1)


if __name__ == "__main__":
    main()
