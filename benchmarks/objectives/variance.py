"""How noisy each gradient estimate of max@k is, after the variance figures of arXiv 2505.15201.

Left panel and table 1: a one-dimensional toy problem. The policy is N(theta, 0.1) with theta = 0.8; the reward is x^2
on [0, 1] and 0 outside, so that a step too far loses everything. They show the standard deviation of the gradient with
respect to theta against k, with 16 samples, over 40,000 groups. The `partitioned` estimates split a group into n/k sets
of k instead of using all subsets.

Right panel and table 2: 0/1 rewards, 16 samples, k = 4. The gradient with respect to the logit of the solve rate
depends only on the number of solved samples, so its standard deviation is computed exactly, without simulation.

    python -m benchmarks.objectives.variance --out docs/figures
"""

from math import comb
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.objectives.report import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    output_folder,
    panels,
    print_table,
    save,
)
from volley.objectives import MaxAtK, advantages
from volley.objectives.spec import Baseline

Floats = NDArray[np.float64]
N, GROUPS, THETA, SIGMA = 16, 40_000, 0.8, 0.1
KS = (2, 4, 8, 16)
ALL_SETS: dict[Baseline, str] = {"none": ORANGE, "loo": GREEN, "subset_loo": PURPLE, "loo_minus_one": BLUE}
PARTITIONED = {"partitioned": GREY, "partitioned, baseline": RED, "partitioned, loo_minus_one": "black"}
SOLVE_RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


def partitioned(g_BN: Floats, k: int, name: str) -> Floats | None:
    """Advantages averaged over n/k disjoint sets of k; None if the estimate needs a second set but n = k."""
    sets_BSK = g_BN.reshape(len(g_BN), N // k, k)
    count = N // k
    if name == "partitioned, loo_minus_one":
        return (advantages(sets_BSK, MaxAtK(k=k)) / count).reshape(g_BN.shape)
    best_BS1 = sets_BSK.max(axis=-1, keepdims=True)
    if name == "partitioned, baseline":
        if count == 1:
            return None
        best_BS1 = best_BS1 - (best_BS1.sum(axis=1, keepdims=True) - best_BS1) / (count - 1)
    return np.broadcast_to(best_BS1 / count, sets_BSK.shape).reshape(g_BN.shape)


def estimates(g_BN: Floats, k: int) -> dict[str, Floats]:
    """By name, the advantages of every estimator that is defined for this k."""
    found: dict[str, Floats] = {}
    for name in PARTITIONED:
        a_BN = partitioned(g_BN, k, name)
        if a_BN is not None:
            found[name] = a_BN
    for baseline in ALL_SETS:
        if k < N or baseline in ("none", "loo_minus_one"):
            found[baseline] = advantages(g_BN, MaxAtK(k=k, baseline=baseline))
    return found


def toy_reward(x: Floats) -> Floats:
    """x^2 on [0, 1], 0 outside."""
    return np.where((x >= 0) & (x <= 1), x**2, 0.0)


def true_gradient(k: int) -> float:
    """d/dtheta of E max g over k draws, by quadrature: `k E[Q(x) (x - theta) / sigma^2]`, Q(x) = E max(g(x), best)."""
    x = np.linspace(THETA - 10 * SIGMA, THETA + 10 * SIGMA, 200_001)
    weight = np.exp(-0.5 * ((x - THETA) / SIGMA) ** 2)
    weight /= weight.sum()
    order = np.argsort(toy_reward(x), kind="stable")
    g, below = toy_reward(x)[order], np.cumsum(weight[order]) ** (k - 1)
    best_of_others = np.diff(below, prepend=0.0)
    q = g * below + np.concatenate([np.cumsum((g * best_of_others)[::-1])[::-1][1:], [0.0]])
    return float(k * (weight[order] * q * (x[order] - THETA)).sum() / SIGMA**2)


def toy() -> dict[str, dict[int, tuple[float, float]]]:
    """Mean and standard deviation of the gradient estimate in the toy problem, by estimator and k."""
    rng = np.random.default_rng(0)
    x_BN = rng.normal(THETA, SIGMA, (GROUPS, N))
    score_BN = (x_BN - THETA) / SIGMA**2
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for k in KS:
        for name, a_BN in estimates(toy_reward(x_BN), k).items():
            gradient_B = (a_BN * score_BN).sum(axis=-1)
            found.setdefault(name, {})[k] = (float(gradient_B.mean()), float(gradient_B.std()))
    return found


def exact_binary_deviation(baseline: Baseline, k: int, p: float) -> float:
    """Standard deviation of the gradient with respect to the logit of p; the score is 1 - p if solved, else -p."""
    counts = np.arange(N + 1)
    g_CN = (np.arange(N) < counts[:, None]).astype(float)
    gradient_C = (advantages(g_CN, MaxAtK(k=k, baseline=baseline)) * (g_CN - p)).sum(axis=-1)
    chance_C = np.array([comb(N, c) * p**c * (1 - p) ** (N - c) for c in counts])
    mean = chance_C @ gradient_C
    return float(np.sqrt(chance_C @ (gradient_C - mean) ** 2))


def main() -> None:
    """Print the tables; draw the figure if ``--out`` is given."""
    folder = output_folder(__doc__ or "")
    found = toy()
    rows = [[name, *(f"{by_k[k][1]:.3f}" if k in by_k else "-" for k in KS)] for name, by_k in found.items()]
    print_table(["sd of the gradient, toy", *(f"k={k}" for k in KS)], rows)
    worst = max(
        abs(mean - true_gradient(k)) / (sd / np.sqrt(GROUPS))
        for by_k in found.values()
        for k, (mean, sd) in by_k.items()
    )
    print(f"every estimate averages to the true gradient, at most {worst:.1f} standard errors off\n")
    binary = {name: [exact_binary_deviation(name, 4, p) for p in SOLVE_RATES] for name in ALL_SETS}
    print_table(["sd, 0/1 rewards, k=4", *(f"p={p}" for p in SOLVE_RATES)], [[n, *v] for n, v in binary.items()])
    if folder is not None:
        draw(found, folder)


def draw(found: dict[str, dict[int, tuple[float, float]]], folder: Path) -> None:
    """Plot the deviation against k in the toy problem, and against the solve rate for 0/1 rewards."""
    figure, (left, right) = panels(2)
    for name, colour in (*PARTITIONED.items(), *ALL_SETS.items()):
        by_k = found[name]
        style = "--" if name in PARTITIONED else "-"
        left.plot(list(by_k), [sd for _, sd in by_k.values()], style, marker="o", ms=3, color=colour, label=name)
    left.set(xscale="log", yscale="log", xticks=KS, xticklabels=KS, xlabel="k", ylabel="sd of the gradient, toy")
    left.minorticks_off()
    left.legend(frameon=False, fontsize=6, loc="upper left")
    left.set_ylim(0.35, 200)
    solve_rates = np.linspace(0.01, 0.95, 60)
    for name, colour in ALL_SETS.items():
        right.plot(solve_rates, [exact_binary_deviation(name, 4, p) for p in solve_rates], color=colour, label=name)
    right.set(xlabel="solve rate", ylabel="sd of the gradient, 0/1 rewards, k=4", ylim=(0, 0.45))
    right.legend(frameon=False)
    save(figure, folder, "variance")


if __name__ == "__main__":
    main()
