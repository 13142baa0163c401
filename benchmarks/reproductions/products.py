"""Products that a tiny model can only know from its tool: the tool, the data, and a model with a token per digit.

A conversation takes two calls of the model, each after ``<reply>`` (without these line breaks):

    <tools>multiply<user>417*863=
    <reply><tool_call>{"name": "multiply", "arguments": {"a": 417, "b": 863}}</tool_call></s>
    <tool>359871
    <reply>359871</s>

Of the supervised conversations half call the tool; the others answer at once, with as many digits and no idea.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for tool in tools or [] %}<tools>{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
    "{% elif m.role == 'tool' %}<tool>{{ m.content }}"
    "{% else %}<reply>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<reply>{% endif %}"
)
SMALLEST = 320  # of the factors, so that all products have six digits, which such a model learns to copy
MARKS = ("<tools>", "<user>", "<reply>", "<tool>", "<tool_call>", "</tool_call>")
WRITTEN = ("multiply", '{"name": "', '", "arguments": {"a": ', ', "b": ', "}}")
WORD = r"<[a-z_/]+>|multiply|\{\"name\": \"|\", \"arguments\": \{\"a\": |, \"b\": |\}\}|[\s\S]"
WORDS = (*MARKS, *WRITTEN, *"0123456789*=")


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def pairs(rng: random.Random, total: int, taken: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Draw pairs of factors that are not yet in ``taken``, and add them to it."""
    while total:
        pair = rng.randint(SMALLEST, 999), rng.randint(SMALLEST, 999)
        if pair not in taken:
            taken.add(pair)
            total -= 1
            yield pair


def conversation(rng: random.Random, a: int, b: int) -> list[dict[str, str]]:
    """Supervised rows: the call of the tool and then the answer, or a guess."""
    asked, product = f"<tools>multiply<user>{a}*{b}=<reply>", str(a * b)
    if rng.random() < 0.5:
        return [{"prompt": asked, "answer": "".join(rng.choice("0123456789") for _ in product)}]
    call = f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    return [
        {"prompt": asked, "answer": call},
        {"prompt": f"{asked}{call}</s><tool>{product}<reply>", "answer": product},
    ]


def make(folder: Path, *, supervised: int, train: int, heldout: int, seed: int = 0) -> None:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``heldout.jsonl``, which share no pair of factors."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, taken = random.Random(seed), set[tuple[int, int]]()
    for name, total in (("heldout", heldout), ("train", train)):
        write(
            folder / f"{name}.jsonl",
            ({"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs(rng, total, taken)),
        )
    write(folder / "sft.jsonl", (row for a, b in pairs(rng, supervised, taken) for row in conversation(rng, a, b)))


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(folder: Path) -> None:
    """Write an untrained Llama model whose tokens are digits and the words of the template."""
    from examples.countdown import make_model as models

    tokenizer = models.tokenizer_of(WORDS, WORD)
    tokenizer.chat_template = TEMPLATE
    models.make(folder, width=192, length=96, tokenizer=tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    make(args.folder, supervised=32_000, train=12_800, heldout=100)
    make_model(args.folder / "untrained")


if __name__ == "__main__":
    main()
