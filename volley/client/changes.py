"""Changes to a live run as users write them: `k=4` for `objective.k=4`."""

from collections.abc import Mapping
from typing import Any

from volley.errors import JobError
from volley.views import Changes

FIELDS = tuple(Changes.model_fields)


def desired_changes(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the desired state to change; a key that is not one of `FIELDS` belongs to the objective.

    Raises:
        JobError: nothing to change, or a dotted key that does not begin with "objective".
    """
    changes: dict[str, Any] = {}
    objective: dict[str, Any] = {}
    for key, value in pairs.items():
        first, dot, rest = key.partition(".")
        if not dot:
            first, rest = (key, "") if key in FIELDS else ("objective", key)
        if rest and first != "objective":
            others = ", ".join(name for name in FIELDS if name != "objective")
            raise JobError(f"{key}: only objective has fields below it; write {others} or objective.k")
        if rest:
            objective[rest] = value
        else:
            changes[first] = value
    if objective:
        changes["objective"] = {**(changes.get("objective") or {}), **objective}
    if not changes:
        raise JobError("nothing to change: pass one of " + ", ".join((*FIELDS, "k")))
    return changes


def worker_counts(actors: int | None, reward_workers: int | None, environment_workers: int | None) -> dict[str, Any]:
    """Return the changes that `scale` makes. Raises `JobError` if there are none."""
    counts = {"actors": actors, "reward_workers": reward_workers, "environment_workers": environment_workers}
    changes = {name: count for name, count in counts.items() if count is not None}
    if not changes:
        raise JobError("nothing to scale: pass the number of actors, of reward workers or of environment workers")
    return changes
