from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.data.mixture import CurriculumOrder, MixtureOrder, Order, chairmen, integer_weights, order_of
from volley.data import DataSpec
from volley.errors import JobError
from volley.records import Prompt

SHARES = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def mixture(sizes: list[int], weights: list[float], seed: int = 0) -> MixtureOrder:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    rows = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    return MixtureOrder(rows, weights, seed=seed, shuffle=True)


@given(SHARES)
@settings(deadline=None)
def test_each_source_is_always_within_one_prompt_of_its_share(shares: list[int]) -> None:
    schedule, total = chairmen(shares), sum(shares)
    counts = [0] * len(shares)
    for position, chosen in enumerate(schedule.tolist(), 1):
        counts[chosen] += 1
        assert all(abs(count - position * share / total) < 1 for count, share in zip(counts, shares, strict=True))
    assert counts == shares


@given(SHARES, st.integers(0, 500), st.integers(1, 300))
@settings(deadline=None)
def test_in_any_window_each_source_is_within_two_prompts_of_its_share(
    shares: list[int], start: int, length: int
) -> None:
    order = mixture([5] * len(shares), [float(share) for share in shares])
    counts = Counter(order.source(position) for position in range(start, start + length))
    for source, share in enumerate(shares):
        assert abs(counts[source] - length * share / sum(shares)) < 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 2**31), st.integers(0, 200))
@settings(deadline=None, max_examples=50)
def test_a_new_order_resumes_where_another_stopped(sizes: list[int], seed: int, cut: int) -> None:
    weights = [1.0 + number for number in range(len(sizes))]
    whole = mixture(sizes, weights, seed)
    drawn = [whole[position] for position in range(220)]
    resumed = mixture(sizes, weights, seed)
    assert drawn[:cut] + [resumed[position] for position in range(cut, 220)] == drawn


def test_each_source_makes_its_own_complete_passes() -> None:
    order = mixture([3, 10], [1, 1])
    small = [row for row in (order[position] for position in range(60)) if row < 3]
    assert [sorted(small[start : start + 3]) for start in range(0, 30, 3)] == [[0, 1, 2]] * 10


def test_weights_are_reduced_to_the_smallest_integers() -> None:
    assert integer_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert integer_weights([2, 4]) == [1, 2]
    odd = integer_weights([0.123456789, 0.3, 1e-9])
    assert sum(odd) == 10_000
    assert odd[2] == 1


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 100), st.integers(0, 99))
@settings(deadline=None)
def test_a_curriculum_admits_no_level_early_and_resumes(ranks: list[int], over: int, seed: int) -> None:
    order_of_rank = {rank: number for number, rank in enumerate(sorted(set(ranks)))}
    ranks = [order_of_rank[rank] for rank in ranks]
    order = CurriculumOrder(ranks, over=over, seed=seed)
    drawn = [order[position] for position in range(over + 3 * len(ranks))]
    assert all(ranks[row] <= order.stage(position) for position, row in enumerate(drawn))
    first = -(-(order.stages - 1) * over // order.stages)  # from here on all levels are included
    assert sorted(drawn[first : first + len(ranks)]) == list(range(len(ranks)))
    assert [CurriculumOrder(ranks, over=over, seed=seed)[position] for position in (7 % len(drawn), 0)] == [
        drawn[7 % len(drawn)],
        drawn[0],
    ]


def test_curriculum_levels_are_ordered_by_number_or_as_listed() -> None:
    prompts = [Prompt(str(n), "x", {}, {"level": level}) for n, level in enumerate(["Level 10", "Level 2", "Level 2"])]
    spec = DataSpec.model_validate({"path": "x.jsonl", "curriculum": {"tag": "level", "over": 10}})
    order = order_of(spec, prompts, seed=1)
    assert {order[position] for position in range(5)} == {1, 2}
    assert 0 in {order[position] for position in range(5, 8)}
    named = spec.model_copy(update={"curriculum": spec.curriculum.model_copy(update={"order": ("Level 2",)})})  # type: ignore[union-attr]
    with pytest.raises(JobError, match=r"curriculum\.order lacks 'Level 10'"):
        order_of(named, prompts, seed=1)
    with pytest.raises(JobError, match="prompt 9 has no tag 'level'"):
        order_of(spec, [*prompts, Prompt("9", "x")], seed=1)


def test_a_single_source_has_its_own_order() -> None:
    prompts = [Prompt(str(n), "x") for n in range(7)]
    order = order_of(DataSpec.model_validate({"path": "x.jsonl"}), prompts, seed=3)
    plain = Order(7, seed=3, shuffle=True)
    assert [order[position] for position in range(20)] == [plain[position] for position in range(20)]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, "set exactly one of path, hub, generator and sources"),
        ({"path": "a", "hub": "b"}, "set only one of path, hub and generator"),
        ({"path": "a", "revision": "main"}, "revision needs hub"),
        ({"sources": [{"name": "a", "weight": 1}]}, "set path, hub or generator"),
        ({"sources": [{"name": "a", "weight": 1, "path": "x"}] * 2}, "names must be unique"),
        ({"prompt_field": "q", "sources": [{"name": "a", "weight": 1, "path": "x"}]}, "set this in each source"),
        ({"path": "a", "shuffle": False, "curriculum": {"tag": "t", "over": 1}}, "write shuffle: true"),
        ({"path": "a", "filters": [{"field": "x", "op": "in", "value": 3}]}, "must be a list"),
    ],
)
def test_inconsistent_mixtures_are_rejected(data: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        DataSpec.model_validate(data)


def test_a_saved_mixture_reads_back() -> None:
    spec = DataSpec.model_validate({"sources": [{"name": "a", "weight": 1, "path": "x.jsonl"}]})
    assert DataSpec.model_validate(spec.model_dump(mode="json")) == spec
