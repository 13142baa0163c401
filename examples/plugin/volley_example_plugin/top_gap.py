"""The objective: the best sample's advantage is its lead over the second best; all other samples get 0.

With ``share: 1`` the advantages equal those of ``max_at_k`` with k = n and ``baseline: loo_minus_one``.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def advantages(reward_BN: NDArray[np.float64], answer_BN: NDArray[np.int64] | None, spec: Any) -> NDArray[np.float64]:
    """``share * (max(g) - max(g without i))`` for each sample i, [B, N]."""
    second_B, best_B = np.sort(reward_BN, axis=-1)[:, -2:].T
    gap_BN = np.zeros_like(reward_BN)
    np.put_along_axis(gap_BN, reward_BN.argmax(axis=-1)[:, None], (best_B - second_B)[:, None], axis=-1)
    return float(spec.share) * gap_BN
