"""The adapters for verl, SkyRL, OpenRLHF and rLLM, each called as its trainer calls it; see `tests.trainers`.

Also runs their blocks on docs/integrations.md.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray import cloudpickle

from tests import pages, trainers
from volley.objectives import Objective, advantages, parse_objective

MAX = {"kind": "max_at_k", "k": 2}
OBJECTIVES = (
    MAX,
    {"kind": "mean"},
    {"kind": "max_at_k", "weights": {1: 0.5, 3: 0.5}},
    {"kind": "max_at_k", "weights": "harmonic", "order": 3, "baseline": "subset_loo"},
    {"kind": "maxrl"},
)
PUBLISHED_FOR_A_MEAN = ("maxrl", "risk_sensitive", "pass_at_k_analytic")
N = 4
# Three prompts out of order: one whole, one that lost a sample, one of which a single sample is left.
PROMPTS = ["b", "a", "b", "c", "a", "b", "a", "b"]
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.5, 0.25, 0.0]


def expected(objective: Any, prompts: list[str], rewards: list[float], dropped: tuple[int, ...] = ()) -> list[float]:
    """One group after the other, without the rows that are dropped."""
    parsed: Objective = parse_objective(objective)
    scale = 1 if parsed.kind in PUBLISHED_FOR_A_MEAN else N
    out = [0.0] * len(prompts)
    for prompt in set(prompts):
        rows = [row for row, each in enumerate(prompts) if each == prompt and row not in dropped]
        if len(rows) < 2:
            continue
        kept = np.array([*(rewards[row] for row in rows), *([0.0] * (N - len(rows)))])
        found = advantages(kept, parsed, valid=np.arange(N) < len(rows))
        for row, value in zip(rows, found, strict=False):
            out[row] = scale * float(value)
    return out


@pytest.fixture(params=["verl", "skyrl"])
def token_trainer(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """An adapter with a call of a registered estimator as the trainer makes it."""
    with trainers.adapter(request.param) as adapter:

        def verl(name: str, rewards: torch.Tensor, mask: torch.Tensor, index: Any) -> Any:
            """As `compute_advantage` in verl/trainer/ppo/ray_trainer.py does."""
            found = sys.modules["verl.trainer.ppo.core_algos"].get_adv_estimator_fn(name)
            return found(token_level_rewards=rewards, response_mask=mask, config=SimpleNamespace(), index=index)

        def skyrl(name: str, rewards: torch.Tensor, mask: torch.Tensor, index: Any) -> Any:
            """As `RayPPOTrainer` in skyrl/train/trainer.py does."""
            utils = sys.modules["skyrl.backends.skyrl_train.utils.ppo_utils"]
            return utils.compute_advantages_and_returns(
                token_level_rewards=rewards, response_mask=mask, index=index, adv_estimator=name, config=None
            )

        yield adapter, {"verl": verl, "skyrl": skyrl}[request.param]


def batch(lengths: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Token rewards and masks [8, 5]; a sample's reward is spread over two tokens."""
    mask = torch.arange(5) < torch.tensor(lengths or [5, 3, 2, 4, 2, 3, 5, 2])[:, None]
    rewards = torch.zeros(8, 5)
    rewards[:, 0], rewards[:, 1] = torch.tensor(REWARDS) / 4, torch.tensor(REWARDS) * 3 / 4
    return rewards, mask.long()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_rows_become_groups_and_tokens_get_their_rows_advantage(
    token_trainer: tuple[Any, Callable[..., Any]], objective: Any, request: pytest.FixtureRequest
) -> None:
    adapter, call = token_trainer
    adapter.register(request.node.name, objective, n=N)
    rewards, mask = batch()
    got, returns = call(request.node.name, rewards, mask, np.array(PROMPTS, dtype=object))
    want = torch.tensor(expected(objective, PROMPTS, REWARDS))[:, None] * mask
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(returns, want)
    assert got.abs().sum() > 0


@pytest.mark.parametrize("index", [PROMPTS, torch.tensor([1, 0, 1, 2, 0, 1, 0, 1])], ids=["strings", "tensor"])
def test_ids_of_any_type_group_rows(token_trainer: tuple[Any, Callable[..., Any]], index: Any, request: Any) -> None:
    adapter, call = token_trainer
    adapter.register(request.node.name, MAX, n=N)
    got, _ = call(request.node.name, *batch(), index)
    torch.testing.assert_close(got[:, 0], torch.tensor(expected(MAX, PROMPTS, REWARDS)))


def test_a_row_without_tokens_leaves_its_group(token_trainer: tuple[Any, Callable[..., Any]], request: Any) -> None:
    """Row 0 is masked out: the best sample of its group, and without a score."""
    adapter, call = token_trainer
    adapter.register(request.node.name, MAX, n=N)
    rewards, mask = batch([0, 3, 2, 4, 2, 3, 5, 2])
    rewards[0] = float("nan")
    got, _ = call(request.node.name, rewards, mask, PROMPTS)
    want = torch.tensor(expected(MAX, PROMPTS, REWARDS, dropped=(0,)))
    torch.testing.assert_close(got, want[:, None] * mask)
    assert not torch.allclose(want, torch.tensor(expected(MAX, PROMPTS, REWARDS)))


def test_a_reward_that_is_not_finite_is_refused(token_trainer: tuple[Any, Callable[..., Any]], request: Any) -> None:
    adapter, call = token_trainer
    adapter.register(request.node.name, MAX, n=N)
    rewards, mask = batch()
    rewards[2, 1] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        call(request.node.name, rewards, mask, PROMPTS)


def test_k_shrinks_in_a_group_that_lost_samples(token_trainer: tuple[Any, Callable[..., Any]], request: Any) -> None:
    """max@4 of a group of three is max@3, at the scale of n = 4."""
    adapter, call = token_trainer
    adapter.register(request.node.name, {"kind": "max_at_k", "k": 4}, n=N)
    got, _ = call(request.node.name, *batch(), PROMPTS)
    rows = [1, 4, 6]
    want = N * advantages([REWARDS[row] for row in rows], {"kind": "max_at_k", "k": 3})
    torch.testing.assert_close(got[rows, 0], torch.from_numpy(want).float())
    assert got[3].eq(0).all()


def test_half_precision_rewards_are_summed_in_full_precision(
    token_trainer: tuple[Any, Callable[..., Any]], request: Any
) -> None:
    """256 and 1 are bfloat16 numbers, their sum is not."""
    adapter, call = token_trainer
    adapter.register(request.node.name, MAX, n=N)
    rewards, mask = batch()
    rewards[0, 0], rewards[0, 1] = 256, 1
    got, _ = call(request.node.name, rewards.bfloat16(), mask.bool(), PROMPTS)
    torch.testing.assert_close(got[:, 0], torch.tensor(expected(MAX, PROMPTS, [257.0, *REWARDS[1:]])))


@pytest.mark.parametrize(
    ("index", "advice"),
    [(["a"] * 8, "write n=8"), (list(range(8)), "sample n=4 times per prompt"), (PROMPTS[:7], "one id per reward")],
)
def test_groups_of_another_size_are_refused(
    token_trainer: tuple[Any, Callable[..., Any]], index: Any, advice: str, request: Any
) -> None:
    adapter, call = token_trainer
    adapter.register(request.node.name, MAX, n=N)
    with pytest.raises(ValueError, match=advice):
        call(request.node.name, *batch(), index)


@pytest.mark.parametrize(
    ("objective", "n", "advice"),
    [
        (MAX, 1, "write n: 2 or more"),
        ({"kind": "max_at_k", "k": 5}, 4, "lower k or raise n"),
        ({"kind": "max_at_k", "k": 4, "baseline": "loo"}, 4, "write baseline: loo_minus_one"),
        ({"kind": "max_at_k", "k": 2, "companion_weights": "exact"}, 4, "write companion_weights: none"),
        ({"kind": "maj_at_k", "k": 2}, 4, "call volley.objectives.advantages with answers="),
        ({"kind": "best_of_k", "k": 2}, 4, "call volley.objectives.advantages with ranks="),
        ({"kind": "max_at_kk", "k": 2}, 4, "max_at_k"),
    ],
)
@pytest.mark.parametrize("name", trainers.STAND_INS)
def test_what_cannot_work_is_refused_before_training(name: str, objective: Any, n: int, advice: str) -> None:
    if name == "rllm" and "call" in advice:
        advice = "pass (answer|rank)_fn="
    with trainers.adapter(name) as adapter:
        register = partial(make, adapter) if name == "openrlhf" else partial(adapter.register, "refused")
        with pytest.raises(ValueError, match=advice):
            register(objective, n=n)


@pytest.mark.parametrize("name", ["verl", "skyrl"])
def test_a_name_is_registered_once(name: str) -> None:
    with trainers.adapter(name) as adapter:
        adapter.register("once", MAX, n=4)
        with pytest.raises(ValueError, match="already"):
            adapter.register("once", MAX, n=4)


def test_an_estimator_travels_between_processes() -> None:
    """SkyRL sends estimators to its Ray processes by cloudpickle."""
    from volley.integrations.token_level import estimator

    sent = cloudpickle.loads(cloudpickle.dumps(estimator(MAX, N)))
    got, _ = sent(*batch(), PROMPTS)
    torch.testing.assert_close(got[:, 0], torch.tensor(expected(MAX, PROMPTS, REWARDS)))


def trajectory_groups(answers: list[list[str | None]], ranks: list[list[float]]) -> list[Any]:
    return [
        SimpleNamespace(trajectories=[SimpleNamespace(output=a, rank=r) for a, r in zip(*group, strict=True)])
        for group in zip(answers, ranks, strict=True)
    ]


def call_rllm(name: str, rewards: list[list[float]], groups: list[Any]) -> tuple[Any, Any]:
    """As `collect_reward_and_advantage_from_trajectory_groups` in rllm/trainer/algorithms/advantage.py does."""
    found = sys.modules["rllm.trainer.algorithms.advantage"].get_rllm_adv_estimator(name)
    got: tuple[Any, Any] = found(
        rewards=[np.array(each) for each in rewards], algorithm_config=SimpleNamespace(), traj_groups=groups
    )
    return got


def test_rllm_groups_may_have_lost_trajectories() -> None:
    rewards = [[1.0, 0.0, 0.5, 0.0], [1.0], [0.0, 1.0, 0.25]]
    with trainers.adapter("rllm") as adapter:
        adapter.register("other", MAX, n=N)
        got, returns = call_rllm("other", rewards, [])
        assert adapter.estimator(MAX, N)(rewards=[]) == ([], [])
    assert [len(each) for each in got] == [4, 1, 3]
    np.testing.assert_allclose(got[0], N * advantages(rewards[0], MAX))
    np.testing.assert_allclose(got[1], [0.0])
    np.testing.assert_allclose(got[2], N * advantages(rewards[2], MAX))
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(returns))


def test_rllm_trajectories_give_answers_and_ranks() -> None:
    rewards = [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    groups = trajectory_groups([["4", "5", "4", None], ["9", None, "7"]], [[0.0, 3.0, 2.0, 1.0], [1.0, 1.0, 0.5]])
    with trainers.adapter("rllm") as adapter:
        adapter.register("votes", {"kind": "maj_at_k", "k": 3}, n=N, answer_fn=lambda each: each.output)
        adapter.register("picked", {"kind": "best_of_k", "k": 2}, n=N, rank_fn=lambda each: each.rank)
        votes, _ = call_rllm("votes", rewards, groups)
        picked, _ = call_rllm("picked", rewards, groups)
    want = advantages(rewards[0], {"kind": "maj_at_k", "k": 3}, answers=[1, 2, 1, -1])
    np.testing.assert_allclose(votes[0], N * want)
    want = advantages(rewards[1], {"kind": "maj_at_k", "k": 3}, answers=[1, -1, 2])
    np.testing.assert_allclose(votes[1], N * want)
    for group, got in enumerate(picked):
        ranks = [each.rank for each in groups[group].trajectories]
        np.testing.assert_allclose(got, N * advantages(rewards[group], {"kind": "best_of_k", "k": 2}, ranks=ranks))
    assert picked[0][1] < 0  # ranks first and fails


def make(adapter: Any, objective: Any, n: int, kl_coef: float = 0.0, **settings: Any) -> Any:
    """The experience maker as `BasePPOTrainer` in openrlhf/trainer/ppo_trainer.py creates it."""
    adapter.install(objective)
    maker = sys.modules["openrlhf.trainer.ppo_trainer"].RemoteExperienceMaker
    strategy = trainers.openrlhf_strategy(n, **settings)
    return maker(None, None, None, None, SimpleNamespace(value=kl_coef), strategy, None)


# Two prompts in order, as OpenRLHF samples them, then dealt to micro-batches by length.
SAMPLED = [1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 0.25, 1.0]
DEALT = [[7, 2, 0], [4, 1], [3, 5, 6]]
SAMPLED_PROMPTS = ["a"] * 4 + ["b"] * 4


def experiences(kl: float = 0.0) -> list[trainers.Experience]:
    made = []
    for rows in DEALT:
        mask = (torch.arange(4) < torch.tensor([2 + row % 3 for row in rows])[:, None]).float()
        truncated = torch.tensor([float(row == 5) for row in rows])
        rewards = torch.tensor([SAMPLED[row] for row in rows])
        made.append(trainers.Experience(rewards, mask, torch.full((len(rows), 4), kl), rows, truncated))
    return made


def of_rows(made: list[trainers.Experience]) -> dict[int, torch.Tensor]:
    found = {}
    for each in made:
        assert each.advantages is not None
        assert each.returns is not None
        torch.testing.assert_close(each.advantages, each.returns)
        assert each.kl is None
        found.update(dict(zip(each.index, each.advantages, strict=True)))
    return found


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_openrlhf_micro_batches_are_grouped_by_prompt(objective: Any) -> None:
    with trainers.adapter("openrlhf") as adapter:
        made = make(adapter, objective, N).compute_advantages_and_returns(experiences())
    want = expected(objective, SAMPLED_PROMPTS, SAMPLED)
    for row, advantage_A in of_rows(made).items():
        length = 2 + row % 3
        torch.testing.assert_close(advantage_A[:length], torch.full((length,), want[row]))
        assert advantage_A[length:].eq(0).all()


def test_openrlhf_penalties_enter_as_its_own() -> None:
    """Truncated samples get their reward before advantages; KL is subtracted from them, from each token on."""
    with trainers.adapter("openrlhf") as adapter:
        maker = make(adapter, MAX, N, kl_coef=0.1, penalty=-0.5, clip_range=(-10, 0.75))
        made = maker.compute_advantages_and_returns(experiences(kl=2.0))
    rewards = [min(0.75, -0.5 if row == 5 else reward) for row, reward in enumerate(SAMPLED)]
    want = expected(MAX, SAMPLED_PROMPTS, rewards)
    found = of_rows(made)
    for row, advantage_A in found.items():
        length = 2 + row % 3
        left = torch.arange(length, 0, -1)
        torch.testing.assert_close(advantage_A[:length], want[row] - 0.2 * left)


def test_an_openrlhf_sample_without_actions_leaves_its_group() -> None:
    with trainers.adapter("openrlhf") as adapter:
        given = experiences()
        given[0].action_mask[0] = 0
        made = make(adapter, MAX, N).compute_advantages_and_returns(given)
    want = expected(MAX, SAMPLED_PROMPTS, SAMPLED, dropped=(7,))
    found = of_rows(made)
    assert found.pop(7).eq(0).all()
    for row, advantage_A in found.items():
        torch.testing.assert_close(advantage_A[0], torch.tensor(want[row]))


def test_openrlhf_trains_no_critic() -> None:
    with trainers.adapter("openrlhf") as adapter, pytest.raises(ValueError, match=r"--algo.advantage.estimator rloo"):
        make(adapter, MAX, N, estimator="gae")


def run_block(trainer: str) -> None:
    """Run the block of docs/integrations.md that imports the trainer's adapter."""
    page = pages.ROOT / "docs" / "integrations.md"
    here = str(Path(__file__).relative_to(pages.ROOT))
    (text,) = (
        block.text
        for block in pages.blocks(page)
        if block.what == here and f"from volley.integrations.{trainer} import" in block.text
    )
    exec(text, {})  # noqa: S102 - a page of this repository


RIGHT = np.arange(16) % 3 == 0


def test_the_page_registers_with_verl() -> None:
    with trainers.adapter("verl"):
        run_block("verl")
        estimator = sys.modules["verl.trainer.ppo.core_algos"].get_adv_estimator_fn("max_at_8")
    got, _ = estimator(torch.from_numpy(RIGHT).double()[:, None], torch.ones(16, 1), ["a"] * 16)
    np.testing.assert_allclose(got[:, 0], 16 * advantages(RIGHT, {"kind": "max_at_k", "k": 8}))


def test_the_page_registers_with_rllm() -> None:
    groups = trajectory_groups([["x" if right else "y" for right in RIGHT]], [[0.0] * 16])
    with trainers.adapter("rllm"):
        run_block("rllm")
        got, _ = call_rllm("other", [RIGHT.tolist()], groups)
    np.testing.assert_allclose(got[0], 16 * advantages(RIGHT, {"kind": "maj_at_k", "k": 5}, answers=RIGHT.astype(int)))


def test_the_page_starts_openrlhf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would call the hook in each worker process; here it is called in this one."""
    started: list[str] = []
    monkeypatch.setattr("ray.init", lambda runtime_env: runtime_env["worker_process_setup_hook"]())
    monkeypatch.setattr("runpy.run_module", lambda name, **_: started.append(name))
    with trainers.adapter("openrlhf"):
        run_block("openrlhf")
        maker = sys.modules["openrlhf.trainer.ppo_trainer"].RemoteExperienceMaker
        made = maker(None, None, None, None, None, trainers.openrlhf_strategy(16), None)
    assert made.objective == parse_objective({"kind": "max_at_k", "k": 8})
    assert started == ["openrlhf.cli.train_ppo_ray"]
