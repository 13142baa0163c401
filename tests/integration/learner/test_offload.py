"""A rank's state that went to the host's memory and back trains on as if it had stayed. No GPU is needed for that."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import tiny_llama

pytestmark = pytest.mark.integration

# Trains two engines alike, of which one moves away and back between its steps; prints whether all weights are equal,
# and whether AdamW still updates DeepSpeed's own weights where these are float32.
RANK = """
import json, sys
from pathlib import Path
import learner.libraries, torch
from learner.config import LearnerConfig
from learner.engine import Engine, join_ranks, open_store
from learner.offload import move_away, move_back, move_lent_away
from learner.policy import load_trained
from learner.weights import buckets, gathered_views
from volley.model import ModelSpec
from volley.update import LearnerSpec, Optimizer

torch.set_num_threads(1)
path = Path(sys.argv[1])
model = ModelSpec.model_validate({"path": path, **json.loads(sys.argv[2])})
spec = LearnerSpec.model_validate({"deepspeed": {"zero_optimization": json.loads(sys.argv[3])}})
config = LearnerConfig(model, spec, Optimizer(lr=1e-2, weight_decay=0.1), 10, 0, path)
join_ranks(0, 1, open_store("127.0.0.1", 0, 1), cuda=False, deadline_s=60)
ids = torch.tensor([[1, 2, 3, 4]])

def pointers(engine):
    return [parameter.ds_tensor.data_ptr() for parameter in engine.module.parameters()]

def made(moving):
    torch.manual_seed(0)
    engine, frozen = Engine(lambda: load_trained(model, 0), config.optimizer, config), torch.nn.Linear(2, 2)
    norms = []
    for step in range(5):
        if moving:
            lent, before = engine if step % 2 else None, pointers(engine)
            move_away([engine], frozen, lent=lent)
            assert (pointers(engine) == before) == (lent is not None)
            if lent is not None:
                move_lent_away(engine)
                assert all(now != old for now, old in zip(pointers(engine), before, strict=True))
            move_back([engine], frozen, engine.device)
        engine.backward(engine(ids, last=True).logits.float().square().mean())
        norms.append(engine.update(step))
    if moving:
        move_away([engine], None)
        move_back([engine], None, engine.device)
    weights = {}
    for bucket in buckets(engine.module.named_parameters(), 1 << 20):
        weights |= {name: view.clone() for name, view in gathered_views(bucket).items()}
    pairs = zip(engine.zero.fp16_partitioned_groups_flat, engine.zero.fp32_partitioned_groups_flat, strict=True)
    return norms, weights, all(flat.data_ptr() == master.data_ptr() for flat, master in pairs)

norms, weights, _ = made(False)
moved_norms, moved, shared = made(True)
equal = norms == moved_norms and weights.keys() == moved.keys() and len(weights) > 0
print(json.dumps([equal and all(torch.equal(weights[name], moved[name]) for name in weights), shared]))
"""


@pytest.mark.parametrize(
    ("model", "zero"),
    [
        ({"dtype": "float32"}, {}),
        ({"dtype": "bfloat16"}, {"stage3_param_persistence_threshold": 0}),
        ({"dtype": "float32", "lora": {"rank": 2}}, {"stage3_param_persistence_threshold": 0}),
    ],
    ids=["whole", "sharded", "adapters"],
)
def test_state_that_was_moved_trains_on_to_the_bit(
    tmp_path: Path, model: dict[str, object], zero: dict[str, int]
) -> None:
    command = [sys.executable, "-c", RANK, str(tiny_llama(tmp_path / "model")), json.dumps(model), json.dumps(zero)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[:3000]
    equal, shared = json.loads(done.stdout.splitlines()[-1])
    assert equal
    assert shared == (model["dtype"] == "float32")
