"""Time per batch: Volley's advantages, textbook formulas in a loop over groups, and enumeration of subsets.

Figures are CPU time of one core, best of several runs; slow methods run on fewer groups and are scaled up. Before
timing, every method's result is compared with Volley's.

    OMP_NUM_THREADS=1 python -m benchmarks.objectives.speed --out docs/figures
"""

import time
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from math import comb
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.objectives.report import BLUE, GREY, ORANGE, PURPLE, RED, output_folder, panels, print_table, save
from volley.objectives import MajAtK, MaxAtK, advantages

Floats = NDArray[np.float64]
B, N, K = 4096, 64, 32
SIZES = (4, 8, 16, 32, 64, 128, 256)
HARMONIC = MaxAtK(weights="harmonic", order=N)
HARMONIC_EXACT = MaxAtK(weights="harmonic", order=N, companion_weights="exact")
SUBSET_EXACT = MaxAtK(weights="harmonic", order=N - 1, baseline="subset_loo", companion_weights="exact")
Method = Callable[[Floats], Floats]


def textbook_loop(g_BN: Floats, k: int) -> Floats:
    """`(1/C(n,k)) sum_{j<i} (g_(i) - g_(j)) C(j-1, k-2)` computed literally, one group after another."""
    return _loop(g_BN, k, lambda n, j: comb(j, k - 2) / comb(n, k))


def tabulated_loop(g_BN: Floats, k: int) -> Floats:
    """The same, with the binomials computed once."""
    n = g_BN.shape[-1]
    table = [comb(j, k - 2) / comb(n, k) for j in range(n)]
    return _loop(g_BN, k, lambda n, j: table[j])


def _loop(g_BN: Floats, k: int, sets: Callable[[int, int], float]) -> Floats:
    n = g_BN.shape[-1]
    out_BN = np.zeros_like(g_BN)
    for g, out_N in zip(g_BN.tolist(), out_BN, strict=True):
        order = sorted(range(n), key=g.__getitem__)
        for rank, i in enumerate(order):
            out_N[i] = sum((g[i] - g[j]) * sets(n, below) for below, j in enumerate(order[:rank]))
    return out_BN


def numpy_loop(g_BN: Floats, k: int) -> Floats:
    """Two running sums per group in NumPy, still one group after another."""
    n = g_BN.shape[-1]
    sets_N = np.array([comb(j, k - 2) / comb(n, k) for j in range(n)])
    out_BN = np.empty_like(g_BN)
    for g_N, out_N in zip(g_BN, out_BN, strict=True):
        order = np.argsort(g_N)
        g = g_N[order]
        out_N[order] = g * (np.cumsum(sets_N) - sets_N) - (np.cumsum(sets_N * g) - sets_N * g)
    return out_BN


def enumeration(g_BN: Floats, k: int) -> Floats:
    """Enumerate every k-subset of every group."""
    out_BN = np.zeros_like(g_BN)
    for g_N, out_N in zip(g_BN.tolist(), out_BN, strict=True):
        for subset in combinations(range(len(g_N)), k):
            second, best = sorted((g_N[i], i) for i in subset)[-2:]
            out_N[best[1]] += best[0] - second[0]
    return out_BN / comb(g_BN.shape[-1], k)


def vote_enumeration(answers_BN: NDArray[np.int64], g_BN: Floats, k: int) -> Floats:
    """Enumerate every k-subset of every group, with and without each of its votes."""
    out_BN = np.zeros_like(g_BN)
    for answers, g, out_N in zip(answers_BN.tolist(), g_BN.tolist(), out_BN, strict=True):
        reward = dict(zip(answers, g, strict=True))
        for subset in combinations(range(len(g)), k):
            votes = [answers[i] for i in subset]
            value = _vote(votes, reward)
            for position, i in enumerate(subset):
                out_N[i] += value - _vote(votes[:position] + votes[position + 1 :], reward)
    return out_BN / comb(g_BN.shape[-1], k)


def _vote(votes: list[int], reward: dict[int, float]) -> float:
    counts = Counter(votes)
    top = max(counts.values())
    winners = [reward[answer] for answer, count in counts.items() if count == top]
    return sum(winners) / len(winners)


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """CPU seconds of the best of a few calls, after one warm-up call."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def batch_seconds(method: Method, groups: int, n: int) -> float:
    """CPU seconds for a batch of B groups of n, measured on fewer ``groups`` and scaled up."""
    g_BN = np.random.default_rng(0).normal(size=(groups, n))
    return seconds(lambda: method(g_BN), repeats=3) * B / groups


def max_at_k_methods(k: int) -> dict[str, tuple[Method, int]]:
    """Every way to compute the same advantages, with the number of groups to time it on."""
    return {
        "volley.objectives": (lambda g: advantages(g, MaxAtK(k=k)), B),
        "loop over groups, NumPy running sums": (lambda g: numpy_loop(g, k), 256),
        "loop over groups, binomials tabulated": (lambda g: tabulated_loop(g, k), 32),
        "loop over groups, textbook": (lambda g: textbook_loop(g, k), 8),
        "enumeration": (lambda g: enumeration(g, k), 2),
    }


def check() -> None:
    """Check on small groups that all methods agree; raises AssertionError if they do not."""
    rng = np.random.default_rng(0)
    g_BN = rng.normal(size=(2, 12))
    for method, _ in max_at_k_methods(6).values():
        np.testing.assert_allclose(method(g_BN), advantages(g_BN, MaxAtK(k=6)), atol=1e-12)
    answers_BN = rng.integers(0, 4, (2, 12))
    g_BN = (answers_BN == 0).astype(float)
    voted_BN = advantages(g_BN, MajAtK(k=6), answers=answers_BN)
    np.testing.assert_allclose(vote_enumeration(answers_BN, g_BN, 6), voted_BN, atol=1e-12)


def headline() -> None:
    """Print the times at B=4096, n=64, k=32: max@k on-policy, the loops, and two other estimates for scale."""
    rng = np.random.default_rng(0)
    g_BN, log_w_BN = rng.normal(size=(B, N)), rng.normal(scale=0.3, size=(B, N))
    answers_BN = rng.geometric(0.2, (B, N))
    solved_BN = (answers_BN == 2).astype(float)
    exact, voted = MaxAtK(k=K, companion_weights="exact"), MajAtK(k=K)
    timed = {
        "max@k, on-policy": seconds(lambda: advantages(g_BN, MaxAtK(k=K)), repeats=9),
        "  loop over groups, NumPy running sums": batch_seconds(lambda g: numpy_loop(g, K), 512, N),
        "  loop over groups, binomials tabulated": batch_seconds(lambda g: tabulated_loop(g, K), 64, N),
        "  loop over groups, textbook": batch_seconds(lambda g: textbook_loop(g, K), 16, N),
        f"sum over k = 1..{N} (harmonic), on-policy": seconds(lambda: advantages(g_BN, HARMONIC), repeats=9),
        "max@k, exact off-policy": seconds(lambda: advantages(g_BN, exact, log_weights=log_w_BN)),
        "sum over k, exact off-policy": seconds(
            lambda: advantages(g_BN, HARMONIC_EXACT, log_weights=log_w_BN), repeats=2
        ),
        f"sum over k = 1..{N - 1}, exact off-policy, subset_loo": seconds(
            lambda: advantages(g_BN, SUBSET_EXACT, log_weights=log_w_BN), repeats=1
        ),
        "maj@k, on-policy": seconds(lambda: advantages(solved_BN, voted, answers=answers_BN), repeats=1),
    }
    first = timed["max@k, on-policy"]
    rows = [[name, f"{1e3 * s:.1f} ms", f"{s / first:.0f}x" if name[0] == " " else ""] for name, s in timed.items()]
    print_table([f"B={B}, n={N}, k={K}", "time", "of the product's"], rows)


def enumeration_table() -> None:
    """Print the time per group at n=16, k=8, where a group has few enough subsets to enumerate."""
    rng = np.random.default_rng(0)
    g_BN, answers_BN = rng.normal(size=(256, 16)), rng.integers(0, 5, (256, 16))
    solved_BN = (answers_BN == 0).astype(float)
    pairs = {
        "max@k": (
            seconds(lambda: advantages(g_BN, MaxAtK(k=8))) / 256,
            seconds(lambda: enumeration(g_BN[:2], 8), repeats=1) / 2,
        ),
        "maj@k": (
            seconds(lambda: advantages(solved_BN, MajAtK(k=8), answers=answers_BN)) / 256,
            seconds(lambda: vote_enumeration(answers_BN[:2], solved_BN[:2], 8), repeats=1) / 2,
        ),
    }
    rows = [[name, f"{1e6 * a:.1f} µs", f"{1e6 * b:.0f} µs", f"{b / a:.0f}x"] for name, (a, b) in pairs.items()]
    print_table(["n=16, k=8, per group", "volley.objectives", "enumeration", "ratio"], rows)


def main() -> None:
    """Print the tables; draw the figure if ``--out`` is given."""
    folder = output_folder(__doc__ or "")
    check()
    headline()
    enumeration_table()
    if folder is not None:
        draw(folder)


def draw(folder: Path) -> None:
    """Plot the time for B groups against n, with k = n / 2."""
    figure, axes = panels(1)
    colours = [BLUE, ORANGE, PURPLE, RED, GREY]
    for index, name in enumerate(max_at_k_methods(2)):
        sizes = [n for n in SIZES if name != "enumeration" or n <= 16]
        timed = []
        for n in sizes:
            method, groups = max_at_k_methods(n // 2)[name]
            timed.append(1e3 * batch_seconds(method, groups, n))
        axes[0].plot(sizes, timed, color=colours[index], marker="o", ms=3, label=name)
    axes[0].set(xscale="log", yscale="log", xticks=SIZES, xticklabels=SIZES, xlabel="n (k = n/2)")
    axes[0].set(ylabel=f"ms for {B} groups")
    axes[0].minorticks_off()
    axes[0].legend(frameon=False, fontsize=6.5)
    save(figure, folder, "speed")


if __name__ == "__main__":
    main()
