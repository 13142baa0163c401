"""The smallest rl job, as it is sent to the API."""

from typing import Any


def job_tree(**changes: Any) -> dict[str, Any]:
    """The job with some keys changed."""
    return {
        "kind": "rl",
        "name": "a",
        "model": {"path": "/m"},
        "data": {"path": "/d.jsonl"},
        "scorer": {"kind": "exact"},
        "steps": 1,
        "objective": {"kind": "mean"},
        **changes,
    }
