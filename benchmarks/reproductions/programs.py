"""Small Python functions inferred from examples: the data, and a model that writes Python word by word.

A prompt shows three calls of an unknown function. The sample defines it and is judged on these calls and five more.

    f([4,1,7])=[2,8] f([3,3,0,2])=[0,6,6] ...:   ->  def f(x): return [v*2 for v in x[:-1]][::-1]  is one guess
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LISTS = (  # expressions from list to list
    "sorted({})",
    "{}[::-1]",
    "{}[1:]",
    "{}[:-1]",
    "{}[:2]",
    "[v+1 for v in {}]",
    "[v*2 for v in {}]",
    "[v*v for v in {}]",
    "[v for v in {} if v>4]",
    "[v for v in {} if v%2]",
)
VALUES = ("{}", "sum({})", "len({})", "max({})", "min({})")  # the final step
SHOWN, HIDDEN = 3, 5
WORD = r" ?[a-z]+|\d|[^a-z\d]"
WORDS = (
    *("def", " f", " return", " for", " in", " if", "x", " x", "v", " v", "sorted", " sorted", "sum", " sum"),
    *("len", " len", "max", " max", "min", " min", " ", *"0123456789()[]:,=+-*%>"),
)


def program(rng: random.Random) -> str:
    """A random expression in x: one or two list steps and a final step."""
    expression = "x"
    for _ in range(rng.randint(1, 2)):
        expression = rng.choice(LISTS).format(expression)
    return rng.choice(VALUES).format(expression)


def calls(rng: random.Random, expression: str) -> list[tuple[list[int], Any]]:
    """Random arguments, each with the value that the function returns.

    Raises:
        ValueError: the function fails for an argument, or returns too few different values.
    """
    arguments = [[rng.randint(0, 9) for _ in range(rng.randint(3, 4))] for _ in range(SHOWN + HIDDEN)]
    function = eval(f"lambda x: {expression}")  # noqa: S307 - made of the templates above
    found = [(argument, function(argument)) for argument in arguments]
    if len({json.dumps(value) for _, value in found}) < len(found) // 2:
        raise ValueError("too few different values")
    return found


def rows(rng: random.Random, total: int) -> Iterator[dict[str, Any]]:
    """Random prompts with their tests and one correct answer."""
    while total:
        expression = program(rng)
        try:
            found = calls(rng, expression)
        except ValueError:
            continue
        shown = " ".join(f"{argument}={value}".replace(" ", "") for argument, value in found[:SHOWN])
        tests = "\n".join(f"assert f({argument}) == {value}" for argument, value in found)
        answer = f"def f(x): return {expression}"
        yield {"prompt": f"{shown}:", "answer": answer, "tests": [{"asserts": tests}]}
        total -= 1


def make(folder: Path, *, supervised: int, train: int, heldout: int, seed: int = 0) -> None:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``heldout.jsonl``; with random arguments, prompts hardly ever repeat."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, total in (("heldout", heldout), ("sft", supervised), ("train", train)):
        lines = (json.dumps(row) + "\n" for row in rows(random.Random(f"{seed} {name}"), total))
        (folder / f"{name}.jsonl").write_text("".join(lines))


def make_model(folder: Path) -> None:
    """Write an untrained Llama model whose tokens are Python words, digits and signs."""
    from examples.countdown.make_model import make, tokenizer_of

    make(folder, length=160, tokenizer=tokenizer_of(WORDS, WORD))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    make(args.folder, supervised=51_200, train=6_400, heldout=100)
    make_model(args.folder / "untrained")


if __name__ == "__main__":
    main()
