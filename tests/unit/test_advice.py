"""What is said of changes, folders and hosts that do not suit, and what an interrupted start leaves behind."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import ray

from services.data.tokens import load_tokenizer
from services.jobs.job_file import parse_overrides
from services.jobs.needs import needs_of
from services.recording.display import Display
from services.runs import run as run_module
from services.runs.rl import RLRun
from services.runs.run import run_alone
from services.stack.ray import _advice
from services.store.desired import change
from services.store.folder import RunFolder
from tests.models import tiny_llama
from volley.errors import JobError
from volley.job import RLJob
from volley.state import Desired


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def job_of(model: Path, **changes: object) -> RLJob:
    return RLJob.model_validate(
        {
            "name": "fake",
            "steps": 3,
            "model": {"path": model},
            "data": {"path": "d"},
            "scorer": {"kind": "countdown"},
            "objective": {"kind": "max_at_k", "k": 2},
            **changes,
        }
    )


@pytest.mark.parametrize("key", ["temperature", "steps", "k8"])
def test_a_key_that_cannot_be_changed_names_those_that_can(model: Path, key: str) -> None:
    with pytest.raises(
        JobError, match=f"^{key}: neither a field of the objective, such as k, nor one of actors, "
    ) as told:
        change(Desired(), job_of(model), {"objective": {key: 1}})
    assert all(name in str(told.value) for name in ("learning_rate", "max_lag", "reward_workers", "live run"))


def test_a_change_without_a_value_is_told_as_it_was_written() -> None:
    with pytest.raises(JobError, match=r"^'k': write key=value, such as k=4$"):
        parse_overrides(["k"], option="", example="k=4")


def test_a_model_without_a_tokenizer_says_which_files_to_copy(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(JobError, match=r"has no tokenizer: copy tokenizer.json and tokenizer_config.json there"):
        load_tokenizer(folder)


def test_a_cluster_without_gpus_is_told_how_to_do_without(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = needs_of(job_of(model, learner={"gpus_per_rank": 1}))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    assert _advice(needs).startswith("It has no GPU: write actors.gpus: 0 and learner.gpus_per_rank: 0")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 0.5})
    assert _advice(needs).startswith("Lower actors.count")
    assert _advice(needs_of(job_of(model))).startswith("Lower actors.count")


async def test_a_run_interrupted_as_it_starts_has_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = asyncio.Event()

    @contextlib.asynccontextmanager
    async def slow(*_: object, **__: object) -> AsyncIterator[None]:
        reached.set()
        await asyncio.sleep(60)
        yield

    monkeypatch.setattr(run_module, "local_stack", slow)
    job = job_of(model)
    folder = RunFolder.create(tmp_path, job)
    running = asyncio.create_task(run_alone(RLRun(job, [], [], 8, None), folder, Display(quiet=True)))
    await reached.wait()
    assert folder.summary()["state"] == "starting"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (folder.summary()["state"], folder.summary()["problem"]) == ("stopped", "stopped by its user")
