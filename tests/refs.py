"""A stand-in for references to objects in Ray's store, for tests that fetch none."""

from typing import Any

NOT_STORED: Any = None
