"""The endless order in which a run uses its prompts.

``order[position]`` depends only on the position, the seed and the data, so a run can resume from its cursor alone.

Order            pass after pass, each shuffled with its own seed
MixtureOrder     sources interleaved by weight, each with its own Order
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

MAX_PERIOD = 10_000  # longest period of a mixture, so weights are exact to one part in 10,000


class PromptOrder(Protocol):
    """Maps a position in the run to a row number."""

    def __getitem__(self, position: int) -> int: ...


def order_of(spec: DataSpec, prompts: Sequence[Prompt], *, seed: int) -> PromptOrder:
    """Return the job's order over ``prompts``, which `read_prompts` returned, or over a subset of them.

    Raises:
        JobError: a prompt lacks the curriculum's tag, or the tag has no known difficulty.
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
    """Goes through ``count`` rows pass after pass, each shuffled with its own seed."""

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
    """Interleaves sources so that each has its weight's share of every window, to within two prompts.

    The sequence of sources repeats with the weights' common denominator. Each source goes through its rows with its
    own `Order`, so a small source repeats while a large one is still in its first pass.

    Args:
        rows: row numbers of each source; no source is empty.
        weights: one positive weight per source, used with a precision of one part in `MAX_PERIOD`.
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
        """Return the source of the prompt at ``position``."""
        return int(self._sources[position % len(self._sources)])

    def __getitem__(self, position: int) -> int:
        period, offset = divmod(position, len(self._sources))
        source = int(self._sources[offset])
        return self._rows[source][self._orders[source][period * self.shares[source] + int(self._ranks[offset])]]


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the ratio of ``weights``, or the nearest ratio that sums to `MAX_PERIOD`."""
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
    """Return one period of the fairest schedule: the source at each position, int64 [sum(shares)].

    After p positions, source i has been chosen p * share_i / sum times, with an error below one. The algorithm is
    R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980), in integers.
    """
    count, total = len(shares), sum(shares)
    if count == 1:
        return np.zeros(total, dtype=np.int64)
    share = np.asarray(shares, dtype=np.int64)
    due = np.zeros(count, dtype=np.int64)  # total * (choices that a source is owed) before this position
    chosen = np.empty(total, dtype=np.int64)
    slack = 2 * count - 2
    for position in range(total):
        due += share
        urgency = ((slack - 1) * total - slack * due) / share  # positions until a source would be owed too much
        urgency[slack * due < total] = np.inf
        chosen[position] = int(np.argmin(urgency))
        due[chosen[position]] -= total
    return chosen


class CurriculumOrder:
    """A pool of prompts that grows by one difficulty at equal intervals over the first ``over`` positions.

    Args:
        ranks: difficulty of each row: 0 is the easiest, without gaps.
    """

    def __init__(self, ranks: Sequence[int], *, over: int, seed: int) -> None:
        rank_of = np.asarray(ranks, dtype=np.int64)
        self.stages, self.over = int(rank_of.max()) + 1, over
        self._pools = [np.flatnonzero(rank_of <= stage) for stage in range(self.stages)]
        self._orders = [
            Order(len(pool), seed=seed, shuffle=True, stream=stage) for stage, pool in enumerate(self._pools)
        ]

    def stage(self, position: int) -> int:
        """Return the hardest difficulty in the pool at ``position``."""
        return min(position * self.stages // self.over, self.stages - 1)

    def __getitem__(self, position: int) -> int:
        stage = self.stage(position)
        first = -(-stage * self.over // self.stages)
        return int(self._pools[stage][self._orders[stage][position - first]])


def difficulties(spec: CurriculumSpec, prompts: Sequence[Prompt]) -> list[int]:
    """Return the rank of each prompt's difficulty, 0 for the easiest. Raises `JobError`."""
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
            raise JobError(f"curriculum.order lacks {', '.join(map(repr, unknown))}, values of tag {spec.tag!r}")
        ordered = [value for value in spec.order if value in present]
    else:
        ordered = sorted(present, key=lambda value: (_number_in(spec, value), value))
    ranks = {value: rank for rank, value in enumerate(ordered)}
    return [ranks[str(value)] for value in values]


def _number_in(spec: CurriculumSpec, value: str) -> float:
    """Return the number in a tag's value: 3 for ``3``, ``Level 3`` and ``3.0``."""
    number = as_number(value)
    if number is None:
        found = re.findall(r"\d+(?:\.\d+)?", value)
        number = as_number(found[-1]) if found else None
    if number is None:
        raise JobError(f"curriculum: tag {spec.tag!r} has the value {value!r}, not a number: write curriculum.order")
    return float(number)
