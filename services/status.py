"""How a run stands, as its driver reports it: at every change and every few seconds. Its silence means death."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from services.outbox import Outbox
from services.state import HEARTBEAT_SECONDS, Observed, RunState


class Status:
    """The run's `Observed`, and the reporting of it. Owned by the driver's event loop.

    Attributes:
        observed: as last reported.
        source: asked at every report for what changes by itself: counts, workers, waits.
    """

    def __init__(self, outbox: Outbox, before: Observed) -> None:
        self._outbox = outbox
        self.source: Callable[[], Mapping[str, Any]] = dict
        driver = f"{socket.gethostname()}:{os.getpid()}"
        self.observed = Observed(
            state="starting",
            life=before.life + 1,
            step=before.step,
            checkpoint=before.checkpoint,
            checkpointed=before.checkpointed,
            driver=driver,
            started=before.started or time.time(),
        )

    def set(self, **changes: Any) -> None:
        """Report a change of fields of `Observed` at once."""
        self.observed = self.observed.model_copy(update={**self.source(), **changes, "updated": time.time()})
        self._outbox.observed(self.observed)

    def end(self, state: RunState, problem: str) -> None:
        """Report the end."""
        self.source = dict
        gone: dict[str, Any] = {"workers": (), "waiting": (), "groups": {}, "actors": 0, "reward_workers": 0}
        self.set(state=state, problem=problem, ended=time.time(), **gone)

    async def beat(self) -> None:
        """Report for ever."""
        while True:
            self.set()
            await asyncio.sleep(HEARTBEAT_SECONDS)
