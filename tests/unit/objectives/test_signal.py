"""The signal expected of a prompt's next group, against enumeration of all its outcomes."""

from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from volley.objectives import SolveRate, advantages, parse_objective
from volley.objectives.signal import MAX_SAMPLES, PromptSignal, group_signal

OBJECTIVES: dict[str, dict[str, Any]] = {
    "mean": {"kind": "mean"},
    "max@2": {"kind": "max_at_k", "k": 2},
    "max@4": {"kind": "max_at_k", "k": 4},
    "max@3, subset": {"kind": "max_at_k", "k": 3, "baseline": "subset_loo"},
    "max@3, none": {"kind": "max_at_k", "k": 3, "baseline": "none"},
    "weights": {"kind": "max_at_k", "weights": {1: 0.5, 4: 0.5}},
    "GRPO": {"kind": "mean", "center": True, "normalize": "std"},
    "maxrl": {"kind": "maxrl"},
    "maj@3": {"kind": "maj_at_k", "k": 3},
    "best of 3": {"kind": "best_of_k", "k": 3},
    "focal": {"kind": "mean", "focal": 2.0},
}


def enumerated(objective: dict[str, Any], n: int, p: float) -> float:
    """E|G| over every order of solved and failed samples."""
    total = 0.0
    for outcome in product((0.0, 1.0), repeat=n):
        rewards = np.array(outcome)
        a_n = advantages(rewards, objective, answers=rewards.astype(int), ranks=rewards)
        total += float(np.prod(np.where(rewards == 1, p, 1 - p))) * abs(float((a_n * (rewards - p)).sum()))
    return total


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("n", [5, 6])
def test_the_signal_is_the_expected_size_of_the_gradient(name: str, n: int) -> None:
    rates = [0.0, 0.03, 0.25, 0.5, 0.8, 1.0]
    found = group_signal(parse_objective(OBJECTIVES[name]), n, rates)
    assert found == pytest.approx([enumerated(OBJECTIVES[name], n, p) for p in rates], rel=1e-11, abs=1e-13)
    assert found[2] > 0


@pytest.mark.parametrize(("k", "n"), [(1, 2), (1, 16), (4, 4), (4, 16), (8, 64)])
def test_the_signal_of_max_at_k_is_the_true_gradient_and_peaks_below_one_in_k(k: int, n: int) -> None:
    objective = parse_objective({"kind": "max_at_k", "k": k})
    rates = np.linspace(0, 1, 201)
    assert group_signal(objective, n, rates) == pytest.approx(k * rates * (1 - rates) ** k, rel=1e-9, abs=1e-12)
    peak = 1 / (k + 1)
    around = group_signal(objective, n, [peak - 0.01, peak, peak + 0.01])
    assert around.argmax() == 1


def test_the_gradient_on_the_logit_is_that_of_pass_at_k() -> None:
    """Independent of the estimator: d pass@k / dz = p (1 - p) d/dp (1 - (1 - p)^k), in rational arithmetic."""
    p, k = Fraction(1, 7), 3
    exact = p * (1 - p) * k * (1 - p) ** (k - 1)
    assert group_signal(parse_objective({"kind": "max_at_k", "k": k}), 8, float(p)) == pytest.approx(float(exact))


def test_a_prompt_without_samples_has_the_largest_share() -> None:
    signal = PromptSignal(parse_objective({"kind": "mean"}), 8)
    assert signal.share(None) == 1.0
    assert signal.share(SolveRate(0.0, 0.0)) == 1.0


def test_the_share_is_the_posterior_mean() -> None:
    """Under Beta(s + 1, f + 1) the mean of p (1 - p) is (s + 1) (f + 1) / ((s + f + 2) (s + f + 3)), 1/4 at most."""
    signal = PromptSignal(parse_objective({"kind": "mean"}), 8)
    for solved, failed in ((0, 8), (1, 7), (4, 4), (8, 0), (2.5, 9.5), (0, 200)):
        exact = (solved + 1) * (failed + 1) / ((solved + failed + 2) * (solved + failed + 3))
        assert signal.share(SolveRate(solved, solved + failed)) == pytest.approx(4 * exact, rel=5e-3)


def test_prompts_near_the_most_informative_rate_come_first_and_more_evidence_decides_more() -> None:
    signal = PromptSignal(parse_objective({"kind": "max_at_k", "k": 8}), 16)
    rates = [SolveRate(16 * p, 16.0) for p in (0.0, 1 / 8, 0.5, 1.0)]
    never, best, half, always = (signal.share(rate) for rate in rates)
    assert best > never > half > always
    assert signal.share(SolveRate(0.0, 160.0)) < never, "ten times the failures leave less hope"
    assert 0 <= always < 1e-3


def test_a_group_too_large_is_rejected() -> None:
    with pytest.raises(ValueError, match="at most 1024 samples, not 1025"):
        group_signal(parse_objective({"kind": "mean"}), MAX_SAMPLES + 1, 0.5)


def test_the_largest_group_is_computed() -> None:
    assert group_signal(parse_objective({"kind": "mean"}), MAX_SAMPLES, 0.5) == pytest.approx(0.25, rel=1e-9)


def test_one_sample_moves_the_share_and_thousands_do_not_underflow() -> None:
    signal = PromptSignal(parse_objective({"kind": "mean"}), 8)
    assert signal.share(SolveRate(0.0, 1.0)) == pytest.approx(4 * 2 / 12, rel=5e-3)
    assert signal.share(SolveRate(2000.0, 4000.0)) == pytest.approx(1.0, rel=5e-3)
