"""Heads and nodes of Ray whose workers may be forked."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("setup_worker.py")


@contextlib.contextmanager
def forking_workers() -> Iterator[None]:
    """Let Ray nodes that this process starts within the block start their workers by our script."""
    from ray._private.parameter import RayParams

    kept = RayParams.update_if_absent

    def update_if_absent(params: Any, **values: Any) -> None:
        kept(params, **values | {"setup_worker_path": str(SCRIPT)} if "setup_worker_path" in values else values)

    RayParams.update_if_absent = update_if_absent
    try:
        yield
    finally:
        RayParams.update_if_absent = kept


def main() -> None:
    """Ray's command line, ``ray``, for such nodes."""
    from ray.scripts.scripts import main as ray

    with forking_workers():
        ray()


if __name__ == "__main__":
    main()
