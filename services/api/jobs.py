"""Whether this server accepts a job: first what the job may name, then everything that ``volley check`` checks."""

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit

from pydantic import BaseModel, ValidationError

from reward_servers.http_gate import LOOPBACK_HOSTS
from services.api.cluster import Cluster, NoCluster
from services.api.deepspeed_options import rejected_options
from services.api.problems import FieldProblem, Problem, invalid_job
from services.api.settings import EVERYTHING, ApiSettings
from services.jobs.job_file import Job
from services.jobs.needs import check_cluster
from services.notifications.notices import key_problem
from volley.errors import HostError, JobError
from volley.hosts import is_inside
from volley.job import JOB
from volley.webhooks import ANY_HOST

# vLLM's options that take numbers or vLLM's own names. Other options import classes by path, or run a model's code.
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
_WITHOUT_HOST = frozenset({"file", "sqlite", "databricks", ""})
_SECRET = re.compile(r"key|token|secret|passw|pwd|sig|auth|credential", re.IGNORECASE)
CHECKS_AT_ONCE = 2


class Checker(Protocol):
    """Checks the files and code that a job names."""

    async def __call__(self, job: Job) -> None:
        """Raise `JobError` if the job cannot run, `HostError` if the check itself failed."""


def parse(tree: Mapping[str, Any], settings: ApiSettings) -> Job:
    """Return the resolved job. Raises `Problem` 422 if ``tree`` is no valid job or this server does not accept it."""
    try:
        job = JOB.validate_python(tree)
    except ValidationError as error:
        raise invalid_job(error) from error
    if errors := list(refusals(job, settings)):
        raise Problem(422, "job-not-taken", "\n".join(f"{e.pointer}: {e.detail}" for e in errors), errors=errors)
    return job


def refusals(part: object, settings: ApiSettings, pointer: str = "/job") -> Iterator[FieldProblem]:
    """Yield what this server rejects in a valid job: code it does not allow, relative paths, secrets in plain text.

    Args:
        part: the job, or a part of it, as models or as mappings.
    """
    if isinstance(part, list | tuple):
        for index, item in enumerate(part):
            yield from refusals(item, settings, f"{pointer}/{index}")
    elif isinstance(part, BaseModel | Mapping):
        options = _options(part)
        if (scorer_rule := SCORER_RULES.get(str(options.get("kind")))) is not None:
            yield from scorer_rule(options, settings, pointer)
        for key, value in options.items():
            if (rule := KEY_RULES.get(key)) is not None:
                yield from rule(value, settings, f"{pointer}/{key}")
            if not (_is_users_own(value, part) or key in FOREIGN_OPTIONS):
                yield from refusals(value, settings, f"{pointer}/{key}")


def _options(part: object) -> Mapping[str, Any]:
    """The options that a part of a job sets, and its kind; {} for what is no part of a job."""
    if isinstance(part, BaseModel):
        names = part.model_fields_set | ({"kind"} & type(part).model_fields.keys())
        return {name: getattr(part, name) for name in names}
    return part if isinstance(part, Mapping) else {}


def _is_users_own(value: object, part: object) -> bool:
    """Whether the value is a mapping whose keys name no options, such as ``data.fields``; a plug-in's may name some."""
    return isinstance(value, Mapping) and type(part).__module__.partition(".")[0] == "volley"


def _path(value: object, settings: ApiSettings, pointer: str) -> Iterator[FieldProblem]:
    if isinstance(value, str | Path) and not str(value).startswith("/"):
        yield FieldProblem(pointer=pointer, detail=f"{str(value)!r} is relative: write an absolute path")


def _runtime_env(value: object, settings: ApiSettings, pointer: str) -> Iterator[FieldProblem]:
    if value and not settings.allows_all_code:
        yield FieldProblem(
            pointer=pointer, detail="brings code; only a server whose setting allow_code contains * accepts it"
        )


def _python(value: object, settings: ApiSettings, pointer: str) -> Iterator[FieldProblem]:
    if isinstance(value, str) and not settings.allows_all_code:
        yield FieldProblem(
            pointer=pointer,
            detail="names an interpreter and so any code; only a server whose setting allow_code contains * accepts it",
        )


def _engine(options: object, settings: ApiSettings, pointer: str) -> Iterator[FieldProblem]:
    if isinstance(options, Mapping) and not settings.allows_all_code:
        for name in sorted(options.keys() - ENGINE_OPTIONS):
            yield FieldProblem(
                pointer=f"{pointer}/{name}",
                detail="may name code; only a server whose setting allow_code contains * accepts it",
            )


def _deepspeed(options: object, settings: ApiSettings, pointer: str) -> Iterator[FieldProblem]:
    if not settings.allows_all_code:
        yield from (FieldProblem(pointer=at, detail=detail) for at, detail in rejected_options(options, pointer))


def _python_target(scorer: Mapping[str, Any], settings: ApiSettings, pointer: str) -> Iterator[FieldProblem]:
    if "target" not in scorer or settings.allows_all_code:
        return
    module = str(scorer["target"]).partition(":")[0]
    if not any(module == each or module.startswith(f"{each}.") for each in settings.allow_code):
        allowed = ", ".join(settings.allow_code) or "nothing"
        yield FieldProblem(
            pointer=f"{pointer}/target",
            detail=f"the server's setting allow_code allows code from {allowed}, not from {module}: "
            f"start the service with: volley up --import-from DIR --allow-code {module}",
        )


def _http_scorer(scorer: Mapping[str, Any], settings: ApiSettings, pointer: str) -> Iterator[FieldProblem]:
    if "url" not in scorer:
        return
    try:
        parts = urlsplit(str(scorer["url"]))
    except ValueError as error:
        yield FieldProblem(pointer=f"{pointer}/url", detail=str(error))
        return
    if _holds_secret(parts):
        yield FieldProblem(
            pointer=f"{pointer}/url",
            detail="contains a secret, and many users can read a run's job: put it into an environment variable of "
            "the reward workers and name that in token_env",
        )
    name = scorer.get("token_env")
    if name is not None and not any(str(name).startswith(prefix) for prefix in settings.scorer_env):
        allowed = ", ".join(settings.scorer_env) or "nothing"
        yield FieldProblem(
            pointer=f"{pointer}/token_env",
            detail=f"the server's setting scorer_env allows variables that begin with {allowed}",
        )


def _tracking_uri(value: object, settings: ApiSettings, pointer: str) -> Iterator[FieldProblem]:
    """The driver sends its MLflow credentials wherever this URI points."""
    if not isinstance(value, str):
        return
    try:
        parts = urlsplit(value)
        host = parts.hostname
    except ValueError as error:
        yield FieldProblem(pointer=pointer, detail=str(error))
        return
    if _holds_secret(parts):
        yield FieldProblem(
            pointer=pointer,
            detail="contains a secret, and many users can read a run's job: put it into the driver's environment, as "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        )
    if host is None and parts.scheme not in _WITHOUT_HOST:
        yield FieldProblem(pointer=pointer, detail="names no host: write http://host:port or https://host")
    if host is not None and not {host, EVERYTHING} & {*LOOPBACK_HOSTS, *settings.tracking_hosts}:
        yield FieldProblem(
            pointer=pointer,
            detail=f"the server's setting tracking_hosts does not name {host}, which would get the driver's MLflow "
            f"credentials: start the service with: volley up --tracking-host {host}",
        )


def _notify(value: object, settings: ApiSettings, pointer: str) -> Iterator[FieldProblem]:
    """The server itself calls these URLs, from inside its network."""
    for index, webhook in enumerate(value if isinstance(value, list | tuple) else ()):
        if not (options := _options(webhook)):
            continue
        url, name = str(options.get("url")), options.get("secret_env")
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            yield FieldProblem(pointer=f"{pointer}/{index}/url", detail=f"{url!r} is not a URL: write http://HOST/PATH")
            continue
        if host not in settings.webhook_hosts and (ANY_HOST not in settings.webhook_hosts or is_inside(host)):
            private = f"; {ANY_HOST} allows public addresses only" if is_inside(host) else ""
            yield FieldProblem(
                pointer=f"{pointer}/{index}/url",
                detail=f"the server's setting webhook_hosts does not name {host}: start the service with: "
                f"volley up --webhook-host {host}{private}",
            )
        if _holds_secret(urlsplit(url)):
            yield FieldProblem(
                pointer=f"{pointer}/{index}/url",
                detail="contains a secret, and many users can read a run's job: sign with secret_env instead",
            )
        if name is not None and (problem := key_problem(os.environ.get(str(name)), str(name))):
            yield FieldProblem(pointer=f"{pointer}/{index}/secret_env", detail=f"on the server, {problem}")


def _holds_secret(parts: SplitResult) -> bool:
    named = (key for key, _ in parse_qsl(parts.query, keep_blank_values=True))
    return "@" in parts.netloc or any(_SECRET.search(key) for key in named)


SCORER_RULES: Mapping[str, Callable[[Mapping[str, Any], ApiSettings, str], Iterator[FieldProblem]]] = {
    "python": _python_target,
    "program": _python_target,
    "function": _python_target,
    "http": _http_scorer,
}
KEY_RULES: Mapping[str, Callable[[object, ApiSettings, str], Iterator[FieldProblem]]] = {
    "path": _path,
    "python": _python,
    "runtime_env": _runtime_env,
    "engine": _engine,
    "deepspeed": _deepspeed,
    "tracking_uri": _tracking_uri,
    "notify": _notify,
}
FOREIGN_OPTIONS = frozenset({"engine", "deepspeed"})  # options of other libraries, which no other rule applies to


class ProcessChecker:
    """Checks each job in its own process, because a check imports user code and may hang or need much memory.

    Args:
        seconds: time limit of a check.
        cluster: where the job would run, and must fit into memory.
    """

    def __init__(self, seconds: float, cluster: Cluster | None = None) -> None:
        self._seconds = seconds
        self._cluster = cluster or NoCluster()
        self._gate = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def __call__(self, job: Job) -> None:
        try:
            async with asyncio.timeout(self._seconds), self._gate:
                found = await _check(job.model_dump_json().encode())
        except TimeoutError:
            raise HostError(
                f"the check of the job did not finish within {self._seconds:g} s: try again, or raise the server's "
                "setting check_seconds"
            ) from None
        if found.problem:
            raise JobError(found.problem)
        nodes: list[int] = []
        with contextlib.suppress(HostError):  # a job is accepted while Ray is away; /readyz reports that
            nodes = await self._cluster.memory_by_node()
        check_cluster(found.memory_bytes, found.largest_bytes, nodes)


class Found(NamedTuple):
    """What `services.api.check_job` found out."""

    problem: str
    memory_bytes: int
    largest_bytes: int


async def _check(job: bytes) -> Found:
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
        found = json.loads(out.splitlines()[-1])
        return Found(str(found["problem"]), int(found["memory_bytes"]), int(found["largest_bytes"]))
    except (IndexError, ValueError, KeyError, TypeError) as error:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        raise HostError(f"the check of the job ended with code {process.returncode}: {last[:300]}") from error
