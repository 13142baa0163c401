"""Seconds per stage: against slow oracles that count one token, one block, one hop, one batch at a time."""

import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.unit.plan.plans import changed, jobs, large, loads, planned, shape_for, shapes, shipped
from volley.base import replaced
from volley.job import RLJob
from volley.plan.machine import PRESETS
from volley.plan.memory import memory_of
from volley.plan.report import make_plan
from volley.plan.split import best_split, with_counts
from volley.plan.stages import Load, _prompt_tokens, generate, step_seconds, train
from volley.shape import Shape

FAST = PRESETS["h100"].model_copy(
    update={"train_layer_us": 0, "decode_layer_us": 0, "step_us": 0, "sample_us": 0, "update_us": 0, "memory_gb_s": 1e9}
)


def matmul_flops(shape: Shape) -> tuple[float, float]:
    """Of one token, matrix by matrix: in all layers, and in the output embedding."""
    h, q, v, m = shape.hidden_size, shape.q_size, shape.kv_size, shape.intermediate_size
    matrices = [(h, q), (h, v), (h, v), (q, h), (h, m), (h, m), (m, h)]
    layers = shape.num_hidden_layers * sum(2 * rows * columns for rows, columns in matrices)
    return layers, 2 * h * shape.vocab_size


@given(shapes(), st.integers(2, 12), st.integers(1, 40), st.integers(1, 60))
@settings(deadline=None, max_examples=60)
def test_training_counts_every_token_of_every_matrix(shape: Shape, n: int, prompt: int, sample: int) -> None:
    job = changed(
        shipped("gpu-8"),
        objective={"kind": "mean"},
        sampling__n=n,
        prompts_per_step=4,
        update__kl={"logged": False},
        sampling__max_tokens=64,
    )
    hardware = large(FAST)
    memory = memory_of(job, shape, hardware, prompt)
    made = train(job, shape, hardware, memory, Load(prompt, sample, 0.1))
    layers, head = matmul_flops(shape)
    flops = 0.0  # of one rank, which has one group
    left = n
    while left > 0:  # the last row may be counted as full
        row = prompt + made.row_samples * sample
        for position in range(row):
            attended = row if made.row_samples > 1 else position + 0.5
            flops += layers + shape.num_hidden_layers * 2 * 2 * attended * shape.q_size
            flops += 4 / 3 * head if position >= prompt else 0  # the backward pass computes the logits again
        left -= made.row_samples
    seconds = 3 * flops / (989e12 * 0.4)
    assert made.compute == pytest.approx(seconds, rel=0.02)  # norms and biases count as matrices in the formula


@given(shapes(), st.integers(1, 400), st.integers(2, 300), st.integers(1, 600), st.booleans())
@settings(deadline=None, max_examples=120)
def test_generation_reads_or_computes_weights_and_cache_at_every_token_step(
    shape: Shape, prompt: int, sample: int, running: int, slow_memory: bool
) -> None:
    """The oracle runs ``running`` samples in lockstep; each step needs all weights, and each sample's cache so far."""
    job = changed(
        shipped("gpu-8"),
        **{"actors__count": 1, "actors__max_num_seqs": running, "sampling__max_tokens": sample, "sampling__n": 16},
    )
    slow = PRESETS["h100"].model_copy(
        update={
            **FAST.model_dump(include={"decode_layer_us", "step_us", "sample_us"}),
            **({"tflops": 1e12} if slow_memory else {"memory_gb_s": 1e12}),
        }
    )
    hardware = large(slow)
    assume(running <= job.slots * job.sampling.n)
    made = generate(job, shape, hardware, memory_of(job, shape, hardware, prompt), Load(prompt, sample, 0.1))
    layers, head = matmul_flops(shape)
    per_token = 2 * shape.num_hidden_layers * shape.kv_size * 2
    seconds = 0.0
    for done in range(sample):
        context = prompt + done + 0.5
        if slow_memory:
            seconds += ((layers + head) / 2 * 2 + running * context * per_token) / (3350e9 * 0.6)
        else:
            attention = 2 * 2 * context * shape.q_size * shape.num_hidden_layers
            seconds += running * (layers + head + attention) / (989e12 * 0.5)
    waves = job.prompts_per_step * job.sampling.n / running
    if not slow_memory:
        prompts = 16 * (prompt - (prompt - 1) // 16 * 16) + (prompt - 1) // 16 * 16  # computed once, but for a block
        attention = 2 * 2 * prompt / 2 * shape.q_size * shape.num_hidden_layers
        seconds += job.prompts_per_step * prompts * (layers + attention) / (989e12 * 0.5) / waves
    assert made.seconds == pytest.approx(waves * seconds, rel=0.02)


@given(st.integers(1, 200), st.integers(1, 20), st.sampled_from([1, 16, 128]))
def test_a_prompt_is_computed_once_but_for_its_last_block(prompt: int, n: int, block: int) -> None:
    """The oracle keeps whole blocks of the samples before; an engine always computes the last token."""
    cached: set[int] = set()
    computed = 0
    for _ in range(n):
        start = 0
        while start // block in cached and start + block <= prompt - 1:
            start += block
        computed += prompt - start
        cached |= set(range(prompt // block))
    assert _prompt_tokens(prompt, n, block) == computed


@given(st.tuples(*[st.integers(1, 50)] * 4), st.integers(0, 6))
def test_a_step_takes_as_long_as_in_a_pipeline_with_as_many_batches(stages: tuple[int, ...], lag: int) -> None:
    """The oracle moves ``lag + 1`` batches through four stages, each of which serves one at a time, in order."""
    job = shipped("gpu-8", max_lag=lag)
    batches, free = [0.0] * (lag + 1), [0.0] * 4
    ends = []
    for _ in range(40):
        for each in range(lag + 1):
            now = batches[each]
            for stage, seconds in enumerate(stages):
                now = free[stage] = max(now, free[stage]) + seconds
            batches[each] = now
            ends.append(now)
    period = (ends[-1] - ends[-1 - 20 * (lag + 1)]) / (20 * (lag + 1))
    assert step_seconds(job, *map(float, stages)) == pytest.approx(period)


@pytest.mark.parametrize("actors", [1, 2, 3, 7, 8, 15, 16, 40])
def test_weights_reach_the_nodes_in_doubling_rounds(actors: int) -> None:
    job = with_counts(changed(shipped("gpu-8"), prompts_per_step=8), actors, 1)
    holders, rounds, nodes = 1, 0, actors + 1
    while holders < nodes:
        holders, rounds = 2 * holders, rounds + 1
    size = 2 * shape_for(job).parameters
    near = 0.05 + 28 * 0.0005 + size / 20e9 + size / 20e9
    one_each = planned(job, gpus=actors + 1, gpus_per_node=1, nic_gbit=100, load=Load(512, 8, 0.1))
    assert one_each.stages.publish == pytest.approx(near + rounds * size / (100e9 / 8 * 0.7))
    together = planned(job, gpus=actors + 1, gpus_per_node=64, load=Load(512, 8, 0.1))
    assert together.stages.publish == pytest.approx(near)


def test_a_ring_passes_all_but_its_own_part() -> None:
    """Each of the ranks receives the parts of the others, once per gathering and summing."""
    job = changed(shipped("gpu-8"), update__kl={"logged": False}, learner__tokens_per_micro_batch=10**7)
    shape = shape_for(job)
    within = planned(job, device=PRESETS["h100"].model_copy(update={"memory_gib": 1e6})).stages.training
    assert within.micro_batches == 1
    part = shape.parameters * (2 + 2 + 4) / 4  # gathered forward and backward, float32 gradients
    assert within.exchange == pytest.approx(sum(part / 450e9 for _ in range(3)))
    roomy = PRESETS["h100"].model_copy(update={"memory_gib": 1e6})
    across = planned(job, device=roomy, gpus_per_node=2, nic_gbit=200).stages.training
    assert across.exchange == pytest.approx(3 * part / (200e9 / 8 * 0.7))


def test_a_shared_gpu_makes_actor_and_rank_take_turns() -> None:
    job = shipped("gpu-1", max_lag=8)
    stages = planned(job).stages
    assert stages.step == pytest.approx(stages.generation.seconds + stages.training.seconds)


# ---- properties ----------------------------------------------------------------------------------------------------


@given(jobs(), shapes(), loads(), st.integers(2, 40), st.integers(1, 24), st.sampled_from([1, 8]))
@settings(deadline=None, max_examples=25)
def test_more_gpus_never_make_the_best_split_slower(
    job: RLJob, shape: Shape, load: Load, gpus: int, more: int, node: int
) -> None:
    hardware = large(gpus_per_node=node)
    fewer, others = (best_split(job, shape, replaced(hardware, gpus=each), load) for each in (gpus, gpus + more))
    if fewer is not None:
        assert others is not None
        assert others.samples_per_second >= fewer.samples_per_second


@given(jobs(), shapes(), loads(), st.integers(2, 14), st.sampled_from([1, 2, 8]))
@settings(deadline=None, max_examples=20)
def test_the_best_split_is_the_best_of_all(job: RLJob, shape: Shape, load: Load, gpus: int, node: int) -> None:
    """The oracle plans every pair of numbers anew."""
    hardware = large(gpus=gpus, gpus_per_node=node)
    rates = {}
    for actors in range(1, gpus):
        for ranks in range(1, min(gpus, job.prompts_per_step + 1)):
            if actors * job.actors.gpus + ranks <= gpus:
                plan = make_plan(with_counts(job, actors, ranks), shape, hardware, load)
                if plan.fits:
                    rates[actors, ranks] = plan.samples_per_second
    found = best_split(job, shape, hardware, load)
    assert (found is None) == (not rates)
    if found is not None:
        assert found.samples_per_second == pytest.approx(max(rates.values()))
        assert found.samples_per_second == pytest.approx(rates[found.actors, found.ranks])
        equal = [pair for pair, rate in rates.items() if rate == pytest.approx(max(rates.values()), rel=1e-12)]
        assert found.gpus == min(a * job.actors.gpus + r for a, r in equal)


FASTER = ("tflops", "memory_gb_s", "host_gb_s", "link_gb_s", "train_share", "prefill_share", "decode_share")


@given(jobs(), shapes(), loads(), st.sampled_from((*FASTER, "nic_gbit")), st.floats(1, 2.4))
@settings(deadline=None, max_examples=100)
def test_faster_hardware_is_never_slower(job: RLJob, shape: Shape, load: Load, name: str, factor: float) -> None:
    hardware = large(gpus_per_node=2)
    if name == "nic_gbit":
        better = hardware.model_copy(update={name: 100 * factor})
    else:
        device = hardware.device
        better = hardware.model_copy(
            update={"device": device.model_copy(update={name: getattr(device, name) * min(factor, 1.6)})}
        )
    before, after = (make_plan(job, shape, each, load).stages for each in (hardware, better))
    assert after.step <= before.step
    assert all(after.seconds[stage] <= before.seconds[stage] for stage in before.seconds)


@given(jobs(), shapes(), loads(), st.sampled_from(["sample", "prompt", "score_seconds"]))
@settings(deadline=None, max_examples=60)
@example(shipped("gpu-8"), shape_for(shipped("gpu-8")), Load(512, 4, 0.1), "sample")
def test_more_work_is_never_faster(job: RLJob, shape: Shape, load: Load, longer: str) -> None:
    """With one sample per row: sharing rows may pay off only for longer prompts."""
    job = changed(job, learner__tokens_per_micro_batch=1)
    grown = {
        "sample": Load(load.prompt, load.sample * 1.5, load.score_seconds),
        "prompt": Load(load.prompt + 16 * 7, load.sample, load.score_seconds),  # whole blocks of the prefix cache
        "score_seconds": Load(load.prompt, load.sample, load.score_seconds * 3),
    }[longer]
    before, after = (make_plan(job, shape, large(), each).stages for each in (load, grown))
    assert after.step >= before.step * (1 - 1e-9)


@given(jobs(), shapes(), loads())
@settings(deadline=None, max_examples=60)
def test_everything_is_finite_and_positive(job: RLJob, shape: Shape, load: Load) -> None:
    plan = make_plan(job, shape, large(), load)
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in plan.stages.seconds.values())
    assert 0 < plan.samples_per_second < math.inf
    assert plan.fits
    assert plan.stages.step >= max(plan.stages.seconds.values())
