"""Scorers for tests."""

from collections.abc import Mapping
from typing import Any


def share_of_sevens(sample: str, row: Mapping[str, Any]) -> float:
    """How much of a sample of eight characters is sevens."""
    return sample.count("7") / 8
