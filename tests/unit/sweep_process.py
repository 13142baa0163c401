"""``volley`` with runs that train nothing: what a run is made of is replaced, everything around it is the product.

Each run has a child process, whose id it writes to ``child`` in its folder, and takes `STEPS` steps. It writes a
checkpoint after each, and when it is asked to stop.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from services.cli import main
from services.signals import StopSignal
from services.store.folder import RunFolder
from services.sweeps import local

STEPS = 4  # as many as `JOB` has


@contextlib.asynccontextmanager
async def no_stack(*_: object, **__: object) -> AsyncIterator[object]:
    yield object()


async def run_on(
    stack: object, run: object, folder: RunFolder, display: object, *, checkpoint: Path | None, stop_signal: StopSignal
) -> None:
    child = await asyncio.create_subprocess_exec("sleep", "600")
    (folder.path / "child").write_text(str(child.pid))
    folder.write_summary({"state": "running", "problem": ""})
    first = 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))
    state = "stopped"
    try:
        with stop_signal.grace_period(30):
            for step in range(first, STEPS):
                folder.append("metrics", [{"step": step, "reward_mean": 0.5}])
                while (folder.path.parent / "hold").exists() and not stop_signal.requested.is_set():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                if stop_signal.requested.is_set():
                    raise asyncio.CancelledError
                (folder.checkpoints / f"step-{step + 1}").mkdir()
        state = "done"
    finally:
        with contextlib.suppress(ProcessLookupError):  # Ctrl-C of a terminal reaches the child too
            child.kill()
        await child.wait()
        folder.write_summary({"state": state, "problem": ""})


def nothing(*_: object) -> None:
    """Stands in for checks of models and hosts."""


if __name__ == "__main__":
    fakes = {"local_stack": no_stack, "run_on": run_on}
    fakes |= dict.fromkeys(("prepare_alone", "needs_of", "needs_at_once", "check_host"), nothing)
    vars(local).update(fakes)
    sys.argv = ["volley", *sys.argv[1:]]
    main()
