"""The benchmark of the planner derives a CPU's overheads from two small models."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan.measured import Generated, Learned
from benchmarks.plan.rates import CROWD, FEW, LONE, MANY, _device

PLAIN = {"flops": 5e10, "flops_few_rows": 4e10, "reading": 2e10, "copying": 5e9}
times = st.floats(1e-6, 1e-2)


@given(step=times, layer=times, sample=times, both=times, update=times, train=times, publish=times, loading=times)
def test_overheads_are_recovered_from_what_they_add_up_to(
    step: float,
    layer: float,
    sample: float,
    both: float,
    update: float,
    train: float,
    publish: float,
    loading: float,
) -> None:
    engines, learners = {}, {}
    for layers in (FEW, MANY):
        steps = {number: step + layers * layer + number * (sample + layers * both) for number in (LONE, CROWD)}
        engines[layers] = Generated(steps, 1.0, publish + layers * loading)
        learners[layers] = Learned(update + layers * train, 0.0, 8)
    device = _device(PLAIN, engines, learners)
    found = (device.step_us, device.decode_layer_us, device.sample_us, device.sample_layer_us)
    assert found == pytest.approx([1e6 * each for each in (step, layer, sample, both)], rel=1e-6, abs=1e-3)
    found_training = (device.update_us, device.train_layer_us)
    assert found_training == pytest.approx([1e6 * each for each in (update, train)], rel=1e-6, abs=1e-3)
    found_publishing = (device.publish_us, device.publish_layer_us)
    assert found_publishing == pytest.approx([1e6 * publish, 1e6 * loading], rel=1e-6, abs=1e-3)
    assert (device.tflops, device.prefill_share, device.gpu) == (0.05, 0.8, False)


def test_noise_never_makes_an_overhead_negative() -> None:
    engines = {FEW: Generated({LONE: 2.0, CROWD: 1.0}, 1.0, 2.0), MANY: Generated({LONE: 1.5, CROWD: 0.2}, 1.0, 1.0)}
    device = _device(PLAIN, engines, {FEW: Learned(2.0, 0.1, 8), MANY: Learned(1.0, 0.0, 8)})
    assert (device.decode_layer_us, device.sample_us, device.sample_layer_us) == (0, 0, 0)
    assert (device.train_layer_us, device.publish_layer_us) == (0, 0)
    assert device.step_us == 2e6
