"""A penalty whose coefficient follows a target for the divergence."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.loss import KL_RANGE, adapted_coefficient
from tests.unit.learner.conftest import tiny_lm
from tests.unit.learner.reinforcers import batch_of, groups_of, reinforcer, step
from tests.unit.learner.test_rank_worker import no_engine_files, worker  # noqa: F401 - a fixture
from volley.objectives import Mean
from volley.update import KLPenalty, PolicyUpdate

POSITIVE = st.floats(1e-6, 1e3)


@given(target=POSITIVE, start=POSITIVE, divergence=st.floats(0, 1e6))
def test_one_step_doubles_halves_or_keeps_the_coefficient(target: float, start: float, divergence: float) -> None:
    kl = KLPenalty(coefficient=start, target=target)
    ratio = adapted_coefficient(kl, 8 * start, divergence) / (8 * start)
    expected = 2.0 if divergence > target * 1.5 else 0.5 if divergence < target / 1.5 else 1.0
    assert ratio == pytest.approx(expected)


def test_the_coefficient_changes_beyond_a_factor_of_one_and_a_half() -> None:
    kl = KLPenalty(coefficient=1.0, target=0.5)
    found = [adapted_coefficient(kl, 2.0, divergence) for divergence in (0.333, 0.5 / 1.5, 0.75, 0.7501)]
    assert found == [1.0, 2.0, 2.0, 4.0]
    assert adapted_coefficient(kl, 1024.0, 9.0) == 1024.0
    assert adapted_coefficient(kl, 1.0, 0.0) == 1.0


@given(start=POSITIVE, divergences=st.lists(st.sampled_from([0.0, 0.01, 9.0]), max_size=40))
def test_the_coefficient_never_falls_below_the_job_s(start: float, divergences: list[float]) -> None:
    kl, coefficient = KLPenalty(coefficient=start, target=0.01), start
    for divergence in divergences:
        coefficient = adapted_coefficient(kl, coefficient, divergence)
        assert start <= coefficient <= start * KL_RANGE
    assert adapted_coefficient(KLPenalty(coefficient=start), start, 9.0) == start, "without a target, it never changes"


@pytest.mark.parametrize("place", [{"estimator": "k3"}, {"where": "reward", "estimator": "k1"}], ids=["loss", "reward"])
@pytest.mark.parametrize(("target", "factor"), [(1e-9, 2.0), (1e9, 1.0)])
def test_the_next_step_has_the_adapted_coefficient(place: dict[str, str], target: float, factor: float) -> None:
    """Its gradient is that of a job which has that coefficient from the start."""
    lm, reference = tiny_lm(), tiny_lm(initializer_range=0.25)
    spec = PolicyUpdate.model_validate({"kl": {"coefficient": 0.2, "target": target, **place}})
    later = PolicyUpdate.model_validate({"kl": {"coefficient": 0.2 * factor, **place}})
    batch = batch_of(groups_of(), spec)
    adapting, engine = reinforcer(lm, spec, reference=reference)
    reported = [step(adapting, batch, Mean())[0]["kl_coefficient"] for _ in range(2)]
    assert reported == [0.2, 0.2 * factor]
    fixed, other = reinforcer(lm, later, reference=reference)
    metrics, _ = step(fixed, batch, Mean())
    assert "kl_coefficient" not in metrics
    for name, gradient in other.seen[0].items():
        torch.testing.assert_close(engine.seen[1][name], gradient)


@pytest.mark.usefixtures("no_engine_files")
def test_a_checkpoint_restores_the_coefficient(tmp_path: Path) -> None:
    spec = PolicyUpdate(kl=KLPenalty(coefficient=0.2, target=0.1))
    first, again = worker(tmp_path), worker(tmp_path)
    first._reinforcer, again._reinforcer = (reinforcer(tiny_lm(), spec)[0] for _ in range(2))
    first._reinforcer.kl_coefficient = 0.8
    assert first.save(tmp_path, {}) == ""
    again.load(tmp_path)
    assert again._reinforcer.kl_coefficient == 0.8
    (tmp_path / "run.json").write_text(json.dumps({"steps_taken": 7, "extra": {}}))
    again.load(tmp_path)
    assert again._reinforcer.kl_coefficient == 0.8, "a checkpoint of a job without a target has none"


def test_a_target_needs_a_coefficient_to_begin_with() -> None:
    with pytest.raises(ValueError, match="write the coefficient to begin with"):
        KLPenalty(target=0.1)
