"""Types and data that the tests of commands share."""

from collections.abc import Callable

Volley = Callable[..., tuple[int, str, str]]
JOB = {
    "kind": "rl",
    "name": "sevens",
    "steps": 4,
    "model": {"path": "model"},
    "data": {"path": "train.jsonl"},
    "scorer": {"kind": "countdown"},
    "objective": {"kind": "max_at_k", "k": 8},
}
