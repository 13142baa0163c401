"""The settings that the TRL adapter rejects, and its arithmetic between TRL's tensors and an objective."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from volley.objectives import MajAtK, MaxAtK, Mean, Objective, PassAtKAnalytic, advantages

# If vLLM is installed, TRL imports it and warns about its version.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def adapter() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", None)
        import volley.integrations.trl

        yield volley.integrations.trl


def config(adapter: Any, **settings: Any) -> Any:
    return adapter.GRPOConfig(
        "out", use_cpu=True, bf16=False, report_to=[], **{"scale_rewards": "none", "num_generations": 8, **settings}
    )


@pytest.mark.parametrize("objective", [MaxAtK(k=8), Mean(normalize="std"), PassAtKAnalytic(k=4), MajAtK(k=8)])
def test_matching_settings_are_accepted(adapter: Any, objective: Objective) -> None:
    adapter.check_settings(objective, config(adapter), has_answers=True)


@pytest.mark.parametrize(
    ("objective", "settings", "advice"),
    [
        (MaxAtK(k=2), {"scale_rewards": "group"}, 'write scale_rewards="none", and normalize: std'),
        (MaxAtK(k=2), {"scale_rewards": True}, 'write scale_rewards="none"'),
        (
            MaxAtK(k=2),
            {"multi_objective_aggregation": "normalize_then_sum"},
            'write multi_objective_aggregation="sum_then_normalize"',
        ),
        (MaxAtK(k=2, companion_weights="exact"), {}, "write companion_weights: none"),
        (MaxAtK(k=9), {}, "lower k or raise n"),
        (MajAtK(k=2), {}, "pass answer_fn="),
    ],
)
def test_conflicting_settings_are_rejected(
    adapter: Any, objective: Objective, settings: dict[str, Any], advice: str
) -> None:
    with pytest.raises(ValueError, match=advice):
        adapter.check_settings(objective, config(adapter, **settings), has_answers=False)


def test_a_rejected_trainer_loads_no_model(adapter: Any) -> None:
    with pytest.raises(ValueError, match="scale_rewards"):
        adapter.KSampleGRPOTrainer(objective=MaxAtK(k=2), args=config(adapter, scale_rewards="batch"), model="nowhere")


def test_rewards_are_weighted_and_a_sample_has_none_only_if_all_functions_return_none(adapter: Any) -> None:
    nan = float("nan")
    reward_BF = torch.tensor([[1.0, 2.0], [nan, 2.0], [nan, nan]])
    np.testing.assert_array_equal(adapter.weighted_rewards(reward_BF, torch.tensor([1.0, 0.5])), [2.0, 1.0, nan])


def test_answers_become_ids(adapter: Any) -> None:
    assert adapter.answer_ids(["4", None, ("a", 1), "4"]).tolist() == [0, -1, 1, 0]


def test_advantages_are_scaled_for_a_mean_over_samples(adapter: Any) -> None:
    """n times the estimate, because TRL averages over all samples, dropped ones too; published shapes stay unscaled."""
    reward_B = np.array([1.0, 0.0, 0.5, 0.0, 0.0, 1.0, np.nan, 0.0])
    valid_B = ~np.isnan(reward_B)
    got_B = adapter.mean_advantages(MaxAtK(k=2), reward_B, None, valid_B, 4)
    np.testing.assert_allclose(got_B[:4], 4 * advantages(reward_B[:4], MaxAtK(k=2)))
    np.testing.assert_allclose(got_B[[4, 5, 7]], 4 * advantages(reward_B[[4, 5, 7]], MaxAtK(k=2)))
    assert got_B[6] == 0
    shape_B = adapter.mean_advantages(PassAtKAnalytic(k=2), np.array([1.0, 0, 0, 0]), None, np.ones(4, np.bool_), 4)
    np.testing.assert_allclose(shape_B, advantages([1.0, 0, 0, 0], PassAtKAnalytic(k=2)))


def test_the_metric_of_weights_is_the_weighted_mean(adapter: Any) -> None:
    reward_B, valid_B = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]), np.ones(8, np.bool_)
    metric = adapter.objective_metric(MaxAtK(weights={1: 1.0, 2: 3.0}), reward_B, None, valid_B, 4)
    assert metric == {"max_at_weights": pytest.approx((0.25 + 0.5) / 2 / 4 + 0.75 * (0.5 + 5 / 6) / 2)}
    answer_B = reward_B.astype(np.int64)
    metric = adapter.objective_metric(MajAtK(weights={1: 2.0}), reward_B, answer_B, valid_B, 4)
    assert metric == {"maj_at_weights": pytest.approx(0.375)}


def test_the_metric_covers_groups_with_at_least_k_samples_left(adapter: Any) -> None:
    reward_B = np.array([1.0, 0.0, 0.0, 0.0, np.nan, np.nan, np.nan, 1.0])
    valid_B, answer_B = ~np.isnan(reward_B), np.array([1, 0, 0, 0, 0, 0, 0, 1])
    assert adapter.objective_metric(MaxAtK(k=2), reward_B, None, valid_B, 4) == {"max_at_2": 0.5}
    assert adapter.objective_metric(MajAtK(k=3), reward_B, answer_B, valid_B, 4) == {"maj_at_3": 0.0}
    assert adapter.objective_metric(Mean(), reward_B, None, valid_B, 4) == {}
    assert adapter.objective_metric(MaxAtK(k=2), reward_B[4:], None, valid_B[4:], 4) == {}


def test_importing_integrations_loads_no_library() -> None:
    code = "import sys, volley.integrations; print(*sorted(set(sys.modules) & {'torch', 'trl', 'transformers'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
