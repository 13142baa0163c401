"""The child process of the ``python`` scorer, started as ``python -m reward_servers.scorers.python_child TARGET``.

One JSON line ``{"sample", "row"}`` per call on standard input; one line ``{"reward", "answer", "detail"}`` or
``{"error"}`` on what was standard output. The function may print: its output goes to standard error.
"""

import ctypes
import json
import math
import os
import signal
import sys
from typing import Any

from reward_servers.scorers.python import RewardFunction, load_function

PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a function that hangs must not outlive the worker
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    function = load_function(sys.argv[1])
    print("{}", file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(function, json.loads(line))), file=replies)


def answer(function: RewardFunction, request: dict[str, Any]) -> dict[str, Any]:
    """One call. The function returns a number, or a mapping with ``reward`` and maybe ``answer`` and ``detail``."""
    try:
        result = function(request["sample"], request["row"])
        fields = result if isinstance(result, dict) else {"reward": result}
        reward = float(fields["reward"])
    except Exception as problem:  # noqa: BLE001 - a fault-tolerance point: the user's function failed, not the worker
        return {"error": f"{type(problem).__name__}: {problem}"}
    if not math.isfinite(reward):
        return {"error": f"ValueError: the reward is {reward}"}
    return {
        "reward": reward,
        "answer": None if fields.get("answer") is None else str(fields["answer"]),
        "detail": str(fields.get("detail", "")),
    }


if __name__ == "__main__":
    main()
