"""Large groups and extreme weights, compared with exact integers: relative error under 1e-9, no overflow."""

import time
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import comb, log

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.objectives import oracle
from volley.objectives import MajAtK, MaxAtK, Mean, advantages, maj_at_k, max_at_k, pass_at_k
from volley.objectives.combinatorics import binomial_ratios
from volley.objectives.off_policy import unit_weights
from volley.objectives.spec import Baseline

N, K = 1024, 512
UNIT = 2**20
SAMPLED = [0, 300, 509, 510, 511, 512, 513, 600, 768, 1000, 1022, 1023]  # ranks
choose = cache(comb)


def rewards_and_order() -> tuple[list[int], NDArray[np.int64]]:
    """Ascending rewards in units of 1/UNIT, and the position of each in the group."""
    rng = np.random.default_rng(0)
    scaled = np.sort((rng.normal(size=N) * UNIT).astype(np.int64))
    return scaled.tolist(), rng.permutation(N)


def exact_max_at_k(g: Sequence[int], k: int) -> Fraction:
    n = len(g)
    return Fraction(sum(choose(p, k - 1) * g[p] for p in range(n)), choose(n, k) * UNIT)


def exact_advantage(baseline: Baseline, g: list[int], i: int, k: int) -> Fraction:
    n, others = len(g), g[:i] + g[i + 1 :]
    sets_with_i = g[i] * choose(i, k - 1) + sum(g[p] * choose(p - 1, k - 2) for p in range(i + 1, n))
    s = Fraction(sets_with_i, choose(n, k) * UNIT)
    subtracted = {
        "none": lambda: Fraction(0),
        "loo": lambda: Fraction(k, n - 1) * exact_max_at_k(others, k),
        "subset_loo": lambda: Fraction(k, n) * exact_max_at_k(others, k),
        "loo_minus_one": lambda: Fraction(k, n) * exact_max_at_k(others, k - 1),
    }
    return s - subtracted[baseline]()


@pytest.mark.parametrize("baseline", ["none", "loo", "subset_loo", "loo_minus_one"])
def test_max_at_k_of_a_thousand_samples(baseline: Baseline) -> None:
    scaled, order = rewards_and_order()
    g = np.empty(N)
    g[order] = np.array(scaled) / UNIT
    a = advantages(g, MaxAtK(k=K, baseline=baseline))[order]
    exact = [float(exact_advantage(baseline, scaled, i, K)) for i in SAMPLED]
    np.testing.assert_allclose(a[SAMPLED], exact, rtol=1e-9, atol=0)
    np.testing.assert_allclose(max_at_k(g, K), float(exact_max_at_k(scaled, K)), rtol=1e-12)


def test_the_smallest_advantages_keep_their_digits() -> None:
    """Rank 512 is the best of one subset in 10^306, and its advantage is still right to 1e-9."""
    scaled, _ = rewards_and_order()
    a = advantages(np.array(scaled) / UNIT, MaxAtK(k=K))
    assert 0 < a[511] < 1e-305
    np.testing.assert_allclose(a[511], float(exact_advantage("loo_minus_one", scaled, 511, K)), rtol=1e-9, atol=0)


def test_off_policy_max_at_k_of_a_thousand_samples() -> None:
    """Weights from 1/4 to 9/4; the exact elementary symmetric polynomials are computed with Python integers."""
    scaled, order = rewards_and_order()
    quarters = np.random.default_rng(1).integers(1, 10, N).tolist()
    e = [1] + [0] * (K - 1)
    numerator, slope, exact = 0, 0, {}
    for i, (g, w) in enumerate(zip(scaled, quarters, strict=True)):
        if i in SAMPLED:
            exact[i] = float(Fraction(g * slope - numerator, choose(N, K) * UNIT * 4 ** (K - 1)))
        ending_here = w * e[K - 2]
        slope, numerator = slope + ending_here, numerator + ending_here * g
        for j in range(K - 1, 0, -1):
            e[j] += w * e[j - 1]
    g_N, log_w_N = np.empty(N), np.empty(N)
    g_N[order], log_w_N[order] = np.array(scaled) / UNIT, np.log(np.array(quarters) / 4)
    a = advantages(g_N, MaxAtK(k=K, companion_weights="exact"), log_weights=log_w_N)[order]
    np.testing.assert_allclose(a[list(exact)], list(exact.values()), rtol=1e-9, atol=0)


COUNTS = (400, 330, 294)
VALUES = (0, 6, -12)  # multiples of 6, so that means of tied rewards are integers


def winners_value(votes: Sequence[int]) -> int:
    winning = [value for value, count in zip(VALUES, votes, strict=True) if count == max(votes)]
    return sum(winning) // len(winning)


def exact_vote_sums(answer: int | None, weights: Sequence[int], draws: int) -> Fraction:
    """Sums over draws from the group (without one sample of `answer`) of f, or of f's change by a vote for `answer`."""
    left = [count - (a == answer) for a, count in enumerate(COUNTS)]
    tables = [[choose(c, x) * w**x for x in range(draws + 1)] for c, w in zip(left, weights, strict=True)]
    total = 0
    for x in range(min(left[0], draws) + 1):
        for y in range(max(0, draws - x - left[2]), min(left[1], draws - x) + 1):
            votes = [x, y, draws - x - y]
            value = winners_value(votes)
            if answer is not None:
                after = [count + (a == answer) for a, count in enumerate(votes)]
                value = winners_value(after) - value
            if value:
                total += value * tables[0][x] * tables[1][y] * tables[2][votes[2]]
    return Fraction(total, 6)


def vote_group() -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    answers = np.random.default_rng(2).permutation(np.repeat(np.arange(3), COUNTS))
    return answers, np.array(VALUES)[answers] / 6, np.array([np.flatnonzero(answers == a)[0] for a in range(3)])


def test_maj_at_k_of_a_thousand_samples() -> None:
    answers, rewards, first = vote_group()
    exact = float(exact_vote_sums(None, (1, 1, 1), K) / choose(N, K))
    np.testing.assert_allclose(maj_at_k(answers, rewards, K), exact, rtol=1e-9)
    a = advantages(rewards, MajAtK(k=K), answers=answers)
    exact_a = [float(exact_vote_sums(answer, (1, 1, 1), K - 1) / choose(N, K)) for answer in range(3)]
    np.testing.assert_allclose(a[first], exact_a, rtol=1e-9, atol=0)


def test_off_policy_maj_at_k_of_a_thousand_samples() -> None:
    """Weights of 3/4, 5/4 and 1 by answer."""
    answers, rewards, first = vote_group()
    weights = (3, 5, 4)
    log_w = np.log(np.array(weights) / 4)[answers]
    a = advantages(rewards, MajAtK(k=K, companion_weights="exact"), answers=answers, log_weights=log_w)
    exact_a = [float(exact_vote_sums(answer, weights, K - 1) / (choose(N, K) * 4 ** (K - 1))) for answer in range(3)]
    np.testing.assert_allclose(a[first], exact_a, rtol=1e-9, atol=0)


def powers_of_two(n: int, largest: int) -> tuple[list[Fraction], NDArray[np.float64]]:
    exponents = np.random.default_rng(3).integers(-largest, largest + 1, n)
    return [Fraction(2) ** int(e) for e in exponents], (exponents * log(2)).astype(np.float64)


def exact_off_policy(g: Sequence[int], w: Sequence[Fraction], k: int) -> tuple[list[Fraction], Fraction]:
    """`A_i` for ascending integer rewards, and `e_k(w) / C(n, k)`."""
    n = len(g)
    e = [Fraction(1)] + [Fraction(0)] * k
    slope = numerator = Fraction(0)
    out = []
    for reward, weight in zip(g, w, strict=True):
        out.append((reward * slope - numerator) / choose(n, k))
        slope, numerator = slope + weight * e[k - 2], numerator + weight * e[k - 2] * reward
        for j in range(k, 0, -1):
            e[j] += weight * e[j - 1]
    return out, e[k] / choose(n, k)


def test_weights_over_many_orders_of_magnitude() -> None:
    """Log-ratios with a standard deviation of 35: subset weights from 1e-200 to 1e200 in one group."""
    g, (w, log_w), k = list(range(40)), powers_of_two(40, 90), 10
    exact, mean_weight = exact_off_policy(g, w, k)
    a = advantages(np.array(g), MaxAtK(k=k, companion_weights="exact"), log_weights=log_w)
    np.testing.assert_allclose(a, [float(x) for x in exact], rtol=1e-9, atol=0)
    normalised = advantages(np.array(g), MaxAtK(k=k, companion_weights="self_normalised"), log_weights=log_w)
    np.testing.assert_allclose(normalised, [float(x / mean_weight) for x in exact], rtol=1e-9, atol=0)


@pytest.mark.parametrize("baseline", ["loo_minus_one", "none", "subset_loo"])
def test_self_normalised_weights_of_any_common_size(baseline: Baseline) -> None:
    """Ten factors of exp(400) or exp(-400) exceed float64; normalised, all weights are equal."""
    g = np.arange(40.0)
    log_w = np.random.default_rng(4).normal(size=40)
    objective = MaxAtK(k=10, baseline=baseline, companion_weights="self_normalised")
    reference = advantages(g, objective, log_weights=log_w)
    for shift in (-400.0, 400.0):
        # the shift does not change a_i = w_i A_i
        a = advantages(g, objective, log_weights=log_w + shift) * np.exp(shift)
        np.testing.assert_allclose(a, reference, rtol=1e-9, atol=1e-12)


FAR = [(0, 0, 3000, 1, 0), (0, -3000, 1, 0, 2), (1000, -900, 400, -300, 7), (900, 900, 901, 900, 902)]  # powers of two


@pytest.mark.parametrize("exponents", FAR, ids=str)
@pytest.mark.parametrize("baseline", ["none", "loo", "subset_loo", "loo_minus_one"])
def test_self_normalised_weights_that_no_float_holds(baseline: Baseline, exponents: tuple[int, ...]) -> None:
    """Products of weights of 2^3000 overflow and their normaliser underflows, but the quotient is a normal float."""
    g, k = [Fraction(x) for x in (0, 1, 3, 2, -1)], 2
    w = [Fraction(2) ** each for each in exponents]
    f = {"none": oracle.no_baseline, "loo_minus_one": oracle.loo_minus_one}.get(baseline)
    mean_weight = oracle.metric(lambda _: oracle.ONE, g, k, w)
    a = advantages(
        [float(x) for x in g],
        MaxAtK(k=k, baseline=baseline, companion_weights="self_normalised"),
        log_weights=np.array(exponents) * log(2),
    )
    own = np.array(exponents) * log(2)
    corrected = np.sign(a) * np.exp(np.log(np.maximum(np.abs(a), 1e-300)) + np.minimum(own, 0.0))
    assert np.isfinite(a).all()
    assert np.abs(corrected).max() < 10 * k
    if f is not None:
        exact = [x / mean_weight for x in f(oracle.best, g, k, oracle.product_weight(w))]
        np.testing.assert_allclose(a, [float(x) for x in exact], rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("exponents", FAR, ids=str)
def test_self_normalised_votes_with_weights_that_no_float_holds(exponents: tuple[int, ...]) -> None:
    votes = [(0, Fraction(1)), (1, Fraction(0)), (0, Fraction(1)), (2, Fraction(-1)), (1, Fraction(0))]
    w = [Fraction(2) ** each for each in exponents]
    mean_weight = oracle.metric(lambda _: oracle.ONE, votes, 2, w)
    exact = [x / mean_weight for x in oracle.loo_minus_one(oracle.voted, votes, 2, oracle.product_weight(w))]
    a = advantages(
        [float(reward) for _, reward in votes],
        MajAtK(k=2, companion_weights="self_normalised"),
        answers=[answer for answer, _ in votes],
        log_weights=np.array(exponents) * log(2),
    )
    np.testing.assert_allclose(a, [float(x) for x in exact], rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("baseline", ["none", "loo", "subset_loo", "loo_minus_one"])
def test_overflowing_weights_of_subsets_without_a_gain_do_not_count(baseline: Baseline) -> None:
    objective = MaxAtK(k=3, baseline=baseline, companion_weights="exact")
    far = [800.0, 800.0, 0.0, 0.0]
    assert not advantages(np.zeros(4), objective, log_weights=far).any()
    with pytest.raises(ValueError, match="self_normalised, or a weight_cap"):
        advantages([0.0, 1.0, 2.0, 3.0], objective, log_weights=far)


def test_weights_that_overflow_under_a_cap_need_a_smaller_one() -> None:
    objective = MaxAtK(k=64, companion_weights="exact", weight_cap=1e6)
    with pytest.raises(ValueError, match="self_normalised, or a smaller weight_cap"):
        advantages(np.arange(65.0), objective, log_weights=np.full(65, 800.0))


def test_overflow_errors_name_what_overflowed() -> None:
    with pytest.raises(ValueError, match=r"reciprocals overflow float64.* lower max_lag"):
        advantages([0.0, 1.0], MaxAtK(k=2, companion_weights="self_normalised"), log_weights=[-800.0, -800.0])
    with pytest.raises(ValueError, match="scale them down"):
        advantages([1e308, -1e308], Mean())
    with pytest.raises(ValueError, match="scale them down"):  # the objective does not use these weights
        advantages([1e308, -1e308], MaxAtK(k=2), log_weights=[0.0, 0.0])
    with pytest.raises(ValueError, match="scale them down"):
        advantages([1e308, -1e308, -1e308, 1e308], MaxAtK(k=2, baseline="loo", companion_weights="exact"))
    with pytest.raises(ValueError, match="scale them down"):
        advantages([1e308, -1e308], Mean(), log_weights=[0.0, 0.0])
    with pytest.raises(ValueError, match="products of importance weights overflow"):
        max_at_k([1.0, 2.0, 3.0], 2, log_weights=[800.0, 800.0, 0.0])
    assert max_at_k([0.0, 0.0, 0.0], 2, log_weights=[800.0, 800.0, 0.0]) == 0.0


def test_off_policy_maj_at_k_with_weights_over_many_orders_of_magnitude() -> None:
    """Two answers whose weights are 2^90 apart: every draw that matters is an unlikely one."""
    answers = np.repeat([0, 1], 8)
    rewards, log_w = answers.astype(float), np.where(answers == 0, -45, 45) * log(2)
    a = advantages(rewards, MajAtK(k=9, companion_weights="exact"), answers=answers, log_weights=log_w)
    light, heavy = Fraction(1, 2**45), Fraction(2**45)
    for answer, sign in ((0, -1), (1, 1)):
        # one more vote decides between four and four, for either answer
        others = [choose(8 - (answer == x), 4) * w**4 for x, w in ((0, light), (1, heavy))]
        exact = sign * Fraction(1, 2) * others[0] * others[1] / choose(16, 9)
        np.testing.assert_allclose(a[answer * 8], float(exact), rtol=1e-9, atol=0)


def test_pass_at_k_of_rare_and_common_solutions() -> None:
    for n, c, k in [(10_000, 1, 1), (10_000, 9_999, 5_000), (1024, 2, 512), (10_000, 3, 4_000)]:
        exact = 1 - Fraction(choose(n - c, k), choose(n, k))
        np.testing.assert_allclose(pass_at_k(n, c, k), float(exact), rtol=1e-12)


def test_binomials_of_ten_thousand_samples_are_fast() -> None:
    """Coefficients are exact and computed by recurrence; 10,000 separate large binomials would take seconds."""
    g = np.zeros(10_000)
    g[:3] = 1.0
    begun = time.process_time()
    value = max_at_k(g, 4_000)
    a = advantages(g, MaxAtK(k=4_000))
    assert time.process_time() - begun < 1.0
    np.testing.assert_allclose(value, pass_at_k(10_000, 3, 4_000), rtol=1e-12)
    alone = 1 - pass_at_k(9_999, 2, 3_999)  # no other correct sample among the companions
    np.testing.assert_allclose(a[:3], 4_000 / 10_000 * alone, rtol=1e-9)
    assert not a[3:].any()


@pytest.mark.parametrize(("start", "stop", "j"), [(-3, 9, 4), (0, 9, 0), (2, 9, 4), (6, 9, 4), (0, 3, 4), (0, 5, -1)])
def test_binomial_ratios_equal_their_definition(start: int, stop: int, j: int) -> None:
    exact = [comb(m, j) / comb(11, 5) if m >= 0 and j >= 0 else 0.0 for m in range(start, stop)]
    np.testing.assert_array_equal(binomial_ratios(start, stop, j, 11, 5), exact)


def test_votes_work_with_rewards_of_any_size() -> None:
    answers = [0, 1, 2, 0, 1, 0]
    r = np.array([1.0, 0.25, -3.0, 1.0, 0.25, 1.0])
    log_w = np.random.default_rng(5).normal(size=6)
    for scale in (1e-200, 1e200, 1e300):
        for objective in (MajAtK(k=3), MajAtK(k=3, companion_weights="exact")):
            a = advantages(scale * r, objective, answers=answers, log_weights=log_w)
            expected = advantages(r, objective, answers=answers, log_weights=log_w)
            np.testing.assert_allclose(a, scale * expected, rtol=1e-12, atol=1e-14 * scale)
        np.testing.assert_allclose(maj_at_k(answers, scale * r, 3), scale * maj_at_k(answers, r, 3), rtol=1e-12)


def test_a_group_whose_sets_all_have_weight_zero_keeps_its_weights() -> None:
    log_w = np.array([[-np.inf, -np.inf, 0.5], [0.0, 1.0, 2.0]])
    weights, unit = unit_weights(log_w, 2)
    np.testing.assert_array_equal(weights[0], log_w[0])
    assert unit[0] == 0.0 < unit[1]
