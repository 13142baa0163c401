"""Figures of sweeps show their curves, however wide the bands of few seeds are."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from services.sweeps.report import _line, _show_means


@pytest.mark.parametrize(("half", "limits"), [(20.0, (-0.4, 1.4)), (0.1, (0.1, 0.9))])
def test_wide_bands_are_cut_off(half: float, limits: tuple[float, float]) -> None:
    axes = Figure().subplots()
    axes.margins(y=0)
    steps = np.arange(4, dtype=float)
    for name, mean_X in (("a", np.array([0.2, 0.3, 0.4, 0.5])), ("b", np.array([0.5, 0.6, 0.7, 0.8]))):
        _line(axes, steps, mean_X, np.full(4, half), name, "red")
    _show_means(axes)
    assert axes.get_ylim() == pytest.approx(limits)


def test_a_panel_without_curves_is_left_alone() -> None:
    axes = Figure().subplots()
    before = axes.get_ylim()
    _show_means(axes)
    assert axes.get_ylim() == before
