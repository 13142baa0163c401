"""Advice on bfloat16, by what /proc/cpuinfo says and where the job computes."""

from pathlib import Path
from typing import Any

import pytest

from services.jobs.job_file import Job
from services.jobs.machine import CPUINFO, bfloat16_notice, gpu_notice
from volley.job import JOB

SAMPLED: dict[str, Any] = {
    "data": {"path": "/d"},
    "scorer": {"kind": "math"},
    "sampling": {"n": 2, "max_tokens": 4},
}
KINDS: dict[str, dict[str, Any]] = {
    "rl": {**SAMPLED, "objective": {"kind": "mean"}, "steps": 1, "prompts_per_step": 1},
    "eval": {**SAMPLED, "ks": [1]},
    "sft": {"data": {"path": "/d"}, "steps": 1, "rows_per_step": 1},
}


def job_of(kind: str, dtype: str = "bfloat16", **more: Any) -> Job:
    job: Job = JOB.validate_python(
        {"kind": kind, "name": "x", "model": {"path": "/m", "dtype": dtype}, **KINDS[kind], **more}
    )
    return job


def processor(folder: Path, *flags: str) -> Path:
    """A cpuinfo of two processors with these flags beside the usual ones."""
    one = f"processor\t: 0\nmodel name\t: Some bf16 amx_bf16\nflags\t\t: {' '.join(('fpu', 'avx2', *flags))}\n\n"
    (folder / "cpuinfo").write_text(one * 2)
    return folder / "cpuinfo"


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_without_instructions_for_it_is_mentioned(kind: str, tmp_path: Path) -> None:
    assert "write dtype: float32" in bfloat16_notice(job_of(kind), processor(tmp_path, "avx512f"))
    for flag in ("amx_bf16", "avx512_bf16"):
        assert bfloat16_notice(job_of(kind), processor(tmp_path, flag)) == ""
    assert bfloat16_notice(job_of(kind, "float32"), processor(tmp_path)) == ""


def test_what_runs_on_gpus_needs_none(tmp_path: Path) -> None:
    plain = processor(tmp_path)
    on_gpus: dict[str, Any] = {"learner": {"gpus_per_rank": 1}, "actors": {"gpus": 1}}
    assert bfloat16_notice(job_of("rl", **on_gpus), plain) == ""
    for role in on_gpus:
        assert bfloat16_notice(job_of("rl", **{role: on_gpus[role]}), plain), "the other role is on CPUs"
    assert bfloat16_notice(job_of("eval", actors={"gpus": 1}), plain) == ""
    assert bfloat16_notice(job_of("sft", learner={"gpus_per_rank": 1}), plain) == ""


def test_gpus_that_this_host_lacks_are_mentioned(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    both = job_of("rl", learner={"gpus_per_rank": 0.5}, actors={"gpus": 0.5})
    assert gpu_notice(both, driver).startswith("actors.gpus and learner.gpus_per_rank: this host has no GPU; write 0")
    assert gpu_notice(job_of("sft", learner={"gpus_per_rank": 1}), driver).startswith("learner.gpus_per_rank: this")
    assert gpu_notice(job_of("eval", actors={"gpus": 1}), driver).startswith("actors.gpus: this host")
    assert [gpu_notice(job_of(kind), driver) for kind in KINDS] == ["", "", ""]
    driver.touch()
    assert gpu_notice(both, driver) == ""


def test_a_processor_that_does_not_tell_is_not_judged(tmp_path: Path) -> None:
    assert bfloat16_notice(job_of("rl"), tmp_path / "none") == ""
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert bfloat16_notice(job_of("rl"), tmp_path / "cpuinfo") == "", "Arm"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n")
    assert bfloat16_notice(job_of("rl"), tmp_path / "cpuinfo") == ""


def test_this_machine_has_a_cpuinfo() -> None:
    assert CPUINFO.exists()
