"""The endless order in which a run meets its prompts. ``order[position]`` depends on nothing but the position, the seed
and the data: a run resumes from its cursor alone.

Order            pass after pass, each shuffled by a seed of its own
MixtureOrder     sources interleaved by weight, each in an Order of its own
CurriculumOrder  a pool that grows from easy to hard, then an Order of everything
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.data.mapping import as_number
from volley.data import DATASET_TAG, CurriculumSpec, DataSpec
from volley.errors import JobError
from volley.records import Prompt

MAX_PERIOD = 10_000  # weights are kept to one part in so many


class PromptOrder(Protocol):
    """Position in the run to row number."""

    def __getitem__(self, position: int) -> int: ...


def order_of(spec: DataSpec, prompts: Sequence[Prompt], *, seed: int) -> PromptOrder:
    """The order the job asks for over ``prompts``, as `read_prompts` returned them or a subset.

    Raises:
        JobError: a curriculum's tag or difficulty is missing from a prompt.
    """
    if spec.curriculum is not None:
        return CurriculumOrder(difficulties(spec.curriculum, prompts), over=spec.curriculum.over, seed=seed)
    if not spec.sources:
        return Order(len(prompts), seed=seed, shuffle=spec.shuffle)
    rows_of: dict[str, list[int]] = {source.name: [] for source in spec.sources}
    for row, prompt in enumerate(prompts):
        rows_of[prompt.tags[DATASET_TAG]].append(row)
    used = [source for source in spec.sources if rows_of[source.name]]
    return MixtureOrder(
        [rows_of[source.name] for source in used],
        [source.weight for source in used],
        seed=seed,
        shuffle=spec.shuffle,
    )


class Order:
    """The order in which a run meets ``count`` rows: pass after pass, each shuffled by a seed of its own."""

    def __init__(self, count: int, *, seed: int, shuffle: bool, stream: int | None = None) -> None:
        self.count, self.shuffle = count, shuffle
        self._seed = [seed] if stream is None else [seed, stream, 1]
        self._passes: dict[int, NDArray[np.int64]] = {}

    def __getitem__(self, position: int) -> int:
        number, offset = divmod(position, self.count)
        if not self.shuffle:
            return offset
        if number not in self._passes:
            self._passes = {key: rows for key, rows in self._passes.items() if key == number - 1}
            self._passes[number] = np.random.default_rng([*self._seed, number]).permutation(self.count)
        return int(self._passes[number][offset])


class MixtureOrder:
    """Sources interleaved so that each has its weight's share of every window, to within two prompts.

    Which source a position takes repeats with the weights' common denominator; which of its rows is the source's own
    `Order`, so a small source is met again while a large one is in its first pass.

    Args:
        rows: row numbers of each source, none empty.
        weights: positive, one a source; kept to one part in `MAX_PERIOD`.
    """

    def __init__(self, rows: Sequence[Sequence[int]], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self.shares = integer_weights(weights)
        self._sources = chairmen(self.shares)
        self._ranks = np.zeros_like(self._sources)
        for source in range(len(rows)):
            mine = self._sources == source
            self._ranks[mine] = np.arange(int(mine.sum()))
        self._orders = [Order(len(each), seed=seed, shuffle=shuffle, stream=number) for number, each in enumerate(rows)]

    def source(self, position: int) -> int:
        """The source that ``position`` takes its prompt from."""
        return int(self._sources[position % len(self._sources)])

    def __getitem__(self, position: int) -> int:
        period, offset = divmod(position, len(self._sources))
        source = int(self._sources[offset])
        return self._rows[source][self._orders[source][period * self.shares[source] + int(self._ranks[offset])]]


def integer_weights(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the ratio of ``weights``, or the nearest ratio with a sum of `MAX_PERIOD`."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact, Fraction(0))
    shares = [weight / total for weight in exact]
    period = lcm(*(share.denominator for share in shares))
    if period > MAX_PERIOD:
        period = MAX_PERIOD
        whole = [max(1, int(share * period)) for share in shares]
        whole[whole.index(max(whole))] += period - sum(whole)
        return whole
    whole = [int(share * period) for share in shares]
    return [each // gcd(*whole) for each in whole]


def chairmen(shares: Sequence[int]) -> NDArray[np.int64]:
    """One period of the fairest schedule: int64 [sum(shares)], the source of each position.

    After every p positions source i was taken p * share_i / sum times, to within less than one: the algorithm of
    R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980), in whole numbers.
    """
    count, total = len(shares), sum(shares)
    if count == 1:
        return np.zeros(total, dtype=np.int64)
    share = np.asarray(shares, dtype=np.int64)
    due = np.zeros(count, dtype=np.int64)  # total * (what a source is owed), before the position's choice
    chosen = np.empty(total, dtype=np.int64)
    slack = 2 * count - 2
    for position in range(total):
        due += share
        urgency = ((slack - 1) * total - slack * due) / share  # time until it would be owed too much
        urgency[slack * due < total] = np.inf
        chosen[position] = int(np.argmin(urgency))
        due[chosen[position]] -= total
    return chosen


class CurriculumOrder:
    """A pool of prompts that grows by one difficulty at equal steps over the first ``over`` positions.

    Args:
        ranks: difficulty of each row, 0 the easiest, no rank skipped.
    """

    def __init__(self, ranks: Sequence[int], *, over: int, seed: int) -> None:
        rank_of = np.asarray(ranks, dtype=np.int64)
        self.stages, self.over = int(rank_of.max()) + 1, over
        self._pools = [np.flatnonzero(rank_of <= stage) for stage in range(self.stages)]
        self._orders = [
            Order(len(pool), seed=seed, shuffle=True, stream=stage) for stage, pool in enumerate(self._pools)
        ]

    def stage(self, position: int) -> int:
        """The hardest difficulty in the pool at ``position``."""
        return min(position * self.stages // self.over, self.stages - 1)

    def __getitem__(self, position: int) -> int:
        stage = self.stage(position)
        first = -(-stage * self.over // self.stages)
        return int(self._pools[stage][self._orders[stage][position - first]])


def difficulties(spec: CurriculumSpec, prompts: Sequence[Prompt]) -> list[int]:
    """The rank of each prompt's difficulty, 0 the easiest; raises `JobError`."""
    values = [prompt.tags.get(spec.tag) for prompt in prompts]
    if None in values:
        name = prompts[values.index(None)].id
        raise JobError(
            f"curriculum: prompt {name} has no tag {spec.tag!r}; list it under data.tags, or filter such rows"
        )
    present = {str(value) for value in values}
    if spec.order:
        unknown = sorted(present - set(spec.order))
        if unknown:
            raise JobError(f"curriculum.order lacks {', '.join(map(repr, unknown))}, which {spec.tag!r} holds")
        ordered = [value for value in spec.order if value in present]
    else:
        ordered = sorted(present, key=lambda value: (_number_in(spec, value), value))
    ranks = {value: rank for rank, value in enumerate(ordered)}
    return [ranks[str(value)] for value in values]


def _number_in(spec: CurriculumSpec, value: str) -> float:
    """3 for ``3``, ``Level 3`` and ``3.0``."""
    number = as_number(value)
    if number is None:
        found = re.findall(r"\d+(?:\.\d+)?", value)
        number = as_number(found[-1]) if found else None
    if number is None:
        raise JobError(f"curriculum: {spec.tag!r} holds {value!r}, which has no number: write curriculum.order")
    return float(number)
