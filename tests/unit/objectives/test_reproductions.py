"""The exact values that the reproductions compare with, checked in a second way."""

import numpy as np

from benchmarks.objectives import bandit, off_policy, speed, variance


def test_the_timed_methods_agree() -> None:
    speed.check()


def test_bandit_values_agree_with_sampling() -> None:
    rng = np.random.default_rng(0)
    reward_SA = np.sort(rng.normal(size=(2, bandit.ACTIONS)))
    policy_SA = bandit.softmax(rng.normal(size=(2, bandit.ACTIONS)))
    mean_S, best_S, kl_S = bandit.evaluate(policy_SA, reward_SA)
    for seed in range(2):
        drawn = reward_SA[seed][rng.choice(bandit.ACTIONS, size=(100_000, bandit.K), p=policy_SA[seed])]
        np.testing.assert_allclose(mean_S[seed], drawn.mean(), atol=0.02)
        np.testing.assert_allclose(best_S[seed], drawn.max(axis=-1).mean(), atol=0.02)
    np.testing.assert_allclose(kl_S, np.log(bandit.ACTIONS) + (policy_SA * np.log(policy_SA)).sum(axis=-1))


def test_toy_gradient_is_a_derivative() -> None:
    """Compared with finite differences of the expected best of k, simulated with common random numbers."""
    draws = np.random.default_rng(1).normal(size=(400_000, 4)) * variance.SIGMA
    step = 0.01
    up, down = (variance.toy_reward(variance.THETA + e + draws).max(axis=-1).mean() for e in (step, -step))
    np.testing.assert_allclose(variance.true_gradient(4), (up - down) / (2 * step), atol=0.01)


def test_exact_deviations_equal_simulated_ones() -> None:
    """n = 16, k = 4; the expected values come from a separate simulation."""
    known = {("loo_minus_one", 0.1): 0.146, ("loo", 0.1): 0.136, ("loo_minus_one", 0.5): 0.063, ("loo", 0.5): 0.128}
    for (baseline, p), deviation in known.items():
        np.testing.assert_allclose(variance.exact_binary_deviation(baseline, 4, p), deviation, atol=6e-4)  # type: ignore[arg-type]


def test_off_policy_gradient_is_a_derivative() -> None:
    problem = off_policy.problem(0.5)

    def best_of_k(weights: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        p = problem.policy_A * np.exp(problem.feature_AF @ weights)
        below = (p / p.sum()).cumsum() ** off_policy.K
        return float(np.diff(below, prepend=0.0) @ problem.reward_A)

    step = 1e-5 * np.eye(off_policy.FEATURES)
    differences = [(best_of_k(e) - best_of_k(-e)) / 2e-5 for e in step]
    np.testing.assert_allclose(off_policy.true_gradient(problem), differences, rtol=1e-6, atol=1e-9)


def test_log_ratios_have_the_requested_spread() -> None:
    problem = off_policy.problem(0.35)
    log_ratio = np.log(problem.policy_A / problem.behaviour_A)
    mean = problem.behaviour_A @ log_ratio
    np.testing.assert_allclose(np.sqrt(problem.behaviour_A @ (log_ratio - mean) ** 2), 0.35, rtol=1e-12)


def test_partitioned_estimates_use_disjoint_sets() -> None:
    g = np.random.default_rng(2).normal(size=(3, variance.N))
    plain = variance.partitioned(g, 4, "partitioned")
    assert plain is not None
    np.testing.assert_allclose(plain[0, :4], g[0, :4].max() / 4)
    assert variance.partitioned(g, variance.N, "partitioned, baseline") is None
    whole = variance.partitioned(g, variance.N, "partitioned, loo_minus_one")
    assert whole is not None
    np.testing.assert_allclose(whole, variance.estimates(g, variance.N)["loo_minus_one"])
