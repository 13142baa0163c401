"""One vLLM engine: starts warm, generates groups, and changes weights in the middle of samples."""

import asyncio
import contextlib
import gc
import itertools
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from actors.columns import to_group
from actors.config import ActorConfig, GenerateRequest
from actors.gateway.session import Drawn
from actors.options import engine_args
from actors.stops import stop_token_ids
from volley.errors import JobError, WorkerDied
from volley.processes import last_lines
from volley.records import Group
from volley.weight_group import WeightGroupTerms

_T = TypeVar("_T")
OnTokens = Callable[[list[int]], int | None]
EXIT_SECONDS = 5.0
WEIGHTS, CACHE = ("weights",), ("kv_cache",)  # vLLM's names for what sleeping gives back


class Engine:
    """A started engine. Its methods raise ``WorkerDied`` once its process has ended, and if a call fails in it."""

    def __init__(
        self, llm: AsyncLLM, tokenizer: PreTrainedTokenizerBase, config: ActorConfig, name: str, log: Path
    ) -> None:
        self._llm, self._tokenizer, self._config, self._name, self._log = llm, tokenizer, config, name, log
        self._stop_ids = stop_token_ids(config.model.folder, tokenizer)
        self._requests = itertools.count()
        self._open = asyncio.Event()  # cleared while weights are loaded, and while it sleeps
        self._open.set()
        self._version = 0
        self._asleep = False
        self._given_back: tuple[str, ...] = WEIGHTS + CACHE  # while it sleeps
        self._processes = list(llm.engine_core.resources.engine_manager.processes)
        self._death: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._exits: list[asyncio.Future[None]] = []  # the loop holds its tasks only weakly
        for process in self._processes:
            asyncio.get_running_loop().add_reader(process.sentinel, self._on_exit, process)

    @classmethod
    async def start(cls, config: ActorConfig, index: int, name: str, log: Path) -> "Engine":
        """Load the model and draw a first group of samples.

        Raises:
            JobError: the model does not load, or vLLM does not have an engine option.
        """
        args = engine_args(config, index)
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.model.folder)
            llm = AsyncLLM.from_engine_args(args)
        except Exception as error:  # the model's code may raise anything
            cause = _root_cause(error, log) or f"its process ended without an error message (log: {log})"
            raise JobError(f"{name}: {_model(config.model.folder)} does not load: {cause}") from error
        engine = cls(llm, tokenizer, config, name, log)
        await engine._alive(engine._prepare())
        gc.collect()
        gc.freeze()  # otherwise every full collection walks all imported objects while outputs wait
        return engine

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def stop_ids(self) -> list[int]:
        """The tokens that end a sample."""
        return self._stop_ids

    @property
    def version(self) -> int:
        """The version of the weights with which a new sample starts."""
        return self._version

    @property
    def max_model_len(self) -> int:
        return int(self._llm.model_config.max_model_len)

    @property
    def vocab_size(self) -> int:
        return int(self._llm.model_config.get_vocab_size())

    @property
    def model_processes(self) -> int:
        """Number of processes that hold a part of the model."""
        return int(self._llm.vllm_config.parallel_config.world_size)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    async def generate(self, request: GenerateRequest) -> Group:
        """Draw ``request.n`` samples. The group's log-probs are those of the distribution they were drawn from.

        Raises:
            JobError: vLLM rejects the request.
        """
        started = time.perf_counter()
        await self._open.wait()
        try:
            completions = await self._alive(self._completions(request))
        except VLLMClientError as error:
            raise JobError(f"vLLM rejects prompt {request.prompt_id!r}: {error}") from error
        return to_group(request, completions, self._decode, actor=self._name, seconds=time.perf_counter() - started)

    async def draw(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | None,
        on_tokens: OnTokens | None,
        more: Mapping[str, float] | None = None,
    ) -> Drawn:
        """Draw one answer, as `generate` does.

        Args:
            on_tokens: called with the tokens of each step. The answer ends once it returns how many tokens it has.
            more: further fields of vLLM's SamplingParams.

        Raises:
            JobError: vLLM rejects the prompt or the sampling.
        """
        kind = RequestOutputKind.FINAL_ONLY if on_tokens is None else RequestOutputKind.DELTA
        sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed, **(more or {})}
        try:
            params = self._params(n=1, kind=kind, **sampling)
        except (VLLMClientError, ValueError, TypeError) as error:
            raise JobError(f"vLLM rejects the sampling: {error}") from error
        await self._open.wait()
        try:
            return await self._alive(self._draw(prompt, params, on_tokens))
        except VLLMClientError as error:
            raise JobError(f"vLLM rejects the prompt: {error}") from error

    async def sleep(self) -> None:
        """Pause in the middle of samples and give back the cache and, on a GPU, the memory of the weights.

        Samples under way keep their tokens. Does nothing if it sleeps. Not to be called during `load`.
        """
        self._open.clear()
        if self._asleep and self._given_back != WEIGHTS + CACHE:
            await self._alive(self._wake())
        if not self._asleep:
            await self._alive(self._sleep())

    async def wake(self) -> None:
        """Continue after `sleep` with the weights it had."""
        await self._alive(self._wake())
        self._open.set()

    async def load(self, version: int, paths: list[str], *, lent: bool = False) -> tuple[float, float]:
        """Load new weights in the middle of samples, and wake up if it sleeps. Only one call at a time.

        Args:
            version: the version of every token sampled from now on.
            paths: safetensors files that the engine's process can open, in order; [] for what the weight group brought.
            lent: the files are the learner's, which has not left the device yet: sleep on, until `wake`.

        Returns:
            The seconds for which generation paused, and the seconds of these that loading took.
        """
        self._open.clear()
        if lent:
            return await self._alive(self._load_asleep(version, paths))
        try:
            return await self._alive(self._load(version, paths))
        finally:
            self._open.set()

    async def join_weight_group(self, terms: WeightGroupTerms) -> None:
        """Let the engine's processes join in the background."""
        await self._alive(self._llm.init_weight_transfer_engine(self._setup(actor=self._name, terms=asdict(terms))))

    async def save_served_weights(self, path: str) -> None:
        """Write the weights the engine computes with to ``path``, a safetensors file with checkpoint names."""
        await self._alive(self._llm.collective_rpc("save_served_weights", args=(path,)))

    async def until_death(self) -> WorkerDied:
        """Wait until the engine's process has ended; returns why."""
        await asyncio.wait({self._death})
        return self._died(f"its engine exited with code {self._death.result()}")

    async def ping(self) -> None:
        """Wait for an answer, which the engine gives between two of its steps."""
        await self._alive(self._llm.get_weight_version())

    async def stop(self) -> None:
        """End the engine's processes and drop all samples in flight."""
        for process in self._processes:
            asyncio.get_running_loop().remove_reader(process.sentinel)
        await asyncio.to_thread(self._llm.shutdown, EXIT_SECONDS)

    async def _prepare(self) -> None:
        await self._llm.init_weight_transfer_engine(self._setup())
        await self._llm.update_weight_version("0")
        warm_up = GenerateRequest(
            -1, "", np.array([0], dtype=np.int32), min(16, self._config.actors.max_num_seqs), 1.0, 1.0, 2
        )
        await self._completions(warm_up)

    def _setup(self, **weight_group: object) -> WeightTransferInitRequest:
        return WeightTransferInitRequest({"partial": self._config.model.lora is not None, **weight_group})

    async def _completions(self, request: GenerateRequest) -> list[CompletionOutput]:
        params = self._params(
            n=request.n,
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens,
            seed=request.seed,
        )
        async for output in self._outputs(request.prompt_p.tolist(), params):
            final = output
        return list(final.outputs)

    async def _draw(self, prompt: list[int], params: SamplingParams, on_tokens: OnTokens | None) -> Drawn:
        tokens: list[int] = []
        logprobs: list[float] = []
        request, end = str(next(self._requests)), None
        async with contextlib.aclosing(self._outputs(prompt, params, request)) as outputs:
            async for output in outputs:
                (last,) = output.outputs
                tokens += last.token_ids
                logprobs += last.logprobs.logprobs
                if on_tokens is not None and end is None:
                    end = on_tokens(list(last.token_ids))
                    if end is not None:  # one more output follows: only the last one has the versions
                        await self._llm.abort(request)
        versions = [int(span.version) for span in last.weight_versions for _ in range(span.start, span.end)]
        if not len(tokens) == len(logprobs) == len(versions):
            raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probs, {len(versions)} versions in one call")
        drawn = Drawn(tokens, logprobs, versions, stopped=last.finish_reason == "stop")
        return drawn if end is None else drawn.first(end)

    def _params(self, *, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY, **sampling: object) -> SamplingParams:
        return SamplingParams(
            **sampling,
            stop_token_ids=self._stop_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=kind,
        )

    def _outputs(
        self, prompt: list[int], params: SamplingParams, request: str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        # The salt prevents a prompt from reusing cached keys and values of other weights.
        salted = tokens_input(prompt, cache_salt=str(self._version))
        outputs: AsyncGenerator[RequestOutput] = self._llm.generate(
            salted, params, request or str(next(self._requests))
        )
        return outputs

    async def _load(self, version: int, paths: list[str]) -> tuple[float, float]:
        llm, core = self._llm, self._llm.engine_core
        if self._asleep:
            await llm.collective_rpc("take_memory_again", args=(self._given_back,))
        # The engine's own clock is read, because its current step still generates tokens after the request to pause.
        _, paused = await asyncio.gather(
            core.pause_scheduler_async(mode="keep", clear_cache=False), llm.collective_rpc("clock")
        )
        load = await self._change(version, paths)
        _, _, resumed = await asyncio.gather(
            llm.update_weight_version(str(version)), llm.resume_generation(), llm.collective_rpc("clock")
        )
        self._asleep = False
        return max(resumed) - min(paused), load

    async def _load_asleep(self, version: int, paths: list[str]) -> tuple[float, float]:
        if not self._asleep:
            raise RuntimeError("an engine that does not sleep cannot read the learner's memory")
        await self._llm.collective_rpc("take_memory_again", args=(WEIGHTS,))
        self._given_back = CACHE
        load = await self._change(version, paths)
        await self._llm.update_weight_version(str(version))
        return load, load

    async def _change(self, version: int, paths: list[str]) -> float:
        try:
            loads = await self._llm.collective_rpc("change_weights", args=(version, paths))
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM documents no type; the model is only half loaded and cannot continue
            raise self._died(f"weights {version} do not load: {error}") from error
        self._version = version
        return float(max(loads))

    async def _sleep(self) -> None:
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        # Samples under way are computed again from their tokens, since their keys and values go too.
        await self._llm.reset_prefix_cache(reset_running_requests=True)
        await self._llm.collective_rpc("give_memory_back")
        self._asleep, self._given_back = True, WEIGHTS + CACHE

    async def _wake(self) -> None:
        if self._asleep:
            await self._llm.collective_rpc("take_memory_again", args=(self._given_back,))
            await self._llm.resume_generation()
            self._asleep = False

    def _decode(self, bodies: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(bodies, skip_special_tokens=True)  # type: ignore[no-any-return]

    async def _alive(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await ``work``, but raise ``WorkerDied`` as soon as the engine's process has ended or failed a call."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._death), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise self._died(f"its engine exited with code {self._death.result()}")
        except (EngineDeadError, EngineGenerateError) as error:
            raise self._died(await self._why(error)) from error
        except Exception as error:
            if type(error) is not Exception:
                raise
            # vLLM's, for a call that failed in the engine, which then is ending, perhaps slowly, or did half of it.
            raise self._died(await self._why(error)) from error
        finally:
            task.cancel()

    async def _why(self, error: Exception) -> str:
        """Why the engine failed: the error, or how its process ended, which may be known a moment later."""
        if (cause := _root_cause(error, self._log)) is not None:
            return f"its engine failed: {cause}"
        await asyncio.wait({self._death}, timeout=EXIT_SECONDS)
        if self._death.done():
            return f"its engine exited with code {self._death.result()}"
        return f"its engine failed without an error message (log: {self._log})"

    def _on_exit(self, process: BaseProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        self._exits.append(asyncio.ensure_future(self._record_exit(process)))

    async def _record_exit(self, process: BaseProcess) -> None:
        """Set ``_death``. The exit code may be known only a moment after the end, and to another thread first."""
        deadline = time.monotonic() + EXIT_SECONDS
        while process.exitcode is None and time.monotonic() < deadline:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        if not self._death.done():
            self._death.set_result(process.exitcode)

    def _died(self, cause: str) -> WorkerDied:
        return WorkerDied(self._name, cause, last_lines(self._log))


def _model(folder: Path) -> str:
    """The folder and the model's type, to which the error may be due."""
    try:
        return f"{folder}, a model of type {json.loads((folder / 'config.json').read_text())['model_type']},"
    except (OSError, ValueError, LookupError, TypeError):
        return str(folder)


def _root_cause(error: Exception, log: Path) -> str | None:
    """One line: the error, or if vLLM only refers to its log, the last error in the log; None if that has none."""
    message = " ".join(str(error).split())
    if "root cause" not in message:
        return message[:500]
    errors = re.findall(r"\b\w+(?:Error|Exception): .+$", last_lines(log, 400), flags=re.MULTILINE)
    causes = [line for line in errors if "root cause" not in line]
    return f"{causes[-1]} (log: {log})" if causes else None
