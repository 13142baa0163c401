"""KL and entropy beside every objective's advantages: a step's gradient against a loop over samples."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.batch import rank_batch
from tests.learner_batches import naive_logprobs, scored
from tests.unit.learner.conftest import tiny_lm
from tests.unit.learner.reinforcers import groups_of, reinforcer, step
from volley.objectives.spec import BUILT_IN
from volley.update import PolicyUpdate

KL, ENTROPY = 0.1, 0.05
OBJECTIVES: dict[str, dict[str, Any]] = {
    "mean": {},
    "max_at_k": {"k": 2},
    "maj_at_k": {"k": 2},
    "best_of_k": {"k": 2},
    "softmax": {"beta": 1.0},
    "maxrl": {},
    "risk_sensitive": {"beta": 1.0},
    "pass_at_k_analytic": {"k": 2},
}
AS_PUBLISHED = {"maxrl", "risk_sensitive", "pass_at_k_analytic"}  # for a mean over samples, which is not divided by n
EQUAL_REWARDS = [1.0, 1.0, 1.0, 1.0]  # no objective has a gradient here, but the penalties have


def test_every_objective_is_tried() -> None:
    assert OBJECTIVES.keys() == BUILT_IN


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_the_penalties_of_a_step_have_their_coefficients(kind: str) -> None:
    lm, reference = tiny_lm(), tiny_lm(initializer_range=0.25)
    groups = groups_of()
    objective = {"kind": kind, **OBJECTIVES[kind]}
    spec = PolicyUpdate.model_validate({"kl": {"coefficient": KL, "estimator": "k3"}, "entropy_bonus": ENTROPY})
    columns = [replace(scored(group, EQUAL_REWARDS), ranks_n=np.arange(4, dtype=np.float64)) for group in groups]
    batch = rank_batch(groups, columns, version=0, mask_truncated=False)
    worker, engine = reinforcer(lm, spec, reference=reference)
    _, advantage_Gn = step(worker, batch, objective)
    assert not advantage_Gn.any()
    expected = torch.autograd.grad(penalty_of(lm, reference, groups, kind), list(lm.parameters()))
    for mine, theirs in zip(engine.seen[0].values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def penalty_of(lm: Any, reference: Any, groups: list[Any], kind: str) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for group in groups:
        theta_T, entropy_T = naive_logprobs(lm, group)
        difference_T = theta_T - naive_logprobs(reference, group)[0].detach()
        term = KL * (torch.exp(-difference_T) - 1 + difference_T).sum() - ENTROPY * entropy_T.sum()
        loss = loss + term / (1 if kind in AS_PUBLISHED else group.n) / len(groups)
    return loss
