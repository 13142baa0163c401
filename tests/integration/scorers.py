"""Scorers for tests."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def share_of_sevens(sample: str, row: Mapping[str, Any]) -> float:
    """The share of sevens in a sample of eight characters."""
    return sample.count("7") / 8


async def slow_share_of_sevens(sample: str, row: Mapping[str, Any]) -> float:
    """The share of sevens, after a while: it sets the pace of the run."""
    await asyncio.sleep(0.12)
    return share_of_sevens(sample, row)


def fails_while(sample: str, row: Mapping[str, Any]) -> float:
    """The share of sevens; raises while the file that the row names exists."""
    if Path(row["switch"]).exists():
        raise RuntimeError("the scorer is broken")
    return share_of_sevens(sample, row)


async def wrong_attribute(sample: str, row: Mapping[str, Any]) -> float:
    """Raises whatever the sample is."""
    return float(sample.no_such_method())  # type: ignore[attr-defined]
