"""What spares memory changes no update: checkpointed layers, a sharded starting policy, states on the host."""

import asyncio
from pathlib import Path

import pytest
import torch

from learner.policy import load_lm
from learner.pool import LearnerPool
from tests.integration.learner.conftest import SHARDED, assert_near, batch, config, same, save, tensors_of
from volley.errors import JobError
from volley.update import PolicyUpdate

pytestmark = pytest.mark.integration

SPARING = {
    "gradient_checkpointing": True,
    "attention": "sdpa",
    "deepspeed": {
        "zero_optimization": {
            **SHARDED,
            "offload_param": {"device": "cpu", "pin_memory": False},
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        }
    },
}


async def test_two_sparing_ranks_make_the_update_of_one_that_keeps_everything(
    ray_local: None, model: Path, tmp_path: Path
) -> None:
    """The other rank takes one sample a row, by eager attention, and keeps the starting policy whole."""
    spec = PolicyUpdate.model_validate({"kl": {"coefficient": 0.05}, "entropy_bonus": 0.001, "kl_sample_fraction": 1.0})
    sparing, plain = await asyncio.gather(
        LearnerPool.start(config(model, tmp_path / "sparing", 2, update=spec, learner=SPARING)),
        LearnerPool.start(
            config(model, tmp_path / "plain", 1, update=spec, learner={"deepspeed": {}, "attention": "eager"})
        ),
    )
    try:
        for step in range(3):
            groups = 1 if step == 1 else 5  # with one group the second rank only gathers along
            ours, theirs = [
                (await each.step(batch(step, groups=groups)[1], version=step)).metrics for each in (sparing, plain)
            ]
            for name in ("loss", "grad_norm", "kl_k1", "kl_k3", "entropy"):
                assert ours[name] == pytest.approx(theirs[name], rel=5e-3, abs=2e-5), (step, name)
        assert ours["kl_k3"] > 1e-4  # the weights have left the starting policy
        assert_near(*[tensors_of(await each.publish(3)) for each in (sparing, plain)])
        await save(sparing, tmp_path / "step-3", {})
        await sparing.step(batch(3)[1], version=3)
        once = tensors_of(await sparing.publish(4))
        await sparing.load(tmp_path / "step-3")
        await sparing.step(batch(3)[1], version=3)
        assert same(once, tensors_of(await sparing.publish(4)))
    finally:
        await asyncio.gather(sparing.stop(), plain.stop())


def test_attention_that_is_not_here_is_one_line(model: Path) -> None:
    with pytest.raises(JobError, match=r"learner\.attention: flash_attention_2 is not available here; write sdpa"):
        load_lm(model, "bfloat16", attention="flash_attention_2")
    assert load_lm(model, "float32", attention="eager").config._attn_implementation == "eager"
    assert load_lm(model, "float32").get_input_embeddings().weight.dtype == torch.float32
