"""Advantages for trainers that keep a batch as rows, each with the id of its prompt.

Scale. An objective's `a_i` are for a sum over the n samples of a prompt. The losses of TRL, verl, SkyRL, OpenRLHF and
rLLM are means over all samples, which is 1/n of the mean over prompts of such sums, so `n a_i` enters the loss.
`pass_at_k_analytic`, `maxrl` and `risk_sensitive` are defined for GRPO's mean and enter unscaled.

Shapes: B rows of a batch, P prompts, n samples of a prompt.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from volley.objectives import BestOfK, MajAtK, MaxAtK, Objective, advantages, check_objective, parse_objective
from volley.objectives.spec import PER_SAMPLE
from volley.records import NO_ANSWER


def read_objective(objective: Objective | Mapping[str, Any], n: int) -> Objective:
    """The objective, checked for groups of n samples of the policy that is trained.

    Raises:
        ValueError: `check_objective` refuses it for n, or it has companion weights.
    """
    parsed = parse_objective(objective)
    check_objective(parsed, n)
    if isinstance(parsed, MaxAtK | MajAtK | BestOfK) and parsed.companion_weights != "none":
        raise ValueError(
            f"companion_weights: {parsed.companion_weights} needs the log-ratios of whole samples, which trainers do "
            "not pass to an estimator: write companion_weights: none"
        )
    return parsed


def read_reward_objective(objective: Objective | Mapping[str, Any], n: int) -> Objective:
    """Like `read_objective`, for trainers that pass rewards alone.

    Raises:
        ValueError: also for `maj_at_k` and `best_of_k`.
    """
    parsed = read_objective(objective, n)
    if isinstance(parsed, MajAtK | BestOfK):
        needs = "answers=" if isinstance(parsed, MajAtK) else "ranks="
        raise ValueError(
            f"{parsed.kind} needs more than rewards, and this trainer passes nothing else to an estimator: write "
            f"kind: max_at_k, or call volley.objectives.advantages with {needs} in a trainer of your own"
        )
    return parsed


def mean_scale(objective: Objective, n: int) -> int:
    """What an objective's advantages are multiplied by for a loss that is a mean over samples."""
    return 1 if isinstance(objective, PER_SAMPLE) else n


def answer_ids(answers: Iterable[Hashable | None]) -> NDArray[np.int64]:
    """Equal ids for equal answers, and `NO_ANSWER` for None, [B]."""
    ids: dict[Hashable, int] = {}
    numbers = [NO_ANSWER if answer is None else ids.setdefault(answer, len(ids)) for answer in answers]
    return np.array(numbers, dtype=np.int64)


def mean_advantages(
    objective: Objective,
    reward_B: ArrayLike,
    prompt_B: Sequence[Hashable] | NDArray[Any],
    n: int,
    *,
    valid_B: ArrayLike | None = None,
    answer_B: ArrayLike | None = None,
    rank_B: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """Advantages for a mean over all rows, [B], in the order of the rows.

    A group may have fewer than n rows, or rows that are not valid: k shrinks to fit, the scale remains n, and a group
    with fewer than two valid rows gets zeros.

    Args:
        reward_B: finite where valid.
        prompt_B: the ids of the rows' prompts, in any order; rows of equal ids are a group.
        n: the number of samples per prompt that the trainer is configured for.
        valid_B: bool; rows that are not valid get 0 and do not count in their group.
        answer_B: integer ids, for `maj_at_k`.
        rank_B: for `best_of_k`.

    Raises:
        ValueError: a group has more than n rows, no group of several has two, or what `advantages` refuses.
    """
    rewards = np.asarray(reward_B, dtype=np.float64)
    place = _places(prompt_B, n)
    if len(place[0]) != len(rewards):
        raise ValueError(f"there are {len(rewards)} rewards and {len(place[0])} prompt ids: pass one id per reward")
    valid = np.ones(len(rewards), dtype=np.bool_) if valid_B is None else np.asarray(valid_B)
    shape = (int(place[0].max(initial=-1)) + 1, n)

    def spread(rows: ArrayLike) -> NDArray[Any]:
        rows = np.asarray(rows)
        filled = np.zeros(shape, dtype=rows.dtype)
        filled[place] = rows
        return filled

    advantage_Pn = advantages(
        spread(rewards),
        objective,
        valid=spread(valid),
        answers=None if answer_B is None else spread(answer_B),
        ranks=None if rank_B is None else spread(rank_B),
    )
    placed: NDArray[np.float64] = advantage_Pn[place]
    return mean_scale(objective, n) * placed


def _places(prompt_B: Sequence[Hashable] | NDArray[Any], n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each row's group and its place in the group, [B] and [B]."""
    groups: dict[Hashable, int] = {}
    sizes: list[int] = []
    place = np.zeros((2, len(prompt_B)), dtype=np.int64)
    # the elements of a tensor are tensors, which are equal only to themselves as keys
    prompts = prompt_B.tolist() if hasattr(prompt_B, "tolist") else prompt_B
    for row, prompt in enumerate(prompts):
        group = groups.setdefault(prompt, len(sizes))
        if group == len(sizes):
            sizes.append(0)
        place[:, row] = group, sizes[group]
        sizes[group] += 1
    largest = max(sizes, default=0)
    if largest > n:
        raise ValueError(
            f"a group has {largest} samples, and the objective was set up for n={n}: write n={largest}, or give each "
            "prompt of a batch an id of its own"
        )
    if largest == 1 and len(sizes) > 1:
        raise ValueError(
            f"none of {len(sizes)} groups has a second sample to compare with: sample n={n} times per prompt, and give "
            "the samples of a prompt one id"
        )
    return place[0], place[1]
