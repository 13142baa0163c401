"""Off-policy max@k: bias and noise of each kind of companion weights, against how far the policy has moved.

The policy is log-linear over 200 actions with eight features. The behaviour policy is the policy before a step in a
random direction, scaled so that a sample's log-ratio has the given standard deviation. Groups have n = 8 samples,
k = 4, and rewards from N(0, 1). The true gradient is computed exactly. Bias and noise of one group's estimate are
relative to the length of the true gradient, from 500,000 groups; a bias under three standard errors of their average is
printed as below that bound.

    python -m benchmarks.objectives.off_policy --out docs/figures
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.objectives.report import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    output_folder,
    panels,
    print_table,
    save,
)
from volley.objectives import MaxAtK, advantages

Floats = NDArray[np.float64]
ACTIONS, FEATURES, N, K, GROUPS, CHUNK = 200, 8, 8, 4, 500_000, 20_000
SPREADS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
ESTIMATORS: dict[str, tuple[MaxAtK, str]] = {
    "none": (MaxAtK(k=K), GREY),
    "first_order": (MaxAtK(k=K, companion_weights="first_order"), RED),
    "exact": (MaxAtK(k=K, companion_weights="exact"), BLUE),
    "exact, cap 2": (MaxAtK(k=K, companion_weights="exact", weight_cap=2.0), ORANGE),
    "self_normalised": (MaxAtK(k=K, companion_weights="self_normalised"), GREEN),
}


class Problem(NamedTuple):
    """A policy and the behaviour policy its samples come from, over actions of ascending reward."""

    policy_A: Floats
    behaviour_A: Floats
    reward_A: Floats
    feature_AF: Floats


def problem(spread: float) -> Problem:
    """The problem with this spread of the log-ratio; rewards, features and direction are always the same."""
    rng = np.random.default_rng(0)
    feature_AF = rng.normal(size=(ACTIONS, FEATURES))
    reward_A = np.sort(rng.normal(size=ACTIONS))
    logits_A = feature_AF @ rng.normal(scale=0.3, size=FEATURES)
    behaviour_A = np.exp(logits_A) / np.exp(logits_A).sum()
    step_A = feature_AF @ rng.normal(size=FEATURES)
    step_A -= behaviour_A @ step_A
    step_A *= spread / np.sqrt(behaviour_A @ step_A**2)
    policy_A = behaviour_A * np.exp(step_A)
    return Problem(policy_A / policy_A.sum(), behaviour_A, reward_A, feature_AF)


def true_gradient(p: Problem) -> Floats:
    """`k E[E[max(g, best of k - 1)] grad log pi]` with respect to the features' weights, from order statistics."""
    below_A = p.policy_A.cumsum() ** (K - 1)
    chance_A = np.diff(below_A, prepend=0.0)
    above_A = np.concatenate([np.cumsum((p.reward_A * chance_A)[::-1])[::-1][1:], [0.0]])
    value_A = p.reward_A * below_A + above_A
    score_AF = p.feature_AF - p.policy_A @ p.feature_AF
    gradient_F: Floats = K * (p.policy_A * value_A) @ score_AF
    return gradient_F


def bias_and_noise(p: Problem, objective: MaxAtK) -> tuple[float, float]:
    """Bias and noise relative to the true gradient; each sample's own ratio multiplies its advantage, unclipped."""
    rng = np.random.default_rng(1)
    truth_F = true_gradient(p)
    log_w_A = np.log(p.policy_A / p.behaviour_A)
    score_AF = p.feature_AF - p.policy_A @ p.feature_AF
    cumulative_A = p.behaviour_A.cumsum()
    total_F, squares = np.zeros(FEATURES), 0.0
    for _ in range(GROUPS // CHUNK):
        drawn_BN = np.searchsorted(cumulative_A, rng.random((CHUNK, N)), side="right")
        y_BN = np.minimum(drawn_BN, ACTIONS - 1)
        a_BN = advantages(p.reward_A[y_BN], objective, log_weights=log_w_A[y_BN]) * np.exp(log_w_A[y_BN])
        gradient_BF = np.einsum("bn,bnf->bf", a_BN, score_AF[y_BN])
        total_F += gradient_BF.sum(axis=0)
        squares += float((gradient_BF**2).sum())
    mean_F = total_F / GROUPS
    variance = squares / GROUPS - float(mean_F @ mean_F)
    size = float(np.sqrt(truth_F @ truth_F))
    noise = float(np.sqrt(variance)) / size
    squared_bias = (float(((mean_F - truth_F) ** 2).sum()) - variance / GROUPS) / size**2
    return max(float(np.sqrt(max(squared_bias, 0.0))), resolution(noise)), noise


def resolution(noise: float) -> float:
    """The smallest bias that can be distinguished from zero with this many groups."""
    return 3 * noise / float(np.sqrt(GROUPS))


def main() -> None:
    """Print the tables; draw the figure if ``--out`` is given."""
    folder = output_folder(__doc__ or "")
    found = {
        name: [bias_and_noise(problem(spread), objective) for spread in SPREADS]
        for name, (objective, _) in ESTIMATORS.items()
    }
    columns = [f"sd {spread}" for spread in SPREADS]
    biases = [[name, *(bias_text(*pair) for pair in pairs)] for name, pairs in found.items()]
    print_table(["relative bias", *columns], biases)
    noises = [[name, *(f"{noise:.2f}" for _, noise in pairs)] for name, pairs in found.items()]
    print_table(["relative noise of one group", *columns], noises)
    if folder is not None:
        draw(found, folder)


def bias_text(bias: float, noise: float) -> str:
    """The bias, or the bound below which it cannot be measured."""
    return f"< {bias:.3f}" if bias == resolution(noise) else f"{bias:.3f}"


def draw(found: dict[str, list[tuple[float, float]]], folder: Path) -> None:
    """Plot bias and noise against the spread of the log-ratio."""
    figure, axes = panels(2)
    for name, (_, colour) in ESTIMATORS.items():
        for index, axis in enumerate(axes):
            axis.plot(SPREADS, [pair[index] for pair in found[name]], color=colour, marker="o", ms=3, label=name)
    axes[0].set(xlabel="sd of the sequence log-ratio", ylabel="relative bias", yscale="log", ylim=(0.008, 60))
    axes[1].set(xlabel="sd of the sequence log-ratio", ylabel="relative noise of one group", yscale="log")
    axes[0].legend(frameon=False, loc="upper left", ncols=2)
    save(figure, folder, "off_policy")


if __name__ == "__main__":
    main()
