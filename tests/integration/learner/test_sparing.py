"""A float32 rank holds weights, a gradient and two moments, each once, and a step needs little more meanwhile."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import tiny_llama

pytestmark = pytest.mark.integration

# Prints, in units of the model's float32 weights: all tensors that are alive between two steps, and the largest amount
# of memory that tensors take within an update.
RANK = """
import gc, json, sys
from pathlib import Path
import learner.libraries, torch
from torch.profiler import ProfilerActivity, profile
from learner.config import LearnerConfig
from learner.engine import Engine, join_ranks, open_store
from learner.policy import load_lm
from volley.model import ModelSpec
from volley.update import LearnerSpec, Optimizer

torch.set_num_threads(1)
path = Path(sys.argv[1])
zero = {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": True, **json.loads(sys.argv[2])}
spec = LearnerSpec.model_validate({"deepspeed": {"zero_optimization": zero}})
config = LearnerConfig(ModelSpec(path=path), spec, Optimizer(lr=1e-3), 10, 0, path)
join_ranks(0, 1, open_store("127.0.0.1", 0, 1), cuda=False, deadline_s=60)
engine = Engine(lambda: load_lm(path, "float32"), config.optimizer, config)
weights = sum(4 * each.ds_numel for each in engine.module.parameters())

def held():
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())

def backward():
    engine.backward(engine(torch.tensor([[1, 2, 3]]), last=True).logits.square().mean())

backward()
engine.update(0)
between = held()
backward()
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
    engine.update(1)
now = most = 0
for event in profiled.profiler.kineto_results.events():
    if event.name() == "[memory]":
        now += event.nbytes()
        most = max(most, now)
print(json.dumps([between / weights, most / weights]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 million parameters, most of them in matrices of 2 million."""
    return tiny_llama(
        tmp_path_factory.mktemp("model"),
        vocab_size=4000,
        hidden_size=512,
        intermediate_size=4096,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )


def measure(model: Path, settings: dict[str, object]) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(model), json.dumps(settings)],
        env={"PATH": "", "DS_ACCELERATOR": "cpu", "PYTHONPATH": ".", "HOME": str(model)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    between, within = json.loads(done.stdout.splitlines()[-1])
    return between, within


def test_nothing_is_held_twice(model: Path) -> None:
    between, within = measure(model, {})
    assert between == pytest.approx(4, abs=0.1)
    assert within < 0.6


def test_the_jobs_own_settings_win(model: Path) -> None:
    """With all parameters updated at once there is a copy of the whole gradient."""
    _, within = measure(model, {"sub_group_size": 1_000_000_000})
    assert within == pytest.approx(1, abs=0.2)
