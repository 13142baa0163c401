"""The child process of the ``python`` scorer, started as ``python -m reward_servers.scorers.python_child TARGET``.

Each call is one JSON line ``{"sample", "row"}`` on standard input, answered with one line ``{"reward", "rank",
"answer", "detail"}`` or ``{"error", "traceback"}`` on the original standard output. What the function prints goes to
standard error.
"""

import json
import math
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from reward_servers.scorers.python import RewardFunction, load_function
from volley.processes import die_with_parent, take_stdout

MAX_TRACEBACK = 8000  # characters


def main() -> None:
    die_with_parent()  # a function that hangs must not outlive the worker
    replies = take_stdout()
    function = load_function(sys.argv[1])
    print("{}", file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(function, json.loads(line))), file=replies)


def answer(function: RewardFunction, request: dict[str, Any]) -> dict[str, Any]:
    """Call the function, which returns a number or a dict with ``reward`` and optionally the other keys of a reply."""
    try:
        result = function(request["sample"], request["row"])
        fields = result if isinstance(result, dict) else {"reward": result}
        reward = float(fields["reward"])
        rank = None if fields.get("rank") is None else float(fields["rank"])
    except Exception as problem:  # noqa: BLE001 - a fault-tolerance point: the user's function failed, not the worker
        return raised(problem)
    if not math.isfinite(reward):
        return {"error": f"ValueError: the reward is {reward}"}
    if rank is not None and not math.isfinite(rank):
        return {"error": f"ValueError: the rank is {rank}"}
    return {
        "reward": reward,
        "rank": rank,
        "answer": None if fields.get("answer") is None else str(fields["answer"]),
        "detail": str(fields.get("detail", "")),
    }


def raised(problem: Exception) -> dict[str, Any]:
    """The answer for a call that raised: the error with the line that raised it, and the traceback."""
    frames = traceback.extract_tb(problem.__traceback__)[1:]  # the first is `answer` itself
    error = traceback.format_exception_only(problem)[-1].strip()
    if frames:
        error += f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name}, in {frames[-1].name})"
    told = "".join(traceback.format_exception(problem.with_traceback(_tail(problem))))
    return {"error": error, "traceback": told[-MAX_TRACEBACK:]}


def _tail(problem: Exception) -> TracebackType | None:
    return problem.__traceback__.tb_next if problem.__traceback__ is not None else None


if __name__ == "__main__":
    main()
