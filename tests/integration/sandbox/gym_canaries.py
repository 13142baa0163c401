"""Prints all sets of reasoning-gym, and those whose scorer compiles the model's answer as Python, as JSON.

The canaries do nothing when they are executed. The auditing hook cannot be removed, so this is a process of its own.
With an argument, that is scored as an answer of binary_matrix instead.
"""

import contextlib
import json
import sys
from typing import Any

from reasoning_gym.factory import DATASETS

from reward_servers.scorers.reasoning_gym_check import dataset_of
from volley.processes import take_stdout

MARK = "7719"
FORMS = ("{m}", "({m})", "[{m}]", "1 + {m}", "['{m}']", "x + {m}", "{m} {m}", "{m} = 1", '{{"a": {m}}}')


def main() -> None:
    output, compiled = take_stdout(), list[str]()  # some sets print

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "compile" and MARK in str(arguments[0]):
            compiled.append(str(arguments[0]))

    sys.addaudithook(hook)
    names, found = sorted(set(DATASETS) - {"composite"}), []
    for name in names:
        dataset, entry = task_of(name)
        numbers = entry["metadata"].get("numbers")
        forms = [form.format(m=MARK) for form in FORMS]
        if isinstance(numbers, list | tuple):  # some first look whether the right numbers are used
            forms.append(" + ".join(map(str, numbers)) + f" + 0*{MARK}")
        compiled.clear()
        for form in forms:
            with contextlib.suppress(Exception):
                dataset.score_answer(form, entry)
        if compiled:
            found.append(name)
    output.write(json.dumps({"names": names, "compiled": found}))


def task_of(name: str) -> tuple[Any, Any]:
    dataset = dataset_of({"set": name, "config": {}, "level": None, "seed": 0, "size": 1})
    return dataset, dataset[0]


def attack(answer: str) -> None:
    dataset, entry = task_of("binary_matrix")
    dataset.score_answer(answer, entry)


if __name__ == "__main__":
    attack(sys.argv[1]) if len(sys.argv) > 1 else main()
