"""A real TRL trainer with max@k and maj@k: the advantages in its loss, in one process and in two."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.integration.trl_runs import RUNS, STEPS, answer
from tests.models import tiny_llama
from volley.objectives import advantages

pytestmark = pytest.mark.integration

SECONDS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("trl") / "model")


@pytest.fixture(scope="module")
def results(model: Path) -> dict[str, Any]:
    out = model.parent / "out.json"
    names = [name for name in RUNS if name != "two_processes"]
    program(["-m", "tests.integration.trl_runs", str(model), str(out), *names, "page"])
    loaded: dict[str, Any] = json.loads(out.read_text())
    return loaded


def program(arguments: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]


def by_group(seen: list[list[Any]]) -> list[tuple[list[str], NDArray[np.bool_], NDArray[np.float64]]]:
    """For each group its texts, which of them have tokens in the loss, and the advantages."""
    groups: dict[tuple[int, str], list[tuple[str, bool, float]]] = defaultdict(list)
    for step, prompt, text, in_loss, advantage in seen:
        groups[step, prompt].append((text, in_loss, advantage))
    columns = [list(zip(*rows, strict=True)) for rows in groups.values()]
    return [(list(texts), np.array(in_loss), np.array(advantage)) for texts, in_loss, advantage in columns]


def majority_advantages(texts: list[str], in_loss_n: NDArray[np.bool_]) -> NDArray[np.float64]:
    """n times the objective's own advantages, computed from the texts."""
    run = RUNS["maj"]
    reward_n = np.array([np.nan if reward is None else reward for reward in run["reward"](texts)])
    valid_n = in_loss_n & ~np.isnan(reward_n)
    answers = [answer(text) for text in texts]
    answer_n = np.array([-1 if each is None else each for each in answers])
    rewards = np.where(valid_n, reward_n, 0.0)
    return len(texts) * advantages(rewards, run["objective"], answers=answer_n, valid=valid_n)


def test_max_at_k_advantages_in_the_loss_are_scaled_for_a_mean(results: dict[str, Any]) -> None:
    groups = by_group(results["max"]["seen"])
    assert len(groups) == 4 * STEPS
    live = 0
    for texts, _, advantage_n in groups:
        expected_n = 4 * advantages(RUNS["max"]["reward"](texts), RUNS["max"]["objective"])
        np.testing.assert_allclose(advantage_n, expected_n, rtol=1e-6)
        live += bool(advantage_n.any())
    assert live > STEPS


def test_maj_at_k_leaves_out_samples_without_a_reward_or_masked_in_the_loss(results: dict[str, Any]) -> None:
    groups = by_group(results["maj"]["seen"])
    assert len(groups) == 4 * STEPS
    for texts, in_loss_n, advantage_n in groups:
        np.testing.assert_allclose(advantage_n, majority_advantages(texts, in_loss_n), rtol=1e-6, atol=1e-9)
    assert any(advantage_n.any() for *_, advantage_n in groups)
    assert any(in_loss_n.any() and not in_loss_n.all() for _, in_loss_n, _ in groups)


def test_the_mean_objective_equals_grpo_without_scaling(results: dict[str, Any]) -> None:
    """Leave-one-out is n / (n - 1) times centring; with the rate divided by that, weights are equal at every step."""
    mean, plain = results["mean"], results["plain"]
    for mine, theirs in zip(by_group(mean["seen"]), by_group(plain["seen"]), strict=True):
        assert mine[0] == theirs[0]
        np.testing.assert_allclose(0.75 * mine[2], theirs[2], rtol=1e-5, atol=1e-7)
    assert mean["weights"] != results["max"]["weights"]
    np.testing.assert_allclose(mean["weights"], plain["weights"], rtol=1e-4, atol=1e-6)


def test_the_reward_rises_and_the_objective_is_logged(results: dict[str, Any]) -> None:
    log = [row for row in results["learn"]["log"] if "reward" in row]
    first, last = log[:4], log[-4:]
    assert np.mean([row["reward"] for row in last]) > np.mean([row["reward"] for row in first]) + 0.2
    assert all(row["reward"] <= row["max_at_2"] <= 1 for row in log)
    assert any("maj_at_3" in row for row in results["maj"]["log"])


def test_logged_completions_have_the_advantages_of_the_last_batch(results: dict[str, Any]) -> None:
    run = results["max"]
    reached = [row[-1] for row in run["seen"] if row[0] == STEPS - 1]
    np.testing.assert_allclose(sorted(run["logged_advantages"]), sorted(reached), rtol=1e-6)


def test_the_code_on_the_page_runs(results: dict[str, Any]) -> None:
    assert results["page"] == "max_at_k 1 maj_at_k 0"


def test_a_group_split_over_two_processes_is_one_group(model: Path) -> None:
    out = model.parent / "two.json"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    program([*launcher, *port, "-m", "tests.integration.trl_runs", str(model), str(out), "two_processes"])
    halves = [json.loads(Path(f"{out}{rank}").read_text())["two_processes"]["seen"] for rank in (0, 1)]
    assert [len(half) for half in halves] == [4 * STEPS, 4 * STEPS]
    groups = by_group(halves[0] + halves[1])
    assert [len(texts) for texts, *_ in groups] == [8] * STEPS
    for texts, in_loss_n, advantage_n in groups:
        np.testing.assert_allclose(advantage_n, majority_advantages(texts, in_loss_n), rtol=1e-6, atol=1e-9)
    assert any(advantage_n.any() for *_, advantage_n in groups)
