"""Two pages against the planner.

volley/plan/README.md: its formulas are evaluated, its constants read. docs/gpu.md: its output is printed anew, and what
it repeats of the other page is compared.
"""

import math
import re
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings

from tests.unit.plan.plans import JOBS, jobs, large, loads, shapes
from volley.job import RLJob
from volley.plan import machine, memory, stages
from volley.plan.machine import GIB, PRESETS, Device
from volley.plan.report import Plan, make_plan
from volley.plan.stages import Load
from volley.shape import Shape, micro_batch_tokens

ROOT = JOBS.parents[1]
PAGE = (ROOT / "volley" / "plan" / "README.md").read_text()
USER_PAGE = (ROOT / "docs" / "gpu.md").read_text()
FORMULAS = [block for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S) if re.match(r"\w+ +=", block)]
CONSTANTS = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", PAGE.partition("| constant |")[2], re.M))
DEFAULTS = {name: field.default for name, field in Device.model_fields.items()}


def evaluated(plan: Plan) -> dict[str, float]:
    """Everything that the page's formulas define, for the plan's job and hardware."""
    job, shape, hardware, load = plan.job, plan.shape, plan.hardware, plan.load
    device, lora, update = hardware.device, job.model.lora, job.update
    zero = job.learner.deepspeed.get("zero_optimization", {})
    kl = update.kl
    starting = kl.logged or kl.coefficient > 0
    ranks = job.learner.ranks
    width = {"bfloat16": 2, "float32": 4}[job.model.dtype]
    known: dict[str, object] = {
        **{"ceil": math.ceil, "log2": math.log2, "min": min, "max": max, "w": width},
        **{name: float(eval(value, {"GIB": GIB})) for name, value in CONSTANTS.items()},  # noqa: S307 - a page of ours
        **device.model_dump(include={"train_share", "prefill_share", "decode_share", "cache_block"}),
        **device.model_dump(include={"update_us", "publish_us", "publish_layer_us", "load_copies"}),
        **device.model_dump(include={"train_layer_us", "decode_layer_us", "step_us", "sample_us", "sample_layer_us"}),
        **{
            "P": shape.parameters,
            "layers": shape.layer_parameters,
            "M": shape.layer_parameters + shape.head_parameters,
        },
        **{"L": shape.num_hidden_layers, "h": shape.hidden_size, "m": shape.intermediate_size, "V": shape.vocab_size},
        **{"q": shape.q_size, "v": shape.kv_size, "kv_heads": shape.num_key_value_heads, "lora": lora is not None},
        "trained": shape.parameters if lora is None else shape.adapters(lora),
        "frozen": 0 if lora is None else shape.parameters,
        **{part: part in zero for part in ("offload_optimizer", "offload_param")},
        "starting_policy": starting and lora is None,
        "gradient_checkpointing": job.learner.gradient_checkpointing,
        "tokens_per_micro_batch": micro_batch_tokens(job.learner, shape, width),
        **{"p": load.prompt, "s": load.sample, "score_seconds": load.score_seconds, "n": job.sampling.n},
        **{"prompts": job.prompts_per_step, "longest": job.sampling.max_tokens, "max_lag": job.max_lag},
        **{
            "R": ranks,
            "tp": job.actors.gpus,
            "max_num_seqs": job.actors.max_num_seqs,
            "updates": update.updates_per_batch,
        },
        "actors": job.actors.count,
        "A": min(job.actors.count, (job.max_lag + 1) * job.prompts_per_step),
        "gpu_memory_utilization": 0.92,
        "gpu_memory": device.memory_gib * GIB,
        "reward_workers": job.reward_workers.count,
        "without_gradient": (update.updates_per_batch > 1)
        + ((1 if kl.coefficient else update.kl_sample_fraction) if starting else 0),
        "shared": plan.stages.training.row_samples,
        **{"F": device.tflops * 1e12, "B": device.memory_gb_s * 1e9, "host_rate": device.host_gb_s * 1e9},
        "gpu_link": device.link_gb_s * 1e9,
        "write": (device.write_gb_s or device.memory_gb_s) * 1e9,
        "nodes": math.ceil((job.actors.count * job.actors.gpus + ranks) / hardware.gpus_per_node),
        "ranks_on_a_node": min(ranks, hardware.gpus_per_node),
        "nic": (nic := hardware.nic_gbit / 8 * 1e9 * machine.NIC_SHARE),
        "link": device.link_gb_s * 1e9 if ranks <= hardware.gpus_per_node else min(device.link_gb_s * 1e9, nic),
    }
    for line in "".join(FORMULAS).splitlines():
        if line:
            name, _, expression = line.partition("=")
            known[name.strip()] = eval(expression, {}, known)  # noqa: S307
    return {name: float(value) for name, value in known.items() if isinstance(value, int | float)}


@given(job=jobs(), shape=shapes(), load=loads())
@settings(deadline=None, max_examples=150)
def test_the_formulas_of_the_page_are_those_of_the_command(job: RLJob, shape: Shape, load: Load) -> None:
    plan = make_plan(job, shape, large(), load)
    page, seconds = evaluated(plan), plan.stages.seconds
    for name in ("reference", "activations", "rank", "weights", "cache", "host"):
        assert getattr(plan.memory, name) == pytest.approx(page[name]), name
    assert plan.memory.state == pytest.approx(page["states"])
    assert plan.memory.cache_tokens == pytest.approx(page["cache_tokens"], abs=1)
    for name in ("generate", "score", "train"):
        assert seconds[name] == pytest.approx(page[name], rel=1e-6), name
    assert plan.stages.training.micro_batches == page["batches"]
    assert plan.stages.training.exchange == pytest.approx(page["exchange"])
    if job.broadcast.transport == "object_store":
        assert seconds["publish"] == pytest.approx(page["publish"])
        assert plan.stages.step == pytest.approx(page["step"])


def test_the_table_of_constants_is_complete_and_true() -> None:
    modules = {**vars(machine), **vars(memory), **vars(stages)}
    for name, text in CONSTANTS.items():
        value = DEFAULTS.get(name, modules.get(name))
        assert eval(text, {"GIB": GIB}) == value, name  # noqa: S307 - a page of ours
    rates = {"name", "memory_gib", "tflops", "memory_gb_s", "host_gb_s", "link_gb_s", "write_gb_s", "gpu"}
    assert set(DEFAULTS) - rates <= set(CONSTANTS)
    assert set(re.findall(r"\b[A-Z]{4,}_?[A-Z]+\b", "".join(FORMULAS))) <= set(CONSTANTS)


def test_the_table_of_types_is_complete_and_true() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE.partition("| type | GiB |")[2].partition("\n\n")[0], re.M)
    found = {name: tuple(map(float, cells.split(" | "))) for name, cells in rows}
    assert found == {
        name: (each.memory_gib, each.tflops, each.memory_gb_s, each.link_gb_s) for name, each in PRESETS.items()
    }


def test_the_users_page_names_every_type() -> None:
    found = re.search(r"`--gpu` is (.+?)\. ", USER_PAGE)
    assert found is not None
    assert re.findall(r"`(\w+)`", found[1]) == list(PRESETS)


def test_the_users_page_repeats_how_near_predictions_came_on_a_cpu() -> None:
    rows = re.findall(r"^\| \w+, [^|]+ \| (.+) \|$", PAGE.partition("| | 1M |")[2].partition("\n\n")[0], re.M)
    ratios = [sorted(cells.split(" | ")) for cells in rows]
    assert len(ratios) == 3
    for least, *_, most in ratios:
        assert re.search(rf"\b{least}\s+to\s+{most}\b", USER_PAGE), (least, most)


def test_the_users_page_shows_what_its_command_prints() -> None:
    """The command is the one in the block above the output in docs/gpu.md."""
    found = re.search(r"^```bash\nvolley (plan .*)\n```\n\n```text\n(.*?)^```", USER_PAGE, re.M | re.S)
    assert found is not None
    code = "import os, sys; from services.cli import main; main()"
    command = [sys.executable, "-c", code, *found[1].split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    printed = [line for each in done.stdout.splitlines() for line in _folded(each)]
    assert [line.rstrip() for line in printed] == [line.rstrip() for line in found[2].splitlines()]


def _folded(line: str) -> list[str]:
    return textwrap.wrap(line, 80) if len(line) > 80 else [line]


def test_a_shipped_job_names_its_command() -> None:
    for path in JOBS.glob("*.yaml"):
        assert f"volley plan {path.relative_to(ROOT)}" in path.read_text()
