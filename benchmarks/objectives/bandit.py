"""The bandit of arXiv 2503.19595, figure 1: how optimising pass@4 affects the mean reward, pass@4 and the KL.

There are 100 actions with rewards drawn once from N(0, 1), a softmax policy that starts uniform, four samples per
update, learning rate 1, and plain gradient ascent. Mean, KL and pass@4 are computed from the policy, not sampled. Each
of the 20 seeds has its own rewards, which all estimators share.

    python -m benchmarks.objectives.bandit --out docs/figures
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.objectives.report import BLUE, GREEN, ORANGE, SKY, output_folder, panels, print_table, save
from volley.objectives import MaxAtK, Mean, Objective, advantages

Floats = NDArray[np.float64]
ACTIONS, K, LEARNING_RATE, SEEDS, STEPS, EVERY, DRAWN = 100, 4, 1.0, 20, 1000, 2, 300
# Objective, learning rate, colour. The gradient of the mean averages over the samples, while that of pass@4 sums; the
# paper's PPO form (A.4) gives both the same factor, which makes the mean's step four times larger.
ESTIMATORS: dict[str, tuple[Objective, float, str]] = {
    "mean": (Mean(), LEARNING_RATE, BLUE),
    "mean, summed": (Mean(), K * LEARNING_RATE, SKY),
    "pass@4": (MaxAtK(k=K), LEARNING_RATE, ORANGE),
    "pass@4, biased": (MaxAtK(k=K, center=True), LEARNING_RATE, GREEN),
}


class Curves(NamedTuple):
    """One value per seed and recorded step, [S, T]."""

    mean: Floats
    best: Floats
    kl: Floats


def run(objective: Objective, learning_rate: float) -> Curves:
    """Gradient ascent from the uniform policy on every seed at once."""
    rng = np.random.default_rng(0)
    reward_SA = np.sort(rng.normal(size=(SEEDS, ACTIONS)), axis=-1)
    logits_SA = np.zeros((SEEDS, ACTIONS))
    recorded = []
    for step in range(STEPS + 1):
        policy_SA = softmax(logits_SA)
        if step % EVERY == 0:
            recorded.append(evaluate(policy_SA, reward_SA))
        action_SN = sample(policy_SA, rng)
        a_SN = advantages(np.take_along_axis(reward_SA, action_SN, axis=-1), objective)
        # sum_i a_i grad log pi(y_i): raises the sampled actions, and lowers all actions by their probability
        gradient_SA = -a_SN.sum(axis=-1, keepdims=True) * policy_SA
        np.add.at(gradient_SA, (np.arange(SEEDS)[:, None], action_SN), a_SN)
        logits_SA += learning_rate * gradient_SA
    return Curves(*(np.stack(values, axis=-1) for values in zip(*recorded, strict=True)))


def softmax(logits_SA: Floats) -> Floats:
    """Softmax of each row."""
    p_SA: Floats = np.exp(logits_SA - logits_SA.max(axis=-1, keepdims=True))
    p_SA /= p_SA.sum(axis=-1, keepdims=True)
    return p_SA


def sample(policy_SA: Floats, rng: np.random.Generator) -> NDArray[np.int64]:
    """K actions per seed."""
    cumulative_SA = policy_SA.cumsum(axis=-1)
    drawn_SN = (rng.random((SEEDS, K))[:, :, None] > cumulative_SA[:, None, :]).sum(axis=-1)
    action_SN: NDArray[np.int64] = np.minimum(drawn_SN, ACTIONS - 1)
    return action_SN


def evaluate(policy_SA: Floats, reward_SA: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean reward, expected best of K, and KL to the uniform start; ``reward_SA`` must be sorted."""
    below_SA = np.minimum(policy_SA.cumsum(axis=-1), 1.0) ** K
    best_S = (np.diff(below_SA, axis=-1, prepend=0.0) * reward_SA).sum(axis=-1)
    kl_S = (policy_SA * np.log(np.maximum(policy_SA, 1e-300) * ACTIONS)).sum(axis=-1)
    return (policy_SA * reward_SA).sum(axis=-1), best_S, kl_S


def at_kl(curves: Curves, grid_X: Floats) -> Floats:
    """Mean reward when the KL first reaches each value of the grid, [S, X]; nan if a run never reaches it."""
    reached_ST = np.maximum.accumulate(curves.kl, axis=-1)
    rows = zip(reached_ST, curves.mean, strict=True)
    return np.array([np.interp(grid_X, kl_T, mean_T, right=np.nan) for kl_T, mean_T in rows])


def main() -> None:
    """Print the tables; draw the figure if ``--out`` is given."""
    folder = output_folder(__doc__ or "")
    results = {name: run(objective, rate) for name, (objective, rate, _) in ESTIMATORS.items()}
    rows: list[list[object]] = []
    for name, curves in results.items():
        for step in (20, 50, 100, 300, 1000):
            t = step // EVERY
            spread = curves.best[:, t].std() / np.sqrt(SEEDS)
            values = (float(curves.mean[:, t].mean()), float(curves.kl[:, t].mean()))
            rows.append([name, step, *values, f"{curves.best[:, t].mean():.3f} ± {spread:.3f}"])
    print_table(["estimator", "step", "mean reward", "KL to start", "pass@4 ± s.e."], rows)
    grid_X = np.array([0.25, 0.5, 1.0, 2.0, 3.0])
    by_kl = [[name, *map(float, at_kl(curves, grid_X).mean(axis=0))] for name, curves in results.items()]
    print_table(["mean reward at KL", *map(str, grid_X)], by_kl)
    if folder is not None:
        draw(results, folder)


def draw(results: dict[str, Curves], folder: Path) -> None:
    """Plot mean against steps, mean against KL, and pass@4 against steps, as in the paper's three panels."""
    figure, axes = panels(3)
    steps_T, grid_X = np.arange(0, DRAWN + 1, EVERY), np.linspace(0.0, 3.5, 60)
    for name, (_, _, colour) in ESTIMATORS.items():
        curves = results[name]
        shown = slice(len(steps_T))
        series = [(steps_T, curves.mean[:, shown]), (grid_X, at_kl(curves, grid_X)), (steps_T, curves.best[:, shown])]
        for axis, (x, y_SX) in zip(axes, series, strict=True):
            centre, error = y_SX.mean(axis=0), y_SX.std(axis=0) / np.sqrt(SEEDS)
            axis.plot(x, centre, color=colour, label=name)
            axis.fill_between(x, centre - error, centre + error, color=colour, alpha=0.2, linewidth=0)
    for axis, x_label, y_label in zip(
        axes, ["step", "KL to the start", "step"], ["mean", "mean", "pass@4"], strict=True
    ):
        axis.set(xlabel=x_label, ylabel=f"{y_label} reward")
    axes[0].legend(frameon=False)
    save(figure, folder, "bandit")


if __name__ == "__main__":
    main()
