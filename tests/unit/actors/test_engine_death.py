"""A call of an engine whose process ends: vLLM may fail the call long before the process has ended."""

import asyncio
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from actors.config import ActorConfig
from tests.models import character_tokenizer, tiny_llama
from volley.errors import WorkerDied
from volley.job import ActorsSpec
from volley.model import ModelSpec

FAILURE = "Call to pause_scheduler method failed: Executor failed."


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """`actors.engine`, whose imports warn of deprecated calls, which the tests' settings make errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import actors.engine
    return actors.engine


@pytest.fixture
def process() -> Iterator[BaseProcess]:
    started = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    started.start()
    yield started
    started.kill()
    started.join()


class LateCode:
    """A process that has ended, and whose exit code is known 50 ms after it was first asked for."""

    def __init__(self) -> None:
        self.sentinel, end = os.pipe()
        os.close(end)
        self._asked: float | None = None

    @property
    def exitcode(self) -> int | None:
        self._asked = self._asked or time.monotonic()
        return -9 if time.monotonic() > self._asked + 0.05 else None


def engine_of(module: ModuleType, process: Any, folder: Path, failure: type[Exception] = Exception) -> Any:
    """An engine whose model is in ``process``, and whose calls fail, as vLLM's do unless another type is given."""

    async def fails() -> None:
        raise failure(FAILURE)

    core = SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[process])))
    config = ActorConfig(ModelSpec(path=tiny_llama(folder / "model")), ActorsSpec(), 64, 0, folder)
    llm: Any = SimpleNamespace(engine_core=core, get_weight_version=fails)
    return module.Engine(llm, character_tokenizer(), config, "actor-0", folder / "log")


@pytest.mark.parametrize("ended", [False, True])
async def test_a_call_that_fails_in_the_process_is_the_death_of_the_worker_at_once(
    module: ModuleType, process: BaseProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    monkeypatch.setattr(module, "EXIT_SECONDS", 600)
    engine = engine_of(module, process, tmp_path)
    if ended:
        process.kill()
    with pytest.raises(WorkerDied, match=r"actor-0 died: its engine (failed: .*Executor failed|exited with code -9)"):
        await asyncio.wait_for(engine.ping(), 60)


async def test_what_vllm_refuses_to_send_is_an_error_of_its_own(
    module: ModuleType, process: BaseProcess, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=FAILURE):
        await asyncio.wait_for(engine_of(module, process, tmp_path, ValueError).ping(), 60)


async def test_the_exit_code_is_waited_for(module: ModuleType, tmp_path: Path) -> None:
    process = LateCode()
    engine = engine_of(module, process, tmp_path)
    died = await asyncio.wait_for(engine.until_death(), 60)
    os.close(process.sentinel)
    assert died.cause == "its engine exited with code -9"
