"""Episodes that end before the model's first answer: samples, groups and batches without tokens or prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner.batch import rank_batch
from learner.pool import stale
from learner.value import prompt_rows
from tests.learner_batches import scored
from tests.unit.learner.conftest import tiny_lm
from tests.unit.learner.reinforcers import MAX2, REWARDS, SPECS, batch_of, groups_of, reinforcer, step, textbook_loss
from volley.records import Group
from volley.update import PolicyUpdate


def emptied(group: Group, samples: Sequence[int], *, prompt: bool = True) -> Group:
    """The group without the tokens of ``samples``."""
    gone_T = np.isin(np.repeat(np.arange(group.n), group.lengths_n), samples)
    return replace(
        group,
        prompt_p=group.prompt_p if prompt else group.prompt_p[:0],
        tokens_T=group.tokens_T[~gone_T],
        logprobs_T=group.logprobs_T[~gone_T],
        versions_T=group.versions_T[~gone_T],
        lengths_n=np.where(np.isin(np.arange(group.n), samples), 0, group.lengths_n).astype(np.int32),
    )


@pytest.mark.parametrize("spec", [PolicyUpdate.model_validate(each) for each in SPECS.values()], ids=list(SPECS))
@pytest.mark.parametrize("prompt", [True, False], ids=["with prompt", "without prompt"])
@pytest.mark.parametrize("which", [[0], [3], [1, 2], range(4)], ids=str)
def test_the_others_have_the_gradient_of_the_textbook(spec: PolicyUpdate, prompt: bool, which: Sequence[int]) -> None:
    lm, reference = tiny_lm(), tiny_lm(initializer_range=0.25)
    prompt |= len(which) < 4
    groups = [emptied(group, which, prompt=prompt) if row == 1 else group for row, group in enumerate(groups_of())]
    loss = textbook_loss(lm, reference, groups, spec)
    expected = torch.autograd.grad(loss, list(lm.parameters()))
    for budget, shared in ((1 << 20, True), (1 << 20, False), (25, False)):
        worker, engine = reinforcer(lm, spec, reference=reference, budget=budget, shared=shared)
        metrics, _ = step(worker, batch_of(groups, spec), MAX2)
        assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert all(np.isfinite(value) for value in metrics.values())
        for mine, theirs in zip(engine.seen[0].values(), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [PolicyUpdate.model_validate(each) for each in SPECS.values()], ids=list(SPECS))
@pytest.mark.parametrize("prompt", [True, False], ids=["with prompt", "without prompt"])
def test_a_batch_without_tokens_is_a_step_that_changes_nothing(spec: PolicyUpdate, prompt: bool) -> None:
    lm = tiny_lm()
    worker, engine = reinforcer(lm, spec, reference=tiny_lm(initializer_range=0.25))
    groups = [emptied(group, range(4), prompt=prompt) for group in groups_of()]
    metrics, _ = step(worker, batch_of(groups, spec), MAX2)
    assert all(np.isfinite(value) for value in metrics.values())
    assert all((gradient == 0).all() for gradient in engine.seen[0].values())


@pytest.mark.parametrize("version", [0, 1, 9])
def test_a_group_without_tokens_is_never_too_old(version: int) -> None:
    group, old = (emptied(each, which) for each, which in zip(groups_of(), (range(4), [0]), strict=False))
    columns = [scored(group, REWARDS[0]), scored(old, REWARDS[1])]
    assert set(stale(columns, version)) == ({old.group_id} if version > 0 else set())
    batch: Any = rank_batch([group, old], columns, version=version, mask_truncated=False)
    assert len(batch.lag_T) == len(old.tokens_T)


def test_the_value_of_an_empty_prompt_is_not_computed() -> None:
    prompts = [np.arange(length, dtype=np.int32) for length in (3, 0, 5, 0)]
    rows = prompt_rows(prompts, 8)
    assert sorted(index for each in rows for index in each.group_R.tolist()) == [0, 2]
    assert prompt_rows([prompts[1]], 8) == []
