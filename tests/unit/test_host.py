"""What a job needs from its host, and a clear error if the host lacks it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.cli.doctor import examine
from services.jobs.needs import GIB, Needs, check_host, needs_of
from services.stack.keeper import default_cpus
from volley.base import replaced
from volley.errors import HostError, JobError
from volley.job import RLJob
from volley.lora import LoraSpec
from volley.shape import Shape, micro_batch_tokens
from volley.update import LearnerSpec

SMOLLM2 = {
    **{"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
    **{"intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True},
}


def job(model: Path, **changes: Any) -> RLJob:
    return RLJob.model_validate(
        {
            "name": "x",
            "steps": 1,
            "model": {"path": model},
            "data": {"path": model / "d.jsonl"},
            "scorer": {"kind": "countdown"},
            "objective": {"kind": "mean"},
            **changes,
        }
    )


def test_needs_grow_with_every_role_and_with_the_model(tmp_path: Path) -> None:
    small = needs_of(job(tmp_path))
    more = needs_of(job(tmp_path, actors={"count": 2}, learner={"ranks": 2}, reward_workers={"count": 3}))
    assert more.cpus == pytest.approx(small.cpus + 1 + 1 + 0.2)
    assert more.memory_bytes > small.memory_bytes + 2 * GIB
    save_file({"w": torch.zeros(1 << 18, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert needs_of(job(tmp_path)).memory_bytes - small.memory_bytes == (1 + 5 + 2) << 20, "the job computes in float32"
    half = job(tmp_path)
    half = replaced(half, model=replaced(half.model, dtype="bfloat16"))
    assert needs_of(half).memory_bytes - small.memory_bytes == (1 + 10 + 2) << 19, "ZeRO keeps a float32 master copy"


def test_a_value_model_is_trained_whole_beside_adapters_too(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1 << 18)}, tmp_path / "model.safetensors")
    whole, critic = job(tmp_path), job(tmp_path, update={"value_model": {}})
    for lora in (None, LoraSpec(rank=4)):
        alone, beside = (needs_of(replaced(each, model=replaced(each.model, lora=lora))) for each in (whole, critic))
        assert beside.memory_bytes - alone.memory_bytes == 4 << 20


def test_the_activations_of_a_micro_batch_are_part_of_the_needs(tmp_path: Path) -> None:
    without = needs_of(job(tmp_path)).memory_bytes
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    shape = Shape.of(tmp_path)
    assert shape is not None
    per_token = 30 * ((6 * 576 + 2 * 192 + 4 * 1536) * 4 + 2 * 576 * 4)
    assert shape.kept_bytes(4, checkpointed=False) == per_token

    def kept(**changes: Any) -> int:
        return needs_of(job(tmp_path, **changes)).memory_bytes - without

    assert kept() == 1024 * per_token, "a power of two that keeps less than 2 GiB"
    assert kept(learner={"tokens_per_micro_batch": 4096}) == 4096 * per_token
    assert kept(learner={"tokens_per_micro_batch": 10**6}, prompts_per_step=1, sampling={"n": 4, "max_tokens": 88}) == (
        4 * (512 + 88) * per_token
    ), "no more than a batch"
    assert kept(learner={"gpus_per_rank": 1}) == 0
    assert kept(learner={"gradient_checkpointing": True}) < 1 << 31


def test_a_micro_batch_is_large_on_a_gpu_and_small_for_a_large_model_on_a_cpu(tmp_path: Path) -> None:
    def tokens(shape: dict[str, Any] | None, **learner: Any) -> int:
        made = None if shape is None else Shape.of_config(shape)
        return micro_batch_tokens(LearnerSpec.model_validate(learner), made, 4)

    small = {**SMOLLM2, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    assert tokens(small) == tokens(None) == 2048
    assert tokens(SMOLLM2) == 1024
    assert tokens(SMOLLM2, gpus_per_rank=1) == tokens(None, gpus_per_rank=1) == 16384
    assert tokens({**SMOLLM2, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}) == 512
    assert tokens(SMOLLM2, tokens_per_micro_batch=100) == 100


def test_a_file_that_is_not_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(JobError, match=r"model\.safetensors is not a safetensors file"):
        needs_of(job(tmp_path))


def test_the_service_offers_the_machines_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert default_cpus() == 4, "one run with a second actor, but not two runs"
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert default_cpus() == 6


def test_too_little_memory_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.jobs.needs.available_memory", lambda: 2 * GIB)
    with pytest.raises(HostError, match=r"needs about 3\.0 GiB of memory and 2\.0 GiB are free: lower actors\.count"):
        check_host(Needs(1, 0, 3 * GIB, 1), tmp_path)


def test_too_little_shared_memory_is_a_clear_error(tmp_path: Path) -> None:
    free = shutil.disk_usage("/dev/shm").free
    with pytest.raises(HostError, match="--shm-size"):
        check_host(Needs(1, 0, 1, free + GIB), tmp_path)


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage

    def full(path: Any) -> Any:
        return real(path)._replace(free=1 << 20) if Path(path) == tmp_path else real(path)

    monkeypatch.setattr("services.jobs.needs.shutil.disk_usage", full)
    with pytest.raises(HostError, match=r"has 0\.0 GiB of disk left"):
        check_host(Needs(1, 0, 1, 1), tmp_path)


def test_a_host_that_can_run_volley_has_no_blocking_finding() -> None:
    assert [finding for finding in examine() if finding.blocks] == []


def test_a_missing_package_is_reported_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.doctor.PACKAGES", ("no_such_package",))
    (finding,) = [finding for finding in examine() if finding.blocks]
    assert (finding.what, finding.state) == ("no_such_package", "not installed")
    assert "make setup" in finding.fix
