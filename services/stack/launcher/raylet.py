"""Heads and nodes of Ray whose workers may be forked, and that lack the processes which nobody asks.

Ray's log monitor forwards the output of workers to drivers, which read log files here.
"""

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
    ours = {"setup_worker_path": str(SCRIPT), "include_log_monitor": False}

    def update_if_absent(params: Any, **values: Any) -> None:
        kept(params, **{name: ours.get(name, value) for name, value in values.items()})

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
