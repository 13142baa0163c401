"""Write the countdown task as JSONL: supervised rows, training prompts and held-out prompts.

A prompt gives four numbers from 1 to 9 and a target. An answer is an expression in ``+ - *`` that uses each number
once and equals the target. Most prompts have several correct answers, so a model with k tries gains by trying different
ones.

    3 7 2 5=24:      ->  7*2+5*2 is wrong (2 is used twice), 3*7+5-2 is correct
"""

import argparse
import itertools
import json
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_TARGET = 99


def value(numbers: list[int], operators: list[str]) -> int:
    """The value of ``numbers[0] operators[0] numbers[1] ...``; products bind first."""
    total, term, sign = 0, numbers[0], 1
    for symbol, number in zip(operators, numbers[1:], strict=True):
        if symbol == "*":
            term *= number
        else:
            total, term, sign = total + sign * term, number, 1 if symbol == "+" else -1
    return total + sign * term


def problem(rng: random.Random, count: int) -> tuple[list[int], int, str]:
    """Random numbers, a target that can be reached with them, and an expression that reaches it."""
    while True:
        numbers = [rng.randint(1, 9) for _ in range(count)]
        order, symbols = rng.sample(numbers, count), rng.choices(list(OPERATORS), k=count - 1)
        target = value(order, symbols)
        if 0 <= target <= MAX_TARGET:
            expression = "".join(itertools.chain(*itertools.zip_longest(map(str, order), symbols, fillvalue="")))
            return numbers, target, expression


def rows(rng: random.Random, total: int, count: int, excluded: set[tuple[object, ...]]) -> Iterator[dict[str, object]]:
    """``total`` rows with ``count`` numbers each, except problems in ``excluded``: sorted numbers, then the target."""
    while total:
        numbers, target, expression = problem(rng, count)
        if (*sorted(numbers), target) in excluded:
            continue
        prompt = f"{' '.join(map(str, numbers))}={target:02d}:"
        yield {"prompt": prompt, "numbers": numbers, "target": target, "answer": expression}
        total -= 1


def write(path: Path, lines: Iterable[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make(folder: Path, *, supervised: int, train: int, heldout: int, numbers: int = 4, seed: int = 0) -> None:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``heldout.jsonl``; the first two contain no held-out problem."""
    folder.mkdir(parents=True, exist_ok=True)
    heldout_rows = list(rows(random.Random(f"{seed} heldout"), heldout, numbers, set()))
    taken = {(*sorted(row["numbers"]), row["target"]) for row in heldout_rows}  # type: ignore[call-overload]
    write(folder / "heldout.jsonl", heldout_rows)
    write(folder / "sft.jsonl", rows(random.Random(f"{seed} sft"), supervised, numbers, taken))
    write(folder / "train.jsonl", rows(random.Random(f"{seed} train"), train, numbers, taken))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--supervised", type=int, default=76_800)
    parser.add_argument("--train", type=int, default=9_600)
    parser.add_argument("--heldout", type=int, default=200)
    parser.add_argument("--numbers", type=int, default=4, help="numbers per prompt; more are harder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(
        args.folder,
        supervised=args.supervised,
        train=args.train,
        heldout=args.heldout,
        numbers=args.numbers,
        seed=args.seed,
    )


if __name__ == "__main__":
    main()
