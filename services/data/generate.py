"""``python -m services.data.generate`` reads ``{"sets", "size", "seed"}`` and prints one generated task a line.

If a set cannot be generated, the only line is ``{"problem": ...}``.
"""

import difflib
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from reasoning_gym.factory import CURRICULA, DATASETS

from reward_servers.scorers.reasoning_gym_check import dataset_of
from services.data.mixture import chairmen, integer_weights
from volley.data import MAX_GENERATED
from volley.processes import take_stdout


def main() -> None:
    request, output = json.loads(sys.stdin.read()), take_stdout()  # some sets print
    try:
        lines = [json.dumps(row) for row in rows(request["sets"], request["size"], request["seed"])]
    except Refused as problem:
        lines = [json.dumps({"problem": str(problem)})]
    output.write("".join(f"{line}\n" for line in lines))


class Refused(Exception):
    """A set cannot be generated as written."""


def rows(sets: list[dict[str, Any]], size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ``size`` tasks; each set has its weight's share of every stretch, each of its levels equally many.

    Item i of a set comes from the random seed ``MAX_GENERATED * seed + i``, so that tasks of two seeds are unrelated:
    reasoning-gym itself seeds item i with seed + i.
    """
    order = chairmen(integer_weights([each["weight"] for each in sets]))
    turns = [0] * len(sets)
    makers = [_Maker(each, size, seed * MAX_GENERATED) for each in sets]
    for position in range(size):
        chosen = int(order[position % len(order)])
        yield makers[chosen].make(turns[chosen])
        turns[chosen] += 1


class _Maker:
    """Makes the tasks of one set."""

    def __init__(self, each: Mapping[str, Any], size: int, seed: int) -> None:
        self.name, self.levels = each["name"], each["levels"] or [None]
        if self.name not in DATASETS or self.name == "composite":
            near = difflib.get_close_matches(self.name, DATASETS, 3)
            raise Refused(f"no set is called {self.name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
        if each["levels"] and self.name not in CURRICULA:
            raise Refused(f"{self.name} has no levels: set its config")
        common = {"set": self.name, "config": each["config"], "seed": seed, "size": size}
        version = importlib.metadata.version("reasoning-gym")
        self.tasks = [{**common, "level": level, "version": version} for level in self.levels]
        self.datasets = [self._dataset(task) for task in self.tasks]

    def _dataset(self, task: Mapping[str, Any]) -> Any:
        try:
            return dataset_of(task)
        except (AssertionError, ValueError, TypeError, KeyError) as error:
            raise Refused(f"{self._called(task)}: {error}") from error

    def make(self, turn: int) -> dict[str, Any]:
        index, which = divmod(turn, len(self.tasks))
        task = {**self.tasks[which], "index": index}
        try:
            item = self.datasets[which][index]
        except (AssertionError, ValueError, IndexError, RuntimeError) as error:
            raise Refused(f"{self._called(task)}: item {index}: {error}") from error
        tags = {"set": self.name} | ({} if task["level"] is None else {"level": task["level"]})
        return {"prompt": item["question"], "answer": item["answer"], "task": task, **tags}

    def _called(self, task: Mapping[str, Any]) -> str:
        return self.name if task["level"] is None else f"{self.name} at level {task['level']}"


if __name__ == "__main__":
    main()
