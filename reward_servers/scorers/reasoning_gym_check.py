# ruff: noqa: T201 - a program for the sandbox prints its answer
"""Scores one answer to a generated task. Runs inside the sandbox, because some scorers execute the answer as code.

Standard input is {"task", "answer"}; prints the score. The task is generated again from its seed: its data need not
survive being written as JSON, and many would not.
"""

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any


def dataset_of(task: Mapping[str, Any]) -> Any:
    """Return the data set of which the task is one item.

    Raises:
        ValueError, TypeError, AssertionError: reasoning-gym refuses the set, its config or its level.
    """
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
    from reasoning_gym.factory import DATASETS, create_curriculum, create_dataset

    config = {**task["config"], "seed": task["seed"], "size": task["size"]}
    if task["level"] is None:
        return create_dataset(task["set"], **config)
    curriculum = create_curriculum(task["set"])
    levels = max(len(attribute.levels) for attribute in curriculum.attributes.values())
    if task["level"] >= levels:
        raise ValueError(f"it has the levels 0 to {levels - 1}")
    curriculum.set_global_level(task["level"])
    only_this_level = DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)
    made = curriculum.generate_configuration(config, context=only_this_level)
    made.validate()
    return DATASETS[task["set"]][0](made)


def main() -> None:
    request = json.loads(sys.stdin.read())
    task = request["task"]
    with contextlib.redirect_stdout(sys.stderr):  # some sets print
        dataset = dataset_of(task)
        score = float(dataset.score_answer(request["answer"], dataset[task["index"]]))
    print(score)


if __name__ == "__main__":
    main()
