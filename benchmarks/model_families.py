"""Which types of models train and serve: `python -m benchmarks.model_families [NAMES] [--json FILE]`.

Makes a tiny random model of each type, starts a learner and an actor on it, takes two steps on groups with random
rewards, and compares the actor's log-probs of samples it has just drawn with the learner's: before the first update and
after each. A type that learner or engine refuses is reported with the reason. Takes about half a minute per type.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from actors.config import ActorConfig, GenerateRequest
from actors.pool import ActorPool
from benchmarks.local_ray import local_ray
from learner.config import LearnerConfig
from learner.pool import LearnerPool
from learner.records import ScoredGroup
from services.runs.served_check import TOLERANCE
from tests.models import character_tokenizer
from volley.errors import VolleyError
from volley.job import ActorsSpec
from volley.model import ModelSpec
from volley.objectives import Mean
from volley.records import Group, GroupMeta
from volley.refs import Ref
from volley.update import LearnerSpec, Optimizer, PolicyUpdate

STEPS, GROUPS, SAMPLES, TOKENS, LENGTH = 2, 2, 8, 24, 256
STORE_BYTES = 200 * 2**20
RATE = 1e-2  # large, so that one step changes log-probs by far more than rounding does

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
HEADS = {"head_dim": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

Make = Callable[[dict[str, Any]], Any]
FAMILIES: dict[str, Make] = {
    "Llama": lambda ids: transformers.LlamaConfig(**SHAPE, **HEADS, **ids),
    "Qwen2": lambda ids: transformers.Qwen2Config(**SHAPE, **ids),
    "Qwen3": lambda ids: transformers.Qwen3Config(**SHAPE, **HEADS, **ids),
    "Qwen3-MoE": lambda ids: transformers.Qwen3MoeConfig(**SHAPE, **HEADS, **EXPERTS, **ids),
    "Mixtral": lambda ids: transformers.MixtralConfig(
        **SHAPE, **HEADS, num_local_experts=4, num_experts_per_tok=2, **ids
    ),
    "OLMoE": lambda ids: transformers.OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, **ids),
    "DeepSeek-V2": lambda ids: transformers.DeepseekV2Config(
        **{**SHAPE, "num_key_value_heads": 4},
        **ids,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        kv_lora_rank=512,  # with the rotary part 576, the only width of vLLM's kernel on CPU
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_group=1,
        topk_group=1,
    ),
    "Gemma 2": lambda ids: transformers.Gemma2Config(
        **{**SHAPE, "tie_word_embeddings": True}, **HEADS, sliding_window=16, query_pre_attn_scalar=32, **ids
    ),
    "Gemma 3": lambda ids: transformers.Gemma3TextConfig(
        **{**SHAPE, "tie_word_embeddings": True},
        **HEADS,
        sliding_window=16,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention"],
        **ids,
    ),
    "Phi": lambda ids: transformers.PhiConfig(**SHAPE, **ids),
    "Phi-3": lambda ids: transformers.Phi3Config(**SHAPE, **ids),
    "OLMo 2": lambda ids: transformers.Olmo2Config(**SHAPE, **ids),
    "GPT-2": lambda ids: transformers.GPT2Config(
        n_embd=128, n_layer=2, n_head=4, n_positions=512, initializer_range=0.1, **ids
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to one type of model.

    Attributes:
        before, after: largest difference of a log-prob between actor and learner, before the first update and after
            the last; nan where it was not reached.
        moved: by how much the steps changed the learner's log-probs, on average.
        problem: why it was refused, or "".
    """

    family: str
    model_type: str
    before: float = np.nan
    after: float = np.nan
    moved: float = np.nan
    problem: str = ""

    @property
    def verdict(self) -> str:
        if self.problem:
            return f"refused: {self.problem}"
        near = max(self.before, self.after) < TOLERANCE["float32"]
        return "trains and serves" if near else "a run ends after its first update: served log-probs differ"


def make(family: str, folder: Path) -> str:
    """Write a tiny random model of ``family`` to ``folder`` and return its model type."""
    tokenizer = character_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = FAMILIES[family]({"vocab_size": len(tokenizer), **ids})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(config.model_type)


async def tried(family: str, folder: Path, gpus: float = 0) -> Outcome:
    """Train and serve a tiny model of ``family``, or say why not.

    Args:
        gpus: the share of a GPU for the actor and for the learner each; 0: on the CPU, in float32.
    """
    model_type = make(family, folder / "model")
    try:
        return await _trained(family, model_type, folder, gpus)
    except VolleyError as error:
        return Outcome(family, model_type, problem=" ".join(str(error).splitlines()[0].split())[:200])


async def _trained(family: str, model_type: str, folder: Path, gpus: float) -> Outcome:
    model = ModelSpec(path=folder / "model", dtype="bfloat16" if gpus else "float32")
    actors = await ActorPool.start(
        ActorConfig(model, ActorsSpec(cpus=0.1, gpus=gpus, max_num_seqs=16, kv_cache_gb=0.1), LENGTH, 0, folder)
    )
    try:
        learner = await LearnerPool.start(_learner_config(model, folder, gpus))
        try:
            before = await _difference(actors, learner)
            old = await actors.generate(_request(0))
            old_scores = await learner.score(old[0])
            for step in range(STEPS):
                groups = [await actors.generate(_request(number)) for number in range(GROUPS)]
                batch = [_scored(group, meta, step) for group, meta in groups]
                await learner.step(batch, version=step, objective=Mean())
                await actors.broadcast(await learner.publish(step + 1))
            moved = float(np.abs(await learner.score(old[0]) - old_scores).mean())
            return Outcome(family, model_type, before, await _difference(actors, learner), moved)
        finally:
            await learner.stop()
    finally:
        await actors.stop()


def _learner_config(model: ModelSpec, folder: Path, gpus: float) -> LearnerConfig:
    return LearnerConfig(
        model=model,
        optimizer=Optimizer(lr=RATE),
        learner=LearnerSpec(cpus_per_rank=0.1, gpus_per_rank=gpus),
        steps=STEPS,
        seed=0,
        log_dir=folder,
        update=PolicyUpdate(),
        objective=Mean(),
    )


def _request(number: int) -> GenerateRequest:
    prompt_p = np.array(character_tokenizer()("12+34=")["input_ids"], dtype=np.int32)
    return GenerateRequest(number, f"p{number}", prompt_p, SAMPLES, 1.0, 1.0, TOKENS)


async def _difference(actors: ActorPool, learner: LearnerPool) -> float:
    group, _ = await actors.generate(_request(-1))
    return float(np.abs((await group).logprobs_T - await learner.score(group)).max())


def _scored(group: Ref[Group], meta: GroupMeta, step: int) -> ScoredGroup:
    rewards_n = np.random.default_rng(step).permutation(np.arange(SAMPLES) % 2).astype(np.float64)
    return ScoredGroup(group, meta, rewards_n, np.ones(SAMPLES, np.bool_), np.arange(SAMPLES, dtype=np.int32))


def main() -> None:
    parser = argparse.ArgumentParser(description="Try which types of models train and serve.")
    parser.add_argument("families", nargs="*", metavar="NAME", help=f"one of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file too")
    options = parser.parse_args()
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(FAMILIES)}")
    outcomes = []
    print("| family | model type | before the first update | after two | steps moved | verdict |")
    print("|---|---|---|---|---|---|")
    for family in options.families or FAMILIES:
        with tempfile.TemporaryDirectory() as scratch, local_ray(cpus=2, store_bytes=STORE_BYTES):
            outcome = asyncio.run(tried(family, Path(scratch)))
        outcomes.append(outcome)
        figures = " | ".join(f"{value:.1e}" for value in (outcome.before, outcome.after, outcome.moved))
        print(f"| {outcome.family} | `{outcome.model_type}` | {figures} | {outcome.verdict} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
