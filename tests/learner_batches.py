"""Batches for learner tests: groups of random tokens with rewards, and their log-probs under a model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.records import ScoredGroup
from volley.records import Group

FIRST_TOKEN = 3  # ids 0 to 2 are padding, begin and end of text


def random_group(
    rng: np.random.Generator,
    group_id: int,
    *,
    n: int = 4,
    vocabulary: int = 40,
    prompt: tuple[int, int] = (2, 9),
    length: tuple[int, int] = (1, 12),
    version: int = 0,
    turns: bool = False,
) -> Group:
    """A group of uniformly drawn tokens with log-probs close to a uniform policy's; ranges are half open.

    With ``turns``, some samples of two or more tokens contain observations.
    """
    lengths_n = rng.integers(*length, n).astype(np.int32)
    tokens = int(lengths_n.sum())
    return Group(
        group_id=group_id,
        prompt_id=f"p:{group_id}",
        prompt_p=rng.integers(FIRST_TOKEN, vocabulary, int(rng.integers(*prompt))).astype(np.int32),
        tokens_T=rng.integers(FIRST_TOKEN, vocabulary, tokens).astype(np.int32),
        logprobs_T=(-np.log(vocabulary) + rng.normal(0, 0.3, tokens)).astype(np.float32),
        versions_T=np.full(tokens, version, np.int32),
        lengths_n=lengths_n,
        stopped_n=np.ones(n, np.bool_),
        texts=("",) * n,
        actor="actor-0",
        seconds=0.1,
        **(_shown(rng, lengths_n, vocabulary) if turns else {}),  # type: ignore[arg-type]
    )


def _shown(rng: np.random.Generator, lengths_n: NDArray[np.int32], vocabulary: int) -> dict[str, NDArray[np.int32]]:
    """Observations of one to four tokens before some tokens, but never before a sample's first."""
    first = set((np.cumsum(lengths_n) - lengths_n).tolist())
    places = [t for t in range(int(lengths_n.sum())) if t not in first and rng.random() < 0.3]
    at = np.repeat(places, rng.integers(1, 5, len(places))).astype(np.int32)
    return {"observation_S": rng.integers(FIRST_TOKEN, vocabulary, len(at)).astype(np.int32), "observation_at_S": at}


def scored(
    group: Group, rewards_n: Sequence[float], *, valid_n: Sequence[bool] | None = None, reference: Any = None
) -> ScoredGroup:
    """The group with these rewards; each distinct reward is a distinct answer."""
    rewards = np.array(rewards_n, dtype=np.float64)
    valid = np.ones(group.n, np.bool_) if valid_n is None else np.array(valid_n, np.bool_)
    return ScoredGroup(
        group=reference,
        meta=group.meta(),
        rewards_n=np.where(valid, rewards, np.nan),
        valid_n=valid,
        answers_n=np.unique(rewards, return_inverse=True)[1].astype(np.int32),
    )


def on_policy(group: Group, lm: Any, temperature: float = 1.0) -> Group:
    """The group with log-probs as ``lm`` gives them."""
    return replace(group, logprobs_T=naive_logprobs(lm, group, temperature)[0].detach().float().numpy())


def naive_logprobs(lm: Any, group: Group, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy at each sample token, [T] each, one unpadded sequence at a time from the model's logits."""
    logprobs, entropies, start = [], [], 0
    for length in group.lengths_n.tolist():
        row, places = group.prompt_p.tolist(), []
        for t in range(start, start + length):
            row += group.observation_S[group.observation_at_S == t].tolist()
            places.append(len(row))
            row.append(int(group.tokens_T[t]))
        ids = torch.tensor([row or [0]])  # a sample without tokens and prompt has no log-probs either
        logit_LV = lm(input_ids=ids, use_cache=False).logits[0]
        logprob_TV = (logit_LV[torch.tensor(places, dtype=torch.int64) - 1] / temperature).log_softmax(-1)
        logprobs.append(logprob_TV.gather(-1, torch.tensor(row)[places, None])[:, 0])
        entropies.append(-(logprob_TV.exp() * logprob_TV).sum(-1))
        start += length
    return torch.cat(logprobs), torch.cat(entropies)


def samples_of(group: Group) -> list[NDArray[np.int32]]:
    """The token ids of each sample."""
    return np.split(group.tokens_T, np.cumsum(group.lengths_n)[:-1])
