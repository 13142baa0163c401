"""A mixture of experts in a running engine: on CPU vLLM packs experts when it builds their kernel, and only then."""

from pathlib import Path

import numpy as np
import pytest
import ray

from actors.config import ActorConfig, GenerateRequest
from actors.pool import ActorPool
from benchmarks.model_families import make
from tests.integration.oracle import Oracle
from tests.models import character_tokenizer
from volley.job import ActorsSpec
from volley.model import ModelSpec
from volley.records import WeightBucket, WeightUpdate

pytestmark = pytest.mark.integration


async def test_experts_are_those_of_the_last_update(ray_local: None, tmp_path: Path) -> None:
    make("Qwen3-MoE", tmp_path / "model")
    spec = ActorsSpec.model_validate({"cpus": 0.1, "max_num_seqs": 32, "kv_cache_gb": 0.1})
    oracle = Oracle(tmp_path / "model")
    pool = await ActorPool.start(ActorConfig(ModelSpec(path=tmp_path / "model"), spec, 256, 0, tmp_path / "logs"))
    try:
        prompt_p = np.array(character_tokenizer()("12+34=")["input_ids"], dtype=np.int32)
        for version in range(3):
            if version:
                oracle.weights[version] = oracle.other_weights(version)
                await pool.broadcast(published(version, oracle, tmp_path / str(version)))
            ref, _ = await pool.generate(GenerateRequest(version, "p", prompt_p, 16, 1.0, 1.0, 24))
            group = await ref
            assert set(group.versions_T) == {version}
            np.testing.assert_allclose(group.logprobs_T, oracle.logprobs(group), atol=1e-4)
    finally:
        await pool.stop()


def published(version: int, oracle: Oracle, folder: Path) -> WeightUpdate:
    """The weights under the names of a checkpoint, in which every expert has matrices of its own."""
    oracle.model.load_state_dict(oracle.weights[version], strict=False)
    oracle.model.save_pretrained(folder)
    file = np.fromfile(folder / "model.safetensors", dtype=np.uint8)
    return WeightUpdate(version, (WeightBucket(ray.put((file,)), file.nbytes),), None, 0.0)
