"""What vLLM is asked for. The module imports vLLM, but starts no engine."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from actors.config import ActorConfig
from services.runs.role_configs import actor_config
from services.store.folder import RunFolder
from volley.errors import JobError
from volley.job import ActorsSpec, RLJob
from volley.model import ModelSpec
from volley.plan.memory import DEFAULT_UTILIZATION


@pytest.fixture(autouse=True, scope="module")
def _vllm() -> None:
    """vLLM's imports warn of deprecated calls, which the tests' settings make errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import actors.options  # noqa: F401


def args_of(actors: dict[str, Any] | None = None, **changes: Any) -> Any:
    from actors.options import engine_args

    spec = ActorsSpec.model_validate(actors or {})
    fields: dict[str, Any] = {
        "model": ModelSpec(path=Path("model")),
        "actors": spec,
        "max_model_len": 64,
        "seed": 3,
        "log_dir": Path("logs"),
        **changes,
    }
    return engine_args(ActorConfig(**fields), 2)


def test_on_a_part_of_a_gpu_vllm_asks_for_no_more_than_the_actors_share() -> None:
    args = args_of({"gpus": 0.4, "kv_cache_gb": 16})
    assert (args.gpu_memory_utilization, args.kv_cache_memory_bytes, args.enforce_eager) == (0.4, 16 * 2**30, False)
    assert args_of({"gpus": 0.4, "engine": {"gpu_memory_utilization": 0.3}}).gpu_memory_utilization == 0.3


@pytest.mark.parametrize("engine", [{}, {"tensor_parallel_size": 2}], ids=["one", "two"])
def test_on_whole_gpus_vllm_measures_its_cache(engine: dict[str, int]) -> None:
    args = args_of({"gpus": engine.get("tensor_parallel_size", 1), "engine": engine})
    assert (args.kv_cache_memory_bytes, args.enforce_eager, args.block_size) == (None, False, None)
    assert args.gpu_memory_utilization == default("gpu_memory_utilization") == DEFAULT_UTILIZATION


def test_on_a_cpu_the_cache_has_the_jobs_size_and_nothing_is_compiled() -> None:
    args = args_of({"kv_cache_gb": 0.5})
    assert (args.kv_cache_memory_bytes, args.enforce_eager, args.block_size) == (2**29, True, 32)
    assert args.gpu_memory_utilization == default("gpu_memory_utilization")


def default(option: str) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    return getattr(AsyncEngineArgs, option)


def test_an_engine_is_as_long_as_the_longest_prompt_with_its_sample(tmp_path: Path) -> None:
    """Not as the model's own maximum, for which the cache may have no room."""
    from actors.options import engine_args

    job = RLJob.model_validate(
        {
            **{"name": "x", "steps": 1, "model": {"path": tmp_path}, "data": {"path": tmp_path / "d.jsonl"}},
            **{"scorer": {"kind": "math"}, "objective": {"kind": "mean"}},
        }
    )
    assert engine_args(actor_config(job, 3000, RunFolder(tmp_path)), 0).max_model_len == 3000


@pytest.mark.parametrize("gpus", [0.4, 1])
def test_on_gpus_a_bfloat16_model_has_a_float32_head_unless_the_job_says_otherwise(gpus: float) -> None:
    half = ModelSpec(path=Path("model"), dtype="bfloat16")
    assert args_of({"gpus": gpus}, model=half).hf_overrides == {"head_dtype": "float32"}
    assert args_of({"gpus": gpus}).hf_overrides == args_of(model=half).hf_overrides == {}
    for mine, expected in (
        ({"head_dtype": "model"}, {"head_dtype": "model"}),
        ({"rope_theta": 1e6}, {"rope_theta": 1e6, "head_dtype": "float32"}),
    ):
        assert args_of({"gpus": gpus, "engine": {"hf_overrides": mine}}, model=half).hf_overrides == expected


def test_every_actor_samples_with_a_seed_of_its_own() -> None:
    assert args_of(seed=3).seed == 5


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"enforce_eagre": True}, r"vLLM has no option 'enforce_eagre'; did you mean 'enforce_eager'\?"),
        ({"max_num_seqs": 3}, "'max_num_seqs' is set by actors.max_num_seqs; remove it"),
        ({"max_model_len": 8}, "'max_model_len' is set by sampling.max_tokens and the data; remove it"),
        ({"kv_cache_memory_bytes": 1}, "'kv_cache_memory_bytes' is set by actors.kv_cache_gb; remove it"),
        ({"logprobs_mode": "raw_logprobs"}, "'logprobs_mode' is set by Volley and cannot be changed; remove it"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_options_that_volley_sets_or_vllm_lacks_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=f"^actors.engine: {message}$"):
        args_of({"engine": option})
