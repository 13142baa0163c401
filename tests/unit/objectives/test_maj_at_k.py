"""maj@k advantages and metric, compared with enumeration of all subsets in rational arithmetic, including ties."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.unit.objectives import oracle
from tests.unit.objectives.strategies import VoteCase, close, given, logs, size_of, split_votes, vote_cases
from volley.objectives import MajAtK, advantages, maj_at_k


def rewards_of(case: VoteCase) -> list[Fraction]:
    return [reward for _, reward in case.y]


@given(case=vote_cases())
def test_the_metric_equals_enumeration(case: VoteCase) -> None:
    answers, rewards = split_votes(case.y)
    close(
        [maj_at_k(answers, rewards, case.k)], [oracle.metric(oracle.voted, case.y, case.k)], size_of(rewards_of(case))
    )


@given(case=vote_cases(min_k=2))
def test_advantages_equal_enumeration(case: VoteCase) -> None:
    answers, rewards = split_votes(case.y)
    actual = advantages(rewards, MajAtK(k=case.k), answers=answers)
    close(actual, oracle.loo_minus_one(oracle.voted, case.y, case.k), size_of(rewards_of(case)))


@given(case=vote_cases(min_k=2, max_n=6))
def test_exact_companion_weights(case: VoteCase) -> None:
    answers, rewards = split_votes(case.y)
    objective = MajAtK(k=case.k, companion_weights="exact")
    actual = advantages(rewards, objective, answers=answers, log_weights=logs(case.w))
    exact = oracle.loo_minus_one(oracle.voted, case.y, case.k, oracle.product_weight(case.w))
    close(actual, exact, size_of(rewards_of(case), case.w, case.k))


@given(case=vote_cases(min_k=2, max_n=6))
def test_self_normalised_is_exact_over_the_mean_weight(case: VoteCase) -> None:
    answers, rewards = split_votes(case.y)
    log_w = logs(case.w)
    exact = advantages(rewards, MajAtK(k=case.k, companion_weights="exact"), answers=answers, log_weights=log_w)
    normalised = advantages(
        rewards, MajAtK(k=case.k, companion_weights="self_normalised"), answers=answers, log_weights=log_w
    )
    mean_weight = float(oracle.metric(lambda _: oracle.ONE, case.y, case.k, case.w))
    size = size_of(rewards_of(case), case.w, case.k)
    np.testing.assert_allclose(normalised * mean_weight, exact, rtol=1e-10, atol=1e-12 * size)


@given(case=vote_cases(), shift=st.integers(0, 5))
def test_k_one_is_reinforce_leave_one_out(case: VoteCase, shift: int) -> None:
    answers, rewards = split_votes(case.y)
    actual = advantages(rewards, MajAtK(k=1), answers=answers + shift)  # ids are only labels
    close(actual, oracle.reinforce_loo(rewards_of(case)), size_of(rewards_of(case)))


@given(case=vote_cases(min_k=2))
def test_k_two_is_the_mean_objective(case: VoteCase) -> None:
    """Two votes either tie or agree, so maj@2 is the mean reward."""
    answers, rewards = split_votes(case.y)
    actual = advantages(rewards, MajAtK(k=2), answers=answers)
    np.testing.assert_allclose(
        actual, advantages(rewards, {"kind": "mean"}), rtol=1e-11, atol=1e-12 * size_of(rewards_of(case))
    )


def test_k_equal_n_is_the_generic_leave_one_out() -> None:
    """With three votes against two, only removing a winner's vote changes the outcome, to a tie."""
    answers = np.array([7, 7, 7, 2, 2])
    rewards = np.array([1.0, 1.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(advantages(rewards, MajAtK(k=5), answers=answers), [0.5, 0.5, 0.5, 0.0, 0.0], rtol=1e-14)


def test_unanimous_groups_carry_no_signal() -> None:
    assert not advantages(np.full((3, 8), 0.1), MajAtK(k=5), answers=np.ones((3, 8), dtype=int)).any()


def test_a_batch_equals_its_groups_one_at_a_time() -> None:
    rng = np.random.default_rng(0)
    answers = rng.integers(0, 12, size=(200, 12)) % rng.integers(1, 13, size=(200, 1))
    rewards = np.where(answers == 0, 1.0, answers / 7)
    objective = MajAtK(k=5)
    batch = advantages(rewards, objective, answers=answers)
    one_by_one = [advantages(r, objective, answers=a) for r, a in zip(rewards, answers, strict=True)]
    np.testing.assert_allclose(batch, one_by_one, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(
        maj_at_k(answers, rewards, 5), [maj_at_k(a, r, 5) for r, a in zip(rewards, answers, strict=True)], rtol=1e-12
    )


def test_samples_without_an_answer_agree_with_no_other() -> None:
    """Five samples without an answer do not outvote two equal answers, and may differ in reward."""
    answers = np.array([-1, -1, -1, -1, -1, 3, 3])
    rewards = np.array([-1.0, 0.0, -1.0, 0.0, 0.0, 1.0, 1.0])
    assert maj_at_k(answers, rewards, 7) == 1.0
    apart = np.array([10, 11, 12, 13, 14, 3, 3])
    for objective in (MajAtK(k=4), MajAtK(k=1)):
        actual = advantages(rewards, objective, answers=answers)
        np.testing.assert_allclose(actual, advantages(rewards, objective, answers=apart), rtol=1e-13)


def test_one_answer_with_two_rewards_is_rejected() -> None:
    with pytest.raises(ValueError, match="share an answer and differ in reward"):
        maj_at_k([1, 1, 2], [0.0, 1.0, 0.0], 2)
    with pytest.raises(ValueError, match="share an answer and differ in reward"):
        advantages([0.0, 1.0, 0.0], MajAtK(k=1), answers=[1, 1, 2])


def test_answers_are_required() -> None:
    with pytest.raises(ValueError, match="needs answers="):
        advantages([0.0, 1.0, 0.0], MajAtK(k=2))
