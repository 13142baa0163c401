"""The one-file version of the algorithm makes the same updates as the service's learner."""

import argparse
import itertools
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from examples import one_file
from examples.countdown import make_data, make_model
from learner.config import LearnerConfig
from learner.pool import LearnerPool
from reward_servers.scorers.countdown import Countdown
from tests.integration.learner.conftest import tensors_of
from tests.learner_batches import scored
from volley.model import ModelSpec
from volley.objectives import MaxAtK, advantages, pass_at_k
from volley.records import Group, Prompt
from volley.scoring import CountdownScorer
from volley.update import LearnerSpec, PolicyOptimizer, PolicyUpdate

pytestmark = pytest.mark.integration

STEPS, LAG, K, UPDATES = 3, 1, 3, 2
SPEC = PolicyOptimizer(lr=3e-3)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Recorded:
    """One step of the one-file version: its samples, its metrics, and the weights after it."""

    samples: one_file.Samples
    reward_Pn: Tensor
    metrics: dict[str, float]
    weights: dict[str, Tensor]


def record(folder: Path, monkeypatch: pytest.MonkeyPatch, *, rewards: Any = None, **changes: Any) -> list[Recorded]:
    """Run the file's training loop from the model in ``folder``, with ``rewards`` instead of its own if given."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    steps: list[Recorded] = []
    update = one_file.update

    def recording(model: Any, optimizer: Any, samples: Any, reward_Pn: Tensor, **settings: Any) -> dict[str, float]:
        reward_Pn = reward_Pn if rewards is None else rewards(len(steps), reward_Pn.shape)
        metrics = update(model, optimizer, samples, reward_Pn, **settings)
        weights = {name: each.detach().clone() for name, each in model.named_parameters()}
        steps.append(Recorded(samples, reward_Pn, metrics, weights))
        return metrics

    monkeypatch.setattr(one_file, "update", recording)
    settings = argparse.Namespace(lr=SPEC.lr, lag=LAG, steps=STEPS, prompts=4, n=6, k=K, updates=UPDATES, every=1)
    vars(settings).update(changes)
    rng, needed = random.Random(0), settings.steps * settings.prompts
    rows = [row for count in (3, 4) for row in make_data.rows(rng, needed // 2, count, set())]
    rng.shuffle(rows)  # each batch has prompts of two lengths
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    one_file.train(model, AutoTokenizer.from_pretrained(folder), rows, settings)
    return steps


def tied_rewards(step: int, shape: tuple[int, int]) -> Tensor:
    """Rewards used instead of its own, because an untrained model never gives a correct answer."""
    return torch.from_numpy(np.random.default_rng(step).integers(0, 4, shape) / 3).float()


def groups_of(step: int, recorded: Recorded) -> list[Group]:
    """The recorded samples as groups, as actors would return them."""
    samples, (prompts, n) = recorded.samples, recorded.reward_Pn.shape
    groups = []
    for number in range(prompts):
        rows = range(number * n, (number + 1) * n)
        real_nT = samples.real_NT[rows]
        tokens_T, logprobs_T = samples.token_NT[rows][real_nT].numpy(), samples.logprob_NT[rows][real_nT].numpy()
        lengths_n = real_nT.sum(-1).numpy().astype(np.int32)
        groups.append(
            Group(
                group_id=step * prompts + number,
                prompt_id=f"p:{number}",
                prompt_p=samples.prompt_Np[rows[0]][samples.prompt_real_Np[rows[0]]].numpy().astype(np.int32),
                tokens_T=tokens_T.astype(np.int32),
                logprobs_T=logprobs_T,
                versions_T=np.full(len(tokens_T), samples.version, np.int32),
                lengths_n=lengths_n,
                stopped_n=lengths_n < one_file.MAX_TOKENS,
                texts=("",) * n,
                actor="one-file",
                seconds=0.0,
            )
        )
    return groups


def assert_near(published: dict[str, NDArray[np.float32]], weights: dict[str, Tensor]) -> None:
    """Assert equality up to rounding after at most six updates of 0.003; Adam magnifies it for a few tiny gradients."""
    assert published.keys() == weights.keys()
    for name, tensor in weights.items():
        gap = np.abs(published[name] - tensor.numpy())
        assert np.quantile(gap, 0.999) < 3e-6, name
        assert gap.max() < 1e-4, name


async def test_updates_equal_those_of_the_learner(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of two updates each on the same samples, later ones a version old; the learner runs under ZeRO-3."""
    import ray

    folder = make_model.make(tmp_path / "model", layers=2, width=64)
    steps = record(folder, monkeypatch, rewards=tied_rewards)
    assert [recorded.samples.version for recorded in steps] == [0, 0, 1]
    # Every term has an effect: old samples are corrected, some up to the cap, and ratios leave the clip range.
    assert abs(steps[1].metrics["correction_mean"] - 1) > 0.01
    assert steps[2].metrics["truncated_share"] > 0
    assert all(recorded.metrics["ratio_max"] > 1 + one_file.CLIP for recorded in steps)
    learner = await LearnerPool.start(
        LearnerConfig(
            model=ModelSpec(path=folder),
            learner=LearnerSpec(step_deadline_s=60),
            optimizer=SPEC,
            steps=STEPS,
            seed=0,
            log_dir=tmp_path / "logs",
            update=PolicyUpdate(updates_per_batch=UPDATES, kl_sample_fraction=1.0),
            objective=MaxAtK(k=K),
            max_lag=LAG,
            prefix="one-file-",
        )
    )
    try:
        for step, recorded in enumerate(steps):
            groups, reward_Pn = groups_of(step, recorded), recorded.reward_Pn.double().numpy()
            columns = [
                scored(group, reward_n, reference=ray.put(group))
                for group, reward_n in zip(groups, reward_Pn, strict=True)
            ]
            report = await learner.step(columns, version=step)
            own_Pn = one_file.max_at_k_advantages(recorded.reward_Pn.double(), K).numpy()
            for group, own_n in zip(groups, own_Pn, strict=True):
                np.testing.assert_allclose(report.advantages[group.group_id], own_n, rtol=1e-9, atol=1e-12)
            for name, value in recorded.metrics.items():
                assert report.metrics[name] == pytest.approx(value, rel=1e-5), (step, name)
            assert_near(tensors_of(await learner.publish(step + 1)), recorded.weights)
    finally:
        await learner.stop()


@pytest.mark.parametrize("n", [2, 5, 16])
def test_closed_forms_equal_those_of_the_objectives(n: int) -> None:
    rng = np.random.default_rng(n)
    reward_Pn = np.concatenate([rng.normal(size=(20, n)), rng.integers(0, 3, (20, n)), np.ones((1, n))])
    for k in range(1, n + 1):
        own_Pn = one_file.max_at_k_advantages(torch.from_numpy(reward_Pn), k).numpy()
        np.testing.assert_allclose(own_Pn, advantages(reward_Pn, MaxAtK(k=k)), rtol=1e-9, atol=1e-12)
        for right in range(n + 1):
            assert one_file.pass_at_k(right, n, k) == pytest.approx(pass_at_k(n, right, k), abs=1e-12)


def test_scores_equal_those_of_the_scorer() -> None:
    scorer, rng, right = Countdown(CountdownScorer()), random.Random(0), 0
    for row in make_data.rows(rng, 200, 3, set()):
        tries = [str(row["answer"]), "".join(rng.choices("0123456789+-*", k=5)), f"{row['answer']}+", "", "1+-2", "-1"]
        tries += ["".join(order) for order in itertools.permutations(str(row["answer"]))]
        verdicts = scorer.score(Prompt("p", str(row["prompt"]), row), tries)
        assert [one_file.score(row, text) for text in tries] == [verdict.reward for verdict in verdicts]
        right += sum(verdict.reward == 1 for verdict in verdicts)
    assert right > 400


@pytest.mark.parametrize("k", [1, 4])
def test_the_model_learns_from_old_samples(k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_file, "score", lambda row, text: float("7" in text))
    steps = record(make_model.make(tmp_path, layers=1, width=32), monkeypatch, steps=30, lag=3, k=k, prompts=8, n=8)
    rewards = [float(recorded.reward_Pn.mean()) for recorded in steps]
    assert np.mean(rewards[:3]) < 0.5 < 0.8 < np.mean(rewards[-3:])


def test_the_command_warms_up_trains_and_evaluates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "--warm-up 2 --steps 3 --prompts 2 --n 4 --k 4 --lag 2 --every 1 --held-out 4"
    monkeypatch.setattr(sys, "argv", ["one_file", *small.split()])
    one_file.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["warm-up", "warm-up", "before:", "step", "0", "1", "2", "after:"]
    assert [line.split()[1] for line in lines[4:7]] == ["0", "1", "2"], "the lag grows to the requested one"
    assert "pass@32" in lines[-1]


def test_the_command_rejects_more_tries_than_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["one_file", "--k", "9", "--n", "8"])
    with pytest.raises(SystemExit):
        one_file.main()
