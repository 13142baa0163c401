"""Is a job one that this server takes? What it may name, then everything that ``volley check`` looks at."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from pydantic import ValidationError

from services.api.deepspeed_options import not_taken
from services.api.problems import FieldProblem, Problem, invalid_job
from services.api.settings import EVERYTHING, ApiSettings
from services.job_file import Job
from volley.errors import HostError, JobError
from volley.job import JOB

# vLLM's options that take numbers and names of its own. Others take classes by import path, or run a model's code.
ENGINE_OPTIONS = frozenset(
    {
        *("async_scheduling", "block_size", "cpu_offload_gb", "data_parallel_size", "disable_custom_all_reduce"),
        *("disable_log_stats", "disable_sliding_window", "dtype", "enable_chunked_prefill", "enable_expert_parallel"),
        *("enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_dtype", "max_model_len"),
        *("kv_cache_memory_bytes", "long_prefill_token_threshold", "max_num_batched_tokens", "max_num_seqs"),
        *("max_num_partial_prefills", "max_parallel_loading_workers", "pipeline_parallel_size", "quantization"),
        *("prefix_caching_hash_algo", "scheduling_policy", "seed", "swap_space", "tensor_parallel_size"),
    }
)
_SECRET = re.compile(r"key|token|secret|passw|pwd|sig|auth|credential", re.IGNORECASE)
CHECKS_AT_ONCE = 2


class Checker(Protocol):
    """Reads what a job names."""

    async def __call__(self, job: Job) -> None:
        """Raises `JobError` for a job that can not run, `HostError` where that could not be found out."""


def parse(tree: Mapping[str, Any], settings: ApiSettings) -> Job:
    """The job, resolved. Raises `Problem` 422 for one that is none, or that this server does not take."""
    try:
        job = JOB.validate_python(tree)
    except ValidationError as error:
        raise invalid_job(error) from error
    if errors := list(refusals(tree, settings)):
        raise Problem(422, "job-not-taken", "\n".join(f"{e.pointer}: {e.detail}" for e in errors), errors=errors)
    return job


def refusals(tree: Any, settings: ApiSettings, pointer: str = "/job") -> Iterator[FieldProblem]:
    """What of a valid job this server does not take: foreign code, relative paths, secrets in the open."""
    if isinstance(tree, list | tuple):
        for i, each in enumerate(tree):
            yield from refusals(each, settings, f"{pointer}/{i}")
    if not isinstance(tree, Mapping):
        return
    if tree.get("kind") == "python" and "target" in tree:
        yield from _code(str(tree["target"]), settings, f"{pointer}/target")
    if tree.get("kind") == "http" and "url" in tree:
        yield from _address(tree, settings, pointer)
    for key, value in tree.items():
        where = f"{pointer}/{key}"
        if key == "path" and isinstance(value, str) and not value.startswith("/"):
            yield FieldProblem(pointer=where, detail=f"{value!r} is relative: write the whole path")
        if key == "runtime_env" and value and EVERYTHING not in settings.allow_code:
            yield FieldProblem(
                pointer=where, detail="brings code; only a server whose setting allow_code holds * takes it"
            )
        if key == "engine" and isinstance(value, Mapping):
            yield from _engine(value, settings, where)
        elif key == "deepspeed" and EVERYTHING not in settings.allow_code:
            yield from (FieldProblem(pointer=at, detail=detail) for at, detail in not_taken(value, where))
        elif key != "deepspeed":
            yield from refusals(value, settings, where)


def _code(target: str, settings: ApiSettings, where: str) -> Iterator[FieldProblem]:
    module = target.partition(":")[0]
    if EVERYTHING in settings.allow_code:
        return
    if not any(module == each or module.startswith(f"{each}.") for each in settings.allow_code):
        allowed = ", ".join(settings.allow_code) or "nothing"
        yield FieldProblem(
            pointer=where,
            detail=f"the server's setting allow_code allows code from {allowed}, not from {module}: "
            f"start the service with: volley up --import-from DIR --allow-code {module}",
        )


def _engine(options: Mapping[str, Any], settings: ApiSettings, where: str) -> Iterator[FieldProblem]:
    for name in sorted(options.keys() - ENGINE_OPTIONS) if EVERYTHING not in settings.allow_code else ():
        yield FieldProblem(
            pointer=f"{where}/{name}",
            detail="may name code; only a server whose setting allow_code holds * takes it",
        )


def _address(scorer: Mapping[str, Any], settings: ApiSettings, where: str) -> Iterator[FieldProblem]:
    try:
        parts = urlsplit(str(scorer["url"]))
    except ValueError as error:
        yield FieldProblem(pointer=f"{where}/url", detail=str(error))
        return
    if "@" in parts.netloc or any(_SECRET.search(key) for key, _ in parse_qsl(parts.query, keep_blank_values=True)):
        yield FieldProblem(
            pointer=f"{where}/url",
            detail="holds a secret, and records are read by many: put it into an environment variable of the reward "
            "workers and name that in token_env",
        )
    name = scorer.get("token_env")
    if name is not None and not any(str(name).startswith(each) for each in settings.scorer_env):
        allowed = ", ".join(settings.scorer_env) or "nothing"
        yield FieldProblem(
            pointer=f"{where}/token_env",
            detail=f"the server's setting scorer_env allows variables that begin with {allowed}",
        )


class ProcessChecker:
    """Checks each job in a process of its own: it imports the user's code, and may need much memory or hang."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._gate = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def __call__(self, job: Job) -> None:
        try:
            async with asyncio.timeout(self._seconds), self._gate:
                problem = await _check(job.model_dump_json().encode())
        except TimeoutError:
            raise HostError(
                f"the job was not checked within {self._seconds:g} s: try again, or raise the server's setting "
                "check_seconds"
            ) from None
        if problem:
            raise JobError(problem)


async def _check(job: bytes) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.api.check_job"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    try:
        out, err = await process.communicate(job)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return str(json.loads(out.splitlines()[-1])["problem"])
    except (IndexError, ValueError, KeyError, TypeError) as error:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        raise HostError(f"the check of the job ended with code {process.returncode}: {last[:300]}") from error
