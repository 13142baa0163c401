"""`volley plan`: readable at 80 columns, one shape of JSON, errors that say what to write instead."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.plan import NAMES
from tests.unit.cli.commands import Volley
from tests.unit.plan.plans import JOBS
from volley.plan.machine import PRESETS

ROOT = Path(__file__).parents[3]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CPU = {"name": "two-cores", "memory_gib": 512, "tflops": 0.05, "memory_gb_s": 10, "host_gb_s": 5, "gpu": False}
ONE = str(JOBS / "gpu-1.yaml")
EIGHT = str(JOBS / "gpu-8.yaml")
ALL = str(JOBS / "gpu-64.yaml")


def write(folder: Path, tree: dict[str, Any], name: str = "job.yaml") -> str:
    (folder / name).write_text(yaml.safe_dump(tree))
    return str(folder / name)


@pytest.fixture
def cpu_job(tmp_path: Path) -> str:
    tree = yaml.safe_load(Path(ONE).read_text())
    del tree["actors"]["gpus"], tree["learner"]["gpus_per_rank"]
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "qwen2.5-1.5b.json").write_text((JOBS / "models" / "qwen2.5-1.5b.json").read_text())
    (tmp_path / "machine.json").write_text(json.dumps(CPU))
    return write(tmp_path, tree)


@pytest.mark.parametrize(
    "arguments",
    [
        (ONE,),
        (EIGHT, "--gpu", "l40s", "--gpus", "16"),
        (EIGHT, "--gpu-gib", "40"),
        (ALL, "--nic-gbit", "400", "--host-gib", "64"),
        (ALL, "--set", "learner.deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}"),
        (ALL, "--set", "sampling.max_tokens=1000000"),
    ],
)
def test_at_80_columns_no_line_is_longer(
    volley: Volley, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    whole = volley("plan", *arguments)[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    lines = ESCAPE.sub("", volley("plan", *arguments)[1]).splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).split() == whole.split()
    for part in ("learner rank", "actor", "host, per node", "generation", "scoring", "training", "publishing", "step"):
        assert any(line.startswith(part) for line in lines), part


def test_the_exit_code_says_whether_the_job_fits(volley: Volley) -> None:
    assert volley("plan", EIGHT)[0] == 0
    code, out, _ = volley("plan", EIGHT, "--gpu-gib", "40")
    assert code == 1
    assert out.splitlines()[0] == "math-gpu-8 on 8 x h100: does not fit. Estimated, not measured."
    assert "does not fit: a learner rank needs 64.5 of 40.0 GiB" in out.splitlines()[-1]
    code, out, errors = volley("plan", EIGHT, "--gpu-gib", "40", "--json")
    assert (code, json.loads(out)["fits"]) == (1, False)
    assert errors.strip() == json.loads(out)["advice"]


def test_json_has_the_documented_shape(volley: Volley) -> None:
    made = json.loads(volley("plan", EIGHT, "--json")[1])
    row = next(line for line in (ROOT / "docs/cli.md").read_text().splitlines() if line.startswith("| `plan` | "))
    assert re.findall(r"`(\w+)`", row.partition(" (")[0])[1:] == list(made)
    assert made["seconds"].keys() == {"generate", "score", "train", "publish", "step"}
    assert made["samples_per_second"] == pytest.approx(64 * 16 / made["seconds"]["step"])
    assert (made["fits"], made["problems"], made["gpus"], made["bounds"]) == (True, [], 8, "train")
    assert made["hardware"]["gpus"] == 8
    assert made["assumed"] == {"prompt": 512, "sample": 1536.0, "score_seconds": 0.01}


def test_options_describe_another_gpu(volley: Volley) -> None:
    options = ("--gpu-gib", "96", "--tflops", "500", "--memory-gb-s", "4000", "--gpus", "9", "--nic-gbit", "50")
    hardware = json.loads(volley("plan", EIGHT, *options, "--json")[1])["hardware"]
    assert (hardware["gpus"], hardware["nic_gbit"]) == (9, 50)
    assert [hardware["device"][name] for name in ("memory_gib", "tflops", "memory_gb_s")] == [96, 500, 4000]
    slow = json.loads(volley("plan", EIGHT, "--gpu", "A100", "--json")[1])["seconds"]
    fast = json.loads(volley("plan", EIGHT, "--gpu", "h200", "--json")[1])["seconds"]
    assert slow["generate"] > fast["generate"]
    assert slow["train"] > fast["train"]


def test_the_help_names_every_type(volley: Volley) -> None:
    assert set(re.findall(r"\w+\d\w*", NAMES)) == set(PRESETS)


def test_a_cpu_is_described_by_a_file(volley: Volley, cpu_job: str) -> None:
    machine = str(Path(cpu_job).parent / "machine.json")
    code, out, _ = volley("plan", cpu_job, "--machine", machine, "--sample-tokens", "64")
    assert code == 0
    assert out.splitlines()[0] == "math-gpu-1 on two-cores: fits. Estimated, not measured."
    assert "best split" not in out
    (Path(cpu_job).parent / "small.json").write_text(json.dumps({**CPU, "memory_gib": 16}))
    code, out, _ = volley("plan", cpu_job, "--machine", str(Path(cpu_job).parent / "small.json"))
    assert code == 1
    assert "a host needs" in out
    code, _, errors = volley("plan", cpu_job)
    assert code == 1
    assert "the job uses no GPUs: describe the CPU with --machine FILE" in errors
    code, _, errors = volley("plan", ONE, "--machine", machine)
    assert code == 1
    assert "machine two-cores is a CPU" in errors


@pytest.mark.parametrize(
    "option",
    ["--gpu-gib", "--tflops", "--memory-gb-s", "--nic-gbit", "--host-gib", "--sample-tokens", "--score-seconds"],
)
@pytest.mark.parametrize("value", ["nan", "0", "-1", "inf", "x", "1e-320", "1e300"])
def test_bad_numbers_are_wrong_usage(volley: Volley, option: str, value: str) -> None:
    code, out, errors = volley("plan", EIGHT, option, value)
    assert (code, out) == (2, "")
    assert option in errors


@pytest.mark.parametrize("option", ["--gpus", "--gpus-per-node", "--prompt-tokens"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "nan", "1" + "0" * 300])
def test_bad_counts_are_wrong_usage(volley: Volley, option: str, value: str) -> None:
    code, out, errors = volley("plan", EIGHT, option, value)
    assert (code, out) == (2, "")
    assert option in errors


def test_longer_samples_than_the_job_allows_are_wrong_usage(volley: Volley) -> None:
    code, _, errors = volley("plan", EIGHT, "--sample-tokens", "3073")
    assert code == 2
    assert "exceeds" in errors


def test_unknown_types_are_wrong_usage(volley: Volley) -> None:
    code, _, errors = volley("plan", EIGHT, "--gpu", "h1000")
    assert code == 2
    assert all(name in errors for name in PRESETS)


def test_too_few_gpus_are_answered_with_a_split(volley: Volley) -> None:
    code, out, errors = volley("plan", ALL, "--gpus", "32")
    assert (code, out) == (1, "")
    found = re.search(
        r"needs 64 GPUs \(16 actors with 2, 32 ranks with 1\) and there are 32: set actors.count=(\d+) and "
        r"learner.ranks=(\d+)",
        " ".join(errors.split()),
    )
    assert found is not None
    sets = ("--set", f"actors.count={found[1]}", "--set", f"learner.ranks={found[2]}")
    made = json.loads(volley("plan", ALL, "--gpus", "32", *sets, "--json")[1])
    assert made["samples_per_second"] == pytest.approx(made["split"]["samples_per_second"])


def test_no_split_is_suggested_where_none_fits(volley: Volley) -> None:
    code, _, errors = volley("plan", ALL, "--gpus", "3")
    assert code == 1
    assert "there are 3: no split of that number fits" in " ".join(errors.split())


@pytest.mark.parametrize("kind", ["sft", "eval", "rft"])
def test_other_kinds_of_job_are_refused(volley: Volley, tmp_path: Path, kind: str) -> None:
    tree: dict[str, Any] = {"kind": kind, "name": "x", "model": {"path": "m"}, "data": {"path": "d"}}
    tree |= {"steps": 3} if kind != "eval" else {}
    tree |= {"scorer": {"kind": "math"}} if kind != "sft" else {}
    code, out, errors = volley("plan", write(tmp_path, tree))
    assert (code, out) == (1, "")
    assert f"is a job of kind {kind}: only rl jobs have actors and a learner to plan for" in " ".join(errors.split())


def test_an_unknown_model_is_an_error_unless_its_config_is_given(volley: Volley, tmp_path: Path) -> None:
    file = write(tmp_path, yaml.safe_load(Path(EIGHT).read_text()))
    code, _, errors = volley("plan", file)
    assert code == 1
    assert "has no config.json: pass the model's with --config FILE" in " ".join(errors.split())
    assert volley("plan", file, "--config", str(JOBS / "models" / "qwen2.5-7b.json"))[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("{}", "Field required"),
        (json.dumps({**CPU, "tflops": -1}), "tflops: Input should be greater than 0"),
        (json.dumps({**CPU, "tflops": float("nan")}), "tflops: Input should be a finite number"),
        (json.dumps({**CPU, "speed": 1}), "speed: Extra inputs are not permitted"),
    ],
)
def test_a_bad_machine_file_is_named(volley: Volley, tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "machine.json"
    if text is not None:
        file.write_text(text)
    code, _, errors = volley("plan", EIGHT, "--machine", str(file))
    assert code == 1
    assert str(file) in errors
    assert message in errors


def test_only_half_a_job_on_gpus_is_refused(volley: Volley) -> None:
    code, _, errors = volley("plan", EIGHT, "--set", "actors.gpus=0")
    assert code == 1
    assert "must both have GPUs or both have none" in " ".join(errors.split())


def test_a_job_that_splits_rows_is_refused_with_what_to_write(volley: Volley) -> None:
    split = ("--set", "learner.ranks=4", "--set", "learner.sequence_parallel=2")
    code, _, errors = volley("plan", EIGHT, *split)
    assert code == 1
    assert "plan with --set learner.sequence_parallel=1" in " ".join(errors.split())
    assert volley("plan", EIGHT, "--set", "learner.ranks=4", "--set", "learner.sequence_parallel=1")[0] == 0


# ---- advice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            "actors.engine={tensor_parallel_size: 2, pipeline_parallel_size: 2}",
            "no formulas for pipeline_parallel_size",
        ),
        ("actors.engine={tensor_parallel_size: 4, gpu_memory_utilization: 5}", "write a number above 0, at most 1"),
        ("actors.engine={tensor_parallel_size: 4, gpu_memory_utilization: null}", "write a number above 0, at most 1"),
        ("actors.engine={tensor_parallel_size: 4, gpu_memory_utilization: abc}", "write a number above 0, at most 1"),
        ("learner.deepspeed={zero_optimization: {offload_optimizer: cpu}}", "offload_optimizer is 'cpu'"),
        (
            "learner.deepspeed={zero_optimization: {offload_param: {device: nvme}}}",
            "the formulas know {device: cpu} only",
        ),
        ("learner.gpus_per_rank=2", "write gpus_per_rank: 1"),
        ("learner.gpus_per_rank=0.5", "write gpus_per_rank: 1"),
        ("model.dtype=float32", "--tflops as well"),
    ],
)
def test_what_the_formulas_do_not_cover_is_refused(volley: Volley, change: str, told: str) -> None:
    sets = ["--set", "actors.gpus=4", "--set", "actors.engine={tensor_parallel_size: 4}", "--set", change]
    code, out, errors = volley("plan", EIGHT, "--gpus", "64", *sets)
    assert code in (1, 2)
    assert out == ""
    assert told in " ".join(errors.split())


def test_heads_that_cannot_be_split_are_named(volley: Volley) -> None:
    sets = ("--set", "actors.gpus=8", "--set", "actors.engine={tensor_parallel_size: 8}")
    code, _, errors = volley("plan", EIGHT, "--gpus", "64", *sets)
    assert code == 1
    assert "tensor_parallel_size: 8 must divide the model's 28 heads" in " ".join(errors.split())


def advice(volley: Volley, *arguments: str) -> str:
    return str(json.loads(volley("plan", *arguments, "--json")[1])["advice"])


def test_advice_to_fit_is_enough_when_followed(volley: Volley) -> None:
    told = advice(volley, EIGHT, "--gpu-gib", "60")
    assert "learner.gradient_checkpointing: true saves 22.4 GiB per rank, which suffices" in told
    assert volley("plan", EIGHT, "--gpu-gib", "60", "--set", "learner.gradient_checkpointing=true")[0] == 0
    both = advice(volley, EIGHT, "--gpu-gib", "34", "--gpus", "8")
    assert "learner.tokens_per_micro_batch: 3584, learner.gradient_checkpointing: true, learner.deepspeed.zero_" in both
    assert "Use GPUs with more memory" in advice(volley, ALL, "--gpu-gib", "10")


def test_advice_for_actors_is_enough_when_followed(volley: Volley) -> None:
    told = advice(volley, ALL, "--gpu-gib", "36", "--set", "actors.gpus=1", "--set", "actors.engine={}", "--gpus", "96")
    found = re.search(r"actors.gpus: (\d) with actors.engine: {tensor_parallel_size: (\d)} suffices", told)
    assert found is not None
    sets = ("--set", f"actors.gpus={found[1]}", "--set", f"actors.engine={{tensor_parallel_size: {found[2]}}}")
    assert volley("plan", ALL, "--gpu-gib", "36", "--gpus", "96", *sets)[0] == 0
    told = advice(volley, EIGHT, "--set", "actors.engine={gpu_memory_utilization: 0.1}")
    assert "actors.engine.gpu_memory_utilization: 0.92 suffices" in told
    told = advice(volley, ONE, "--set", "actors.kv_cache_gb=0.01")
    found = re.search(r"needs actors.kv_cache_gb: (\d+\.\d+)", told)
    assert found is not None
    assert volley("plan", ONE, "--set", f"actors.kv_cache_gb={found[1]}")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        ((EIGHT,), "actors.count: (?P<actors>.+) with learner.ranks: (?P<ranks>.+)"),
        ((EIGHT, "--score-seconds", "9"), "reward_workers.count: (?P<workers>.+)"),
        ((EIGHT, "--set", "max_lag=0"), "max_lag: (?P<lag>.+)"),
    ],
)
def test_advice_quotes_what_following_it_gains(volley: Volley, arguments: tuple[str, ...], change: str) -> None:
    told = advice(volley, *arguments)
    found = re.search(change + r" raises samples/s from ([\d.]+) to ([\d.]+)\.", told)
    assert found is not None, told
    keys = {"actors": "actors.count", "ranks": "learner.ranks", "workers": "reward_workers.count", "lag": "max_lag"}
    sets = [word for name, value in found.groupdict().items() for word in ("--set", f"{keys[name]}={value}")]
    before, after = (
        json.loads(volley("plan", *arguments, *each, "--json")[1])["samples_per_second"] for each in ((), sets)
    )
    assert (f"{before:.3g}", f"{after:.3g}") == found.groups()[-2:]
    assert after > before


def test_a_shared_gpu_is_given_to_one_role_if_there_are_more(volley: Volley) -> None:
    assert "each with one GPU" in advice(volley, ONE, "--gpus", "4")
