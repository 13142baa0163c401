"""Reward functions that misbehave on demand; they run in a child process of the reward worker."""

import os
import signal
import time
from pathlib import Path
from typing import Any


def trouble(sample: str, row: dict[str, Any]) -> float:
    """Returns 1.0, after doing to the reward worker what ``sample`` names."""
    if sample == "kill once" and not Path(row["flag"]).exists():
        Path(row["flag"]).touch()
        os.kill(os.getppid(), signal.SIGKILL)
    if sample == "kill":
        os.kill(os.getppid(), signal.SIGKILL)
    if sample == "stop":
        os.kill(os.getppid(), signal.SIGSTOP)
    if sample == "slow":
        time.sleep(1)
    return 1.0
