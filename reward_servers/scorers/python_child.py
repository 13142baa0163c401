"""The child process of the ``python`` scorer, started as ``python -m reward_servers.scorers.python_child TARGET``.

Each call is one JSON line ``{"sample", "row"}`` on standard input, answered with one line ``{"reward", "rank",
"answer", "detail"}`` or ``{"error"}`` on the original standard output. What the function prints goes to standard error.
"""

import json
import math
import sys
from typing import Any

from reward_servers.scorers.python import RewardFunction, load_function
from volley.processes import die_with_parent, take_stdout


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
        return {"error": f"{type(problem).__name__}: {problem}"}
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


if __name__ == "__main__":
    main()
