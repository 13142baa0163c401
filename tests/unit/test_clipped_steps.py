"""The warning that most steps are clipped."""

import pytest

from services.coordinator.clipped_steps import WINDOW, ClippedSteps


def test_the_warning_comes_once_when_over_half_of_the_last_steps_were_clipped() -> None:
    watch = ClippedSteps(1.0)
    assert not any(watch.note(0.0, 0.5) for _ in range(WINDOW))
    clipped = [watch.note(1.0, 4.0) for _ in range(WINDOW)]
    warned = [number for number, text in enumerate(clipped, start=1) if text]
    assert warned == [WINDOW // 2 + 1]
    text = clipped[WINDOW // 2]
    assert text.startswith("11 of the last 20 steps were clipped at optimizer.clip_norm 1:")
    assert text.endswith("Write clip_norm: null, or a few times the usual gradient norm, which was 4")


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_half_of_the_steps_is_not_most_of_them(share: float) -> None:
    watch = ClippedSteps(1.0)
    assert not any(watch.note(share, 4.0) for _ in range(3 * WINDOW))


def test_a_run_is_not_judged_by_its_first_steps() -> None:
    watch = ClippedSteps(1.0)
    assert [bool(watch.note(1.0, 4.0)) for _ in range(WINDOW)] == [False] * (WINDOW - 1) + [True]
