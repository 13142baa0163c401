"""Objects from their texts in Redis, which another release may have written."""

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

from pydantic import ValidationError

from volley.state import Desired, Limits, Observed, RunRecord

T = TypeVar("T")
NOTHING = Limits(runs=0)


def readable(parses: Mapping[str, Callable[[], T]], unreadable: dict[str, ValueError] | None) -> dict[str, T]:
    """Return the results of all parses that succeed, by run id.

    Args:
        unreadable: gets the reasons of those that fail, by run id.

    Raises:
        ValidationError: a parse fails, and there is no ``unreadable``.
    """
    found = {}
    for run_id, parse in parses.items():
        try:
            found[run_id] = parse()
        except ValidationError as error:
            if unreadable is None:
                raise
            unreadable[run_id] = error
    return found


def run_of(record: str, desired: str | None, observed: str | None) -> tuple[RunRecord, Desired, Observed]:
    """Return a run. Raises `ValidationError` if this release cannot read it, as the functions below do."""
    return RunRecord.model_validate_json(record), desired_of(desired), observed_of(observed)


def desired_of(text: str | None) -> Desired:
    return Desired.model_validate_json(text) if text else Desired()


def observed_of(text: str | None) -> Observed:
    return Observed.model_validate_json(text) if text else Observed()


def limits_of(token: str) -> Limits:
    """Return the limits of a token's owner. Limits that this release cannot read allow nothing, so none is exceeded."""
    try:
        entry = json.loads(token)
        return Limits.model_validate(entry.get("limits", {}) if isinstance(entry, dict) else entry)
    except ValueError:
        return NOTHING
