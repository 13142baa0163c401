"""What to write instead of a mistaken key or value of a job file."""

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any

from volley.job import JOB

# Other trainers' words for a key, by the name people try.
OTHER_WORDS = {
    "learning_rate": "optimizer.lr",
    "max_grad_norm": "optimizer.clip_norm",
    "batch_size": "prompts_per_step",
    "train_batch_size": "prompts_per_step",
    "num_generations": "sampling.n",
    "group_size": "sampling.n",
    "n_samples": "sampling.n",
    "max_new_tokens": "sampling.max_tokens",
    "max_completion_length": "sampling.max_tokens",
    "max_steps": "steps",
    "epochs": "steps",
    "beta": "update.kl.coefficient",
    "kl_coef": "update.kl.coefficient",
    "target_kl": "update.kl.target",
    "epsilon": "update.clip_low",
    "importance_sampling_level": "update.ratio",
    "loss_type": "update.surrogate",
    "ulysses_sequence_parallel_size": "learner.sequence_parallel",
    "staleness": "max_lag",
    "max_staleness": "max_lag",
    "reward": "scorer",
    "reward_fn": "scorer",
    "dataset": "data",
}
# Values people write where a mapping belongs, by the last part of the key.
MAPPINGS = {
    "model": "model: {path: models/NAME}, a folder in Hugging Face format, or model: {hub: OWNER/NAME}",
    "data": "data: {path: prompts.jsonl}",
    "chat": "chat: {}",
    "scorer": "scorer: {kind: math}",
    "objective": "objective: {kind: max_at_k, k: 8}",
    "sampling": "sampling: {n: 16}",
    "optimizer": "optimizer: {lr: 1.0e-6}",
    "kl": "kl: {coefficient: 0.01}",
    "evaluation": "evaluation: {data: {path: heldout.jsonl}}",
    "checkpoint": "checkpoint: {every: 25}",
}
# Names of objectives elsewhere.
OBJECTIVES = {
    "pass_at_k": "{kind: max_at_k, k: 8}: with rewards 0 and 1, max@k is pass@k",
    "best_of_n": "{kind: max_at_k, k: 8}, or best_of_k if a score other than the reward picks",
    "grpo": "{kind: mean, normalize: std}",
    "dr_grpo": "{kind: mean}",
    "f_grpo": "{kind: mean, normalize: std, focal: 1.0}",
    "gspo": "{kind: mean, normalize: std}, with update.ratio: geometric",
    "cispo": "{kind: mean, normalize: std}, with update.surrogate: cispo",
    "rloo": "{kind: mean}",
    "reinforce": "{kind: mean}",
    "ppo": "{kind: mean}, with update.value_model for PPO's critic",
    "tailrl": "{kind: max_at_k, weights: harmonic, order: 15, baseline: subset_loo}, with order n - 1",
    "majority": "{kind: maj_at_k, k: 8}",
}


def known_key(kind: str, key: str) -> str:
    """The key of a job of this kind that ``key``, with dots, was probably meant to be; "" if none is near."""
    written, _, last = key.rpartition(".")
    keys = known_keys(kind)
    elsewhere = OTHER_WORDS.get(last, "")
    if elsewhere in keys:
        return elsewhere
    for parent in (_parent(kind, key), written):
        beside = sorted(each.rpartition(".")[2] for each in keys if each.rpartition(".")[0] == parent)
        if near := difflib.get_close_matches(last, beside, n=1, cutoff=0.7):
            return f"{parent}.{near[0]}" if parent else near[0]
    misplaced = sorted((each for each in keys if each.rpartition(".")[2] == last), key=_depth)
    if misplaced:
        return misplaced[0]
    names = {each.rpartition(".")[2]: each for each in sorted(keys, key=_depth, reverse=True)}
    distant = difflib.get_close_matches(last, names, n=1, cutoff=0.8)
    return names[distant[0]] if distant else ""


def _depth(key: str) -> tuple[int, str]:
    return key.count("."), key


def _parent(kind: str, key: str) -> str:
    """What ``key`` stands in, without what a message adds: positions in lists, and the kind behind a union's key."""
    unions, kept, tagged = _parts(kind)[1], "", False
    for part in key.split(".")[:-1]:
        if part.isdigit():
            continue
        if kept in unions and not tagged:
            tagged = True
        else:
            kept, tagged = f"{kept}.{part}" if kept else part, False
    return kept


def known_keys(kind: str) -> frozenset[str]:
    """Every key of a job of this kind, with dots."""
    return _parts(kind)[0]


@cache
def _parts(kind: str) -> tuple[frozenset[str], frozenset[str]]:
    """The keys of a job of this kind, and those whose value is a union of kinds."""
    schema = JOB.json_schema()
    root = schema["discriminator"]["mapping"].get(kind)
    if not root:
        return frozenset(), frozenset()
    found = list(_keys({"$ref": root}, schema["$defs"], ()))
    return frozenset(key for key, _ in found), frozenset(key for key, is_union in found if is_union)


def _keys(
    node: dict[str, Any], definitions: dict[str, Any], above: tuple[str, ...], prefix: str = ""
) -> Iterator[tuple[str, bool]]:
    """Each key below ``node``, and whether its value, or an item of it, is a union of kinds."""
    if (name := node.get("$ref", "").rpartition("/")[2]) and name not in above:
        yield from _keys(definitions[name], definitions, (*above, name), prefix)
    for choice in (*_choices(node), *node.get("allOf", ())):
        yield from _keys(choice, definitions, above, prefix)
    for key, child in node.get("properties", {}).items():
        yield f"{prefix}{key}", any("discriminator" in each for each in (child, *_choices(child)))
        yield from _keys(child, definitions, above, f"{prefix}{key}.")


def _choices(node: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives for a value, and those for its items if it may be a list."""
    items = [node["items"]] if isinstance(node.get("items"), dict) else []
    return [*node.get("anyOf", ()), *node.get("oneOf", ()), *items]
