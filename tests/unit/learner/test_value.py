"""The value model: the baseline it gives each objective, and what it learns."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.batch import rank_batch
from learner.value import Critic, PromptValue, prompt_rows
from tests.learner_batches import naive_logprobs, scored
from tests.unit.learner.conftest import tiny_lm
from tests.unit.learner.reinforcers import REWARDS, Recording, batch_of, by_sample, groups_of, reinforcer, step
from volley.objectives import BestOfK, MajAtK, MaxAtK, MaxRL, Mean, Objective, PassAtKAnalytic, Softmax, advantages
from volley.records import Group
from volley.update import Optimizer, PolicyUpdate, ValueModel


def critic_of(lm: Any, spec: ValueModel, budget: int = 1 << 20, lr: float = 1e-30) -> tuple[Critic, Recording]:
    critic = Critic.__new__(Critic)  # without DeepSpeed
    module = PromptValue(lm.base_model)
    torch.nn.init.normal_(module.head.weight, std=0.1)
    engine = Recording(module, Optimizer(lr=lr, clip_norm=None))
    critic.spec, critic.budget, critic.engine = spec, budget, engine  # type: ignore[assignment]
    return critic, engine


def own_values(critic: Critic, groups: list[Group]) -> Tensor:
    """The value of each prompt, one unpadded prompt at a time."""
    module = critic.engine.module
    states = [module.trunk(input_ids=torch.from_numpy(g.prompt_p.astype(np.int64))[None]) for g in groups]
    return torch.stack([module.head(state.last_hidden_state[0, -1])[0] for state in states])


@pytest.mark.parametrize("budget", [1 << 20, 12])
def test_the_value_model_is_the_baseline_of_the_mean(budget: int) -> None:
    lm = tiny_lm()
    spec = PolicyUpdate(value_model=ValueModel())
    groups = groups_of()
    critic, engine = critic_of(tiny_lm(), ValueModel(), budget)
    worker, _ = reinforcer(lm, spec, critic=critic)
    valid = [[True, False, True, True], [True] * 4, [True] * 4]
    value_G = own_values(critic, groups)
    loss = torch.zeros((), dtype=torch.float64)
    for row, rewards in enumerate(REWARDS):
        kept_n = np.array(valid[row])
        loss = loss + ((value_G[row] - torch.tensor(rewards)[torch.from_numpy(kept_n)]) ** 2).sum() / 2 / 11
    expected = torch.autograd.grad(loss, list(engine.module.parameters()))
    metrics, advantage_Gn = step(worker, batch_of(groups, spec, valid), Mean())
    for row, rewards in enumerate(REWARDS):
        kept_n = np.array(valid[row])
        expected_n = np.where(kept_n, (np.array(rewards) - float(value_G[row].detach())) / kept_n.sum(), 0.0)
        np.testing.assert_allclose(advantage_Gn[row], expected_n, rtol=1e-5, atol=1e-7)
    assert metrics["value_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["live_group_fraction"] == 1.0  # equal rewards have a gradient if the value model expected others
    for mine, theirs in zip(engine.seen[0].values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_value_model_learns_the_shaped_rewards_of_kept_samples() -> None:
    """A KL penalty in the reward reaches both V's target and the advantage; V starts above every reward."""
    lm, reference = tiny_lm(), tiny_lm(initializer_range=0.25)
    spec = PolicyUpdate.model_validate(
        {"value_model": {}, "kl": {"coefficient": 0.2, "estimator": "k1", "where": "reward"}}
    )
    groups, valid = groups_of(), [[True, False, True, True], [True] * 4, [True] * 4]
    critic, engine = critic_of(tiny_lm(), ValueModel())
    torch.nn.init.constant_(engine.module.head.bias, 50.0)
    value_G = own_values(critic, groups).detach().numpy()
    worker, _ = reinforcer(lm, spec, critic=critic, reference=reference)
    metrics, advantage_Gn = step(worker, batch_of(groups, spec, valid), Mean())
    loss = mean = 0.0
    for row, group in enumerate(groups):
        k1_T = (naive_logprobs(lm, group)[0] - naive_logprobs(reference, group)[0]).detach()
        kept_n = np.array(valid[row])
        shaped_n = np.array(REWARDS[row]) - 0.2 * np.array([float(part.sum()) for part in by_sample(group, k1_T)])
        expected_n = np.where(kept_n, (shaped_n - value_G[row]) / kept_n.sum(), 0.0)
        np.testing.assert_allclose(advantage_Gn[row], expected_n, rtol=1e-4)
        loss += float(((value_G[row] - shaped_n[kept_n]) ** 2).sum()) / 2 / 11
        mean += value_G[row] * kept_n.sum() / 11
    assert (advantage_Gn <= 0).all()
    assert metrics["live_group_fraction"] == 1.0
    assert metrics["value_loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["value_mean"] == pytest.approx(mean, rel=1e-6)


def test_the_value_model_learns_the_reward_of_each_prompt() -> None:
    critic, _ = critic_of(tiny_lm(), ValueModel(clip=10.0), lr=3e-3)
    groups = groups_of()
    batches = critic.batches([group.prompt_p for group in groups])
    reward_Gn = np.array([[1.0, 0.5], [-1.0, -0.5], [0.0, 0.2]])
    for number in range(60):
        critic.update(
            batches,
            old_G=critic.values(batches, 3),
            target_Gn=reward_Gn,
            keep_Gn=np.ones((3, 2), np.bool_),
            step=number % 10,
        )
    np.testing.assert_allclose(critic.values(batches, 3), reward_Gn.mean(-1), atol=0.05)


def test_every_prompt_is_in_one_row_within_the_budget() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 40, length).astype(np.int32) for length in (3, 9, 1, 4, 4, 12)]
    batches = prompt_rows(prompts, 16)
    assert sorted(np.concatenate([batch.group_R for batch in batches]).tolist()) == list(range(6))
    for batch in batches:
        assert batch.ids_RL.numel() <= 16
        for row, (last, group) in enumerate(zip(batch.last_R.tolist(), batch.group_R.tolist(), strict=True)):
            np.testing.assert_array_equal(batch.ids_RL[row, : last + 1], prompts[group])


SETS: list[Objective] = [
    MaxAtK(k=2),
    MaxAtK(k=4, baseline="none"),
    MaxAtK(weights={1: 0.5, 4: 0.5}),
    MajAtK(k=3),
    Softmax(beta=2.0),
]


@pytest.mark.parametrize("objective", SETS, ids=str)
def test_the_value_model_is_subtracted_from_the_advantages_of_sets_and_learns_them(objective: Objective) -> None:
    lm, spec = tiny_lm(), PolicyUpdate(value_model=ValueModel())
    groups, valid = groups_of(), [[True] * 4, [True] * 4, [True, True, True, False]]
    rewards = [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
    answers = [[0, 1, 0, 2], [5, 3, 3, 3], [1, 0, 1, -1]]
    columns = [
        replace(scored(group, row, valid_n=keep_n), answers_n=np.array(ids, np.int32))
        for group, row, keep_n, ids in zip(groups, rewards, valid, answers, strict=True)
    ]
    critic, engine = critic_of(tiny_lm(), ValueModel())
    value_G = own_values(critic, groups)
    plain_Gn = advantages(np.array(rewards), objective, answers=np.array(answers), valid=np.array(valid))
    loss = torch.zeros((), dtype=torch.float64)
    for value, plain_n, keep_n in zip(value_G, plain_Gn, valid, strict=True):
        for plain, keep in zip(plain_n, keep_n, strict=True):
            loss = loss + (value - plain) ** 2 / 2 / 11 if keep else loss
    expected = torch.autograd.grad(loss, list(engine.module.parameters()))
    worker, _ = reinforcer(lm, spec, critic=critic)
    batch = rank_batch(groups, columns, version=0, mask_truncated=False)
    metrics, advantage_Gn = step(worker, batch, objective)
    wanted_Gn = np.where(valid, plain_Gn - value_G.detach().numpy()[:, None], 0.0)
    np.testing.assert_allclose(advantage_Gn, wanted_Gn, rtol=1e-5, atol=1e-7)
    assert plain_Gn.any()
    assert metrics["value_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["live_group_fraction"] == 1.0
    for mine, theirs in zip(engine.seen[0].values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("update", "objective", "advice"),
    [
        ({"value_model": {}}, MaxRL(), "not for maxrl: write value_model: null, or objective: {kind: mean}"),
        ({"value_model": {}}, PassAtKAnalytic(k=2), "not for pass_at_k_analytic: write value_model: null"),
        ({"value_model": {}}, MaxAtK(k=2, center=True), "center: false"),
        ({"value_model": {}}, Mean(focal=1.0), "write focal: 0, or value_model: null"),
        ({"value_model": {}}, MaxAtK(k=2, baseline="subset_loo"), "write baseline: loo_minus_one"),
        (
            {"value_model": {}, "behaviour_correction": {"kind": "sequence"}},
            BestOfK(k=2, companion_weights="exact"),
            "companion_weights: none, or value_model: null",
        ),
        ({"value_model": {}}, Mean(center=True), "center: false"),
        ({"value_model": {}}, Mean(normalize="std"), "normalize: none"),
    ],
)
def test_invalid_combinations_are_rejected(update: dict[str, Any], objective: Objective, advice: str) -> None:
    spec = PolicyUpdate.model_validate(update)
    worker, engine = reinforcer(tiny_lm(), spec)
    with pytest.raises(ValueError, match=advice):
        worker.step(batch_of(groups_of(), spec), objective, 0)
    assert not engine.seen


def test_values_of_a_bfloat16_model_are_not_rounded_to_it() -> None:
    module = PromptValue(tiny_lm().base_model).to(torch.bfloat16)
    torch.nn.init.constant_(module.head.bias, 1.0)
    torch.nn.init.constant_(module.head.weight, 1e-4)
    ids = torch.tensor([[5, 7, 9]])
    with torch.no_grad():
        (value,) = module(ids, torch.tensor([2]))
        hidden = module.trunk(input_ids=ids).last_hidden_state[0, 2].double()
    assert value.dtype == torch.float32
    exact = float(hidden.sum()) * float(module.head.weight[0, 0].detach()) + 1.0
    assert float(value) == pytest.approx(exact, abs=1e-6)
    assert abs(exact - float(torch.tensor(exact).bfloat16())) > 1e-5
