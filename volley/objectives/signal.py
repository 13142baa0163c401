"""How much one more group of a prompt is expected to teach, from the prompt's solve rate.

Let each of n samples be solved with probability p, and call z the logit of p, on which the policy can move p. The
score of a sample is ``d log pi(y_i) / dz = r_i - p``, so the group's gradient is ``G = sum_i a_i (r_i - p)``, with the
objective's advantages of rewards 0 and 1. The group's signal is ``E|G|`` over its 2^n outcomes, of which only the n + 1
counts of solved samples differ. A dead group counts as 0. For max@k with its default baseline no G is negative, so that
the signal is the true gradient ``k p (1 - p)^k``, largest at ``p = 1 / (k + 1)``; for the mean it is ``p (1 - p)``.

Choosing prompts in proportion to the norm of their gradient minimises the variance of an importance-weighted gradient
(arXiv 1401.2753). The choice here is not weighted back: its purpose is to train more on such prompts.
"""

import numpy as np
from numpy.typing import ArrayLike

from volley.objectives.combinatorics import FloatArray
from volley.objectives.estimators import advantages
from volley.objectives.schedule import SolveRate
from volley.objectives.spec import Objective

MAX_SAMPLES = 1024  # the advantages of n + 1 groups are computed: above this, n x n floats take too much memory
_RATES_G = (np.arange(1024) + 0.5) / 1024  # where signals are tabulated


def group_signal(objective: Objective, n: int, solve_rates: ArrayLike) -> FloatArray:
    """``E|sum_i a_i (r_i - p)|`` of a group of n samples, for each solve rate p.

    Samples count as on-policy. For `maj_at_k` all wrong samples vote for one answer; for `best_of_k` the reward is the
    rank.

    Args:
        solve_rates: [...], from 0 to 1.

    Returns:
        float64 [...].

    Raises:
        ValueError: the objective does not fit n, or n is above `MAX_SAMPLES`.
    """
    if n > MAX_SAMPLES:
        raise ValueError(f"signals are computed for groups of at most {MAX_SAMPLES} samples, not {n}")
    solved_Cn = np.tri(n + 1, n, k=-1)  # row c has c solved samples
    a_Cn = advantages(solved_Cn, objective, answers=solved_Cn.astype(np.int64), ranks=solved_Cn)
    p_P1 = np.asarray(solve_rates, dtype=np.float64)[..., None]
    gradient_PC = (a_Cn * solved_Cn).sum(-1) - p_P1 * a_Cn.sum(-1)
    signal: FloatArray = (_binomial(n, p_P1) * np.abs(gradient_PC)).sum(-1)
    return signal


class PromptSignal:
    """The signal that is expected of a prompt's next group, as a share of the largest possible, for one objective.

    The prompt's solve rate is uncertain: with a uniform prior, its recorded samples give it a Beta distribution, over
    which the signal is averaged. A prompt that was never solved in a few samples therefore keeps some.
    """

    def __init__(self, objective: Objective, n: int) -> None:
        signal_G = group_signal(objective, n, _RATES_G)
        self._share_G = signal_G / max(signal_G.max(), np.finfo(np.float64).tiny)
        self._known: dict[SolveRate, float] = {}

    def share(self, rate: SolveRate | None) -> float:
        """From 0 to 1; 1 for a prompt without samples, which has yet to be measured."""
        if rate is None or rate.seen <= 0:
            return 1.0
        if rate not in self._known:
            log_weight_G = rate.solved * np.log(_RATES_G) + (rate.seen - rate.solved) * np.log1p(-_RATES_G)
            weight_G = np.exp(log_weight_G - log_weight_G.max())
            self._known[rate] = float((weight_G * self._share_G).sum() / weight_G.sum())
        return self._known[rate]


def _binomial(n: int, p_P1: FloatArray) -> FloatArray:
    """The probability of each count of solved samples, [..., n + 1]."""
    counts = np.arange(n + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    log_choose = log_factorial[n] - log_factorial - log_factorial[::-1]
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p_P1), np.log1p(-p_P1)
    solved = np.multiply(counts, log_p, out=np.zeros(np.broadcast(counts, log_p).shape), where=counts > 0)
    failed = np.multiply(n - counts, log_q, out=np.zeros_like(solved), where=counts < n)
    probability: FloatArray = np.exp(log_choose + solved + failed)
    return probability
