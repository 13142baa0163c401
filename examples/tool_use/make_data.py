"""What the warm-up needs: conversations with and without the tool, and the model with a template that shows tools."""

import json
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from services.data.generated import read_generated
from volley.data import SourceSpec
from volley.files import replacing

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
EXPRESSION = re.compile(r"\d[\d +*-]*\d")  # each task has one


def conversations(tasks: Sequence[tuple[str, str]], share: float, seed: int) -> Iterator[dict[str, Any]]:
    """Supervised rows from tasks and their answers.

    A conversation with the tool is two rows, its call and the answer after it. One without is the answer at once, which
    is right but cannot be learned.

    Args:
        share: of the conversations that call the tool.
        seed: chooses them.
    """
    chosen = set(random.Random(seed).sample(range(len(tasks)), round(share * len(tasks))))
    for number, (question, answer) in enumerate(tasks):
        asked = {"role": "user", "content": question}
        if number not in chosen:
            yield {"prompt": [asked], "answer": answer}
            continue
        call = {"name": "python", "arguments": {"code": program(question)}}
        called = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}
        printed = {"role": "tool", "content": answer}
        yield {"prompt": [asked], "answer": f"<tool_call>{json.dumps(call)}</tool_call>"}
        yield {"prompt": [asked, called, printed], "answer": answer}


def program(question: str) -> str:
    """A program that prints the answer to an arithmetic question."""
    return f"print({expression(question)})"


def expression(question: str) -> str:
    """What an arithmetic question asks to compute."""
    (found,) = EXPRESSION.findall(question)
    return str(found)


def write_conversations(path: Path, source: SourceSpec, share: float) -> None:
    """Write the conversations about the tasks of ``source``."""
    tasks = [(row.fields["prompt"], row.fields["answer"]) for row in read_generated(source)]
    with replacing(path) as file:  # a file that exists is complete
        file.writelines(json.dumps(row).encode() + b"\n" for row in conversations(tasks, share, source.seed))


def give_template(model: Path, out: Path) -> None:
    """Write the folder ``out``: the files of ``model`` as links, and a chat template that shows tools."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in model.iterdir():
        (out / file.name).symlink_to(file.resolve())
    (out / TEMPLATE.name).unlink(missing_ok=True)
    shutil.copyfile(TEMPLATE, out / TEMPLATE.name)
