"""``volley plan``: memory and speed of a job on given GPUs, before anything runs."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import JobFile, Json, Overrides, print_json

if TYPE_CHECKING:
    from services.recording.terminal import TerminalTable
    from volley.job import RLJob
    from volley.plan.machine import Device
    from volley.plan.report import Plan

NAMES = "a100, h100, h200 or l40s"
LEAST, MOST = 1e-6, 1e9  # of any option that is a number
BY_STAGE = {"generate": "generation", "score": "scoring", "train": "training", "publish": "publishing"}


def _bounded(value: float | None) -> float | None:
    if value is not None and not LEAST <= value <= MOST:
        raise typer.BadParameter(f"{value:g}: write a number from {LEAST:g} to {MOST:g}")
    return value


Gpus = Annotated[int | None, typer.Option(min=1, max=2048, help="GPUs in all [default: those the job uses]")]
Gpu = Annotated[str, typer.Option(help=f"type of GPU: {NAMES}", metavar="NAME")]
GpuGib = Annotated[float | None, typer.Option(callback=_bounded, help="memory of a GPU, in place of the type's")]
Tflops = Annotated[
    float | None,
    typer.Option(callback=_bounded, help="its peak in the model's dtype, 1e12 FLOP/s, in place of the type's"),
]
MemoryGbS = Annotated[
    float | None, typer.Option(callback=_bounded, help="its memory bandwidth, GB/s, in place of the type's")
]
NicGbit = Annotated[float, typer.Option(callback=_bounded, help="of all network cards of a node together, Gbit/s")]
Machine = Annotated[
    Path | None, typer.Option(help="file of measured rates in place of --gpu, for CPUs too", metavar="FILE")
]
HostGib = Annotated[
    float | None, typer.Option(callback=_bounded, help="memory of a node's host [default: not checked]")
]
SampleTokens = Annotated[
    float | None,
    typer.Option(callback=_bounded, help="tokens of a sample on average [default: half of sampling.max_tokens]"),
]
ScoreSeconds = Annotated[
    float | None,
    typer.Option(callback=_bounded, help="seconds to score a sample [default: 0.5 for code, 0.01 for others]"),
]


def plan(
    job_file: JobFile,
    gpus: Gpus = None,
    gpu: Gpu = "h100",
    gpu_gib: GpuGib = None,
    tflops: Tflops = None,
    memory_gb_s: MemoryGbS = None,
    machine: Machine = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, max=2048)] = 8,
    nic_gbit: NicGbit = 100,
    host_gib: HostGib = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=10**7, help="tokens of a prompt")] = 512,
    sample_tokens: SampleTokens = None,
    score_seconds: ScoreSeconds = None,
    config: Annotated[
        Path | None, typer.Option(help="the model's config.json, if the model is not on this machine")
    ] = None,
    set_: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Predict whether an rl job fits its GPUs, how fast it runs, and how to split the GPUs. Starts nothing."""
    from volley.plan.advice import advise
    from volley.plan.machine import Hardware, read_device
    from volley.plan.memory import gpus_of, shape_of
    from volley.plan.report import make_plan
    from volley.plan.stages import Load, default_score_seconds

    job = _load(job_file, set_)
    if sample_tokens is not None and sample_tokens > job.sampling.max_tokens:
        raise typer.BadParameter(f"--sample-tokens {sample_tokens:g} exceeds sampling.max_tokens of the job")
    if job.model.dtype == "float32" and job.actors.gpus and not (tflops or machine):
        raise typer.BadParameter("model.dtype is float32 and the type's rate of bfloat16: pass --tflops as well")
    given = {"memory_gib": gpu_gib, "tflops": tflops, "memory_gb_s": memory_gb_s}
    device = read_device(machine) if machine else _preset(gpu)
    hardware = Hardware(
        device=device.model_copy(update={name: value for name, value in given.items() if value is not None}),
        gpus=gpus or math.ceil(gpus_of(job) - 1e-9),
        gpus_per_node=gpus_per_node,
        nic_gbit=nic_gbit,
        host_gib=host_gib,
    )
    load = Load(
        prompt_tokens, sample_tokens or job.sampling.max_tokens / 2, score_seconds or default_score_seconds(job)
    )
    made = make_plan(job, shape_of(job.model, job_file.parent, config), hardware, load)
    advice = advise(made)
    if as_json:
        print_json(plan_object(made, advice, str(job_file)))
    else:
        _print(made, advice)
    if not made.fits:
        if as_json:
            typer.echo(advice, err=True)
        raise typer.Exit(1)


def _load(file: Path, overrides: list[str]) -> "RLJob":
    from services.jobs.job_file import load_job, parse_overrides
    from volley.errors import JobError
    from volley.job import RLJob

    job = load_job(file, parse_overrides(overrides))
    if not isinstance(job, RLJob):
        raise JobError(f"{file} is a job of kind {job.kind}: only rl jobs have actors and a learner to plan for")
    return job


def _preset(name: str) -> "Device":
    from volley.plan.machine import PRESETS

    if name.lower() not in PRESETS:
        raise typer.BadParameter(
            f"--gpu {name}: write {NAMES}, or describe another with --machine FILE or --gpu-gib, --tflops and "
            "--memory-gb-s"
        )
    return PRESETS[name.lower()]


def plan_object(plan: "Plan", advice: str, file: str) -> dict[str, object]:
    """The plan as ``--json`` prints it. Infinite rooms are null."""
    from dataclasses import asdict

    from volley.plan.memory import gpus_of

    memory = {name: None if value == math.inf else value for name, value in asdict(plan.memory).items()}
    generation, training = asdict(plan.stages.generation), asdict(plan.stages.training)
    del generation["seconds"]
    return {
        "file": file,
        "name": plan.job.name,
        "fits": plan.fits,
        "problems": list(plan.memory.problems),
        "hardware": json.loads(plan.hardware.model_dump_json()),
        "assumed": asdict(plan.load),
        "gpus": gpus_of(plan.job),
        "memory": memory,
        "seconds": {**plan.stages.seconds, "step": plan.stages.step},
        "generation": generation,
        "training": training,
        "bounds": plan.stages.bounds,
        "samples_per_second": plan.samples_per_second,
        "split": asdict(plan.split) if plan.split else None,
        "advice": advice,
    }


def _print(plan: "Plan", advice: str) -> None:
    import textwrap

    from services.recording.terminal import make_console

    console = make_console()
    device, load, gpus = plan.hardware.device, plan.load, plan.hardware.gpus
    where = f"{gpus} x {device.name}" if gpus else device.name
    lines = [
        f"{plan.job.name} on {where}: {'fits' if plan.fits else 'does not fit'}. Estimated, not measured.",
        f"{plan.memory.parameters / 1e9:.4g} billion parameters, prompts of {load.prompt} tokens, samples of "
        f"{load.sample:g} (at most {plan.job.sampling.max_tokens})",
    ]
    for part in (*lines, "", _memory(plan), "", _stages(plan)):
        console.print(part, crop=False)
    if plan.split is not None:
        best = plan.split
        console.print(
            f"\nbest split of {gpus} GPUs: actors.count {best.actors}, learner.ranks {best.ranks}: "
            f"{best.samples_per_second:.3g} samples/s",
            crop=False,
        )
    console.print()
    width = min(console.width, 80) if console.is_terminal else 10_000
    for line in textwrap.wrap(advice, width, break_long_words=False, break_on_hyphens=False):
        console.print(line, markup=False, crop=False, soft_wrap=True)


def _memory(plan: "Plan") -> "TerminalTable":
    from services.recording.terminal import TableRow, TerminalTable

    return TerminalTable(("memory", "GiB", ""), [TableRow(cells) for cells in _memory_rows(plan)])


def _memory_rows(plan: "Plan") -> Iterator[tuple[str, str, str]]:
    from volley.plan.memory import gib

    memory, job = plan.memory, plan.job
    overhead = memory.rank - memory.state - memory.reference - memory.activations
    yield "learner rank", gib(memory.rank), _of(memory.rank_room)
    yield "  states", gib(memory.state), f"{memory.offloaded / 2**30:.1f} more on the host" if memory.offloaded else ""
    yield "  starting policy", gib(memory.reference), ""
    yield "  activations", gib(memory.activations), f"{memory.micro_batch} tokens"
    yield "  overhead", gib(overhead), ""
    yield "actor, per GPU" if job.actors.gpus >= 1 else "actor", gib(memory.actor), _of(memory.actor_room)
    yield "  weights", gib(memory.weights), ""
    cached = memory.cache_tokens // memory.row_tokens
    note = f"{cached} of {job.actors.max_num_seqs} samples of full length"
    yield "  key-value cache", gib(memory.cache / max(1, math.ceil(job.actors.gpus))), note
    yield "host, per node", gib(memory.host), _of(memory.host_room)


def _of(room: float) -> str:
    return "" if room == math.inf else f"of {room / 2**30:.1f}"


def _stages(plan: "Plan") -> "TerminalTable":
    from services.recording.terminal import TableRow, TerminalTable

    stages, generation = plan.stages, plan.stages.generation
    notes = {
        "generate": f"{generation.tokens_per_second:,.0f} tokens/s, {generation.running:.0f} samples at once per actor",
        "score": f"{plan.load.score_seconds:g} s per sample and worker",
        "train": _training_note(plan),
        "publish": f"{plan.memory.published / 2**30:.1f} GiB",
    }
    rows = [TableRow((BY_STAGE[stage], f"{seconds:.3g}", notes[stage])) for stage, seconds in stages.seconds.items()]
    rows.append(TableRow(("step", f"{stages.step:.3g}", f"{plan.samples_per_second:.3g} samples/s")))
    return TerminalTable(("stage", "seconds", ""), rows)


def _training_note(plan: "Plan") -> str:
    training = plan.stages.training
    if training.exchange > training.compute:
        return f"{training.exchange:.3g} to exchange weights and gradients"
    return f"{training.compute:.3g} to compute, {training.optimizer:.2g} for AdamW"
