"""Jobs, hardware and plans that the tests of the planner share."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from volley.job import JOB, RLJob
from volley.plan.machine import PRESETS, Device, Hardware
from volley.plan.memory import shape_of
from volley.plan.report import Plan, make_plan
from volley.plan.stages import Load, default_score_seconds
from volley.shape import Shape

JOBS = Path(__file__).parents[3] / "deploy" / "jobs"
GPUS = {"gpu-1": 1, "gpu-8": 8, "gpu-64": 64}
Tree = dict[str, Any]


def shipped(name: str, **changes: Any) -> RLJob:
    """A job of deploy/jobs; ``changes`` replace its top-level keys."""
    job = JOB.validate_python({**yaml.safe_load((JOBS / f"{name}.yaml").read_text()), **changes})
    assert isinstance(job, RLJob)
    return job


def changed(job: RLJob, **changes: Any) -> RLJob:
    """``job`` with values at dotted keys, in which dots are ``__``: ``learner__ranks=2``."""
    tree = job.model_dump(mode="json", exclude_unset=True)
    for key, value in changes.items():
        *parents, last = key.split("__")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    made = JOB.validate_python(tree)
    assert isinstance(made, RLJob)
    return made


def shape_for(job: RLJob) -> Shape:
    return shape_of(job.model, JOBS)


def planned(job: RLJob, *, load: Load | None = None, shape: Shape | None = None, **hardware: Any) -> Plan:
    """The plan of ``job`` on as many H100 as it uses, unless ``hardware`` says otherwise."""
    used = job.actors.count * job.actors.gpus + job.learner.ranks * job.learner.gpus_per_rank
    described = Hardware(**{"device": PRESETS["h100"], "gpus": max(1, round(used + 0.49)), **hardware})
    usual = Load(512, job.sampling.max_tokens / 2, default_score_seconds(job))
    return make_plan(job, shape or shape_for(job), described, load or usual)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Decoders from a few thousand to some billions of parameters, with and without a head size of their own."""
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = max(4, kv_heads * draw(st.sampled_from([1, 2, 8])))  # a multiple of every number of GPUs of `jobs`
    head = draw(st.sampled_from([16, 32, 128]))
    return Shape(
        hidden_size=heads * head if (usual := draw(st.booleans())) else draw(st.sampled_from([64, 768, 4096])),
        num_hidden_layers=draw(st.integers(1, 64)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=draw(st.sampled_from([64, 1000, 11008])),
        vocab_size=draw(st.sampled_from([32, 32000, 151936])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        head_dim=None if usual else head,
    )


@st.composite
def jobs(draw: st.DrawFn) -> RLJob:
    """Jobs with whole GPUs and every option that the formulas know."""
    prompts, tensor = draw(st.integers(1, 64)), draw(st.sampled_from([1, 2, 4]))
    zero = {part: {"device": "cpu"} for part in ("offload_optimizer", "offload_param") if draw(st.integers(0, 3)) == 0}
    lora = draw(st.sampled_from([None, {"rank": 8}, {"rank": 4, "target_modules": ["q_proj", "down_proj"]}]))
    tree: Tree = {
        **{"kind": "rl", "name": "drawn", "steps": 1, "prompts_per_step": prompts},
        "model": {"path": "/m", "dtype": draw(st.sampled_from(["bfloat16", "float32"])), "lora": lora},
        **{"data": {"path": "/d"}, "scorer": {"kind": draw(st.sampled_from(["math", "code"]))}},
        **{"objective": {"kind": "mean"}, "max_lag": draw(st.integers(0, 4))},
        "sampling": {"n": draw(st.sampled_from([2, 5, 16])), "max_tokens": draw(st.sampled_from([8, 300, 4096]))},
        "update": {
            "updates_per_batch": draw(st.integers(1, 3)),
            "kl": {"logged": draw(st.booleans()), "coefficient": draw(st.sampled_from([0.0, 0.1]))},
        },
        "actors": {
            **{"count": draw(st.integers(1, 9)), "gpus": tensor, "max_num_seqs": draw(st.sampled_from([1, 64, 512]))},
            "engine": {"tensor_parallel_size": tensor},
        },
        "reward_workers": {"count": draw(st.integers(1, 40))},
        "learner": {
            **{"ranks": draw(st.integers(1, min(prompts, 12))), "gpus_per_rank": 1},
            "tokens_per_micro_batch": draw(st.sampled_from([None, 512, 9000])),
            "gradient_checkpointing": draw(st.booleans()),
            "shared_rows": draw(st.sampled_from([None, True])),
            "deepspeed": {"zero_optimization": zero} if zero else {},
        },
        "broadcast": {"transport": "object_store" if lora else draw(st.sampled_from(["object_store", "collective"]))},
    }
    made = JOB.validate_python(tree)
    assert isinstance(made, RLJob)
    return made


def large(device: Device = PRESETS["h100"], **hardware: Any) -> Hardware:
    """Hardware on which every drawn job fits."""
    roomy = device.model_copy(update={"memory_gib": 1e5})
    return Hardware(**{"device": roomy, "gpus": 64, **hardware})


def loads() -> st.SearchStrategy[Load]:
    return st.builds(Load, st.integers(1, 3000), st.floats(1, 8), st.sampled_from([0.01, 2.0]))
