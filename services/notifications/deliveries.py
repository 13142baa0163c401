"""Delivers notices: each until its webhook has accepted it, or for about half an hour."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from services.notifications.notices import Notice
from services.notifications.sending import NotDelivered, Sender
from services.store.redis import Store
from volley.base import replaced
from volley.errors import HostError

log = logging.getLogger(__name__)

PASS_SECONDS = 1.0
LEASE_SECONDS = 60.0
AT_ONCE = 16  # notices sent at the same time, so that a pass ends within the lease
ATTEMPTS = 12  # 37 minutes, from the first to the last
FIRST_DELAY, LONGEST_DELAY = 2.0, 600.0

Report = Callable[[str, dict[str, Any]], Awaitable[None]]  # a run and one event of it


class Deliveries:
    """The loop that delivers the notices of one Redis. Use as an async context manager.

    A lease ensures that one process delivers. If it is lost in the middle of a pass, a notice may be sent twice.

    Args:
        report: stores an event of a run; `Store.add_event` by default.
        only: deliver notices of this run only.
    """

    def __init__(self, store: Store, sender: Sender, *, report: Report | None = None, only: str | None = None) -> None:
        self._store, self._sender, self._only = store, sender, only
        self._report = report or store.add_event
        self._lease = f"deliveries:{only}" if only else "deliveries"
        self._name = secrets.token_hex(8)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(HostError):  # the lease expires anyway
            await self._store.release(self._lease, self._name)

    async def run(self) -> None:
        """Deliver forever; an outage of Redis is waited out."""
        while True:
            try:
                if await self._store.lease(self._lease, self._name, LEASE_SECONDS):
                    await self.deliver()
            except HostError as error:  # a declared point: try again until it answers
                log.warning("webhooks wait: %s", error)
            await asyncio.sleep(PASS_SECONDS)

    async def deliver(self) -> int:
        """Try the notices that are due, the oldest first; return how many of the run's, or of all, are left.

        Raises:
            HostError: Redis does not answer.
        """
        waiting = await self._waiting()
        due = sorted((notice for notice in waiting if notice.due <= time.time()), key=lambda notice: notice.due)
        ended = await asyncio.gather(*(self._try(notice) for notice in due[:AT_ONCE]))
        return len(waiting) - sum(ended)

    async def give_up(self) -> None:
        """Report what is left of the run's notices as not delivered, because nobody will try again."""
        for notice in await self._waiting():
            await self._end(notice, "the run's process ended before the webhook accepted it")

    async def _waiting(self) -> list[Notice]:
        found = []
        for notice_id, text in (await self._store.notices()).items():
            try:
                found.append(Notice.model_validate_json(text))
            except ValidationError:  # written by another release
                log.warning("notice %s cannot be read and is dropped", notice_id)
                await self._store.delete_notice(notice_id)
        return [notice for notice in found if self._only in (None, notice.run)]

    async def _try(self, notice: Notice) -> bool:
        """Send a notice; return whether that was the last attempt."""
        try:
            await self._sender.send(notice)
        except NotDelivered as error:
            failed = replaced(notice, attempts=notice.attempts + 1, due=time.time() + delay(notice.attempts))
            if failed.attempts >= ATTEMPTS:
                await self._end(failed, str(error))
                return True
            log.info("run %s: %s not delivered, attempt %d: %s", notice.run, notice.type, failed.attempts, error)
            await self._store.put_notice(failed.id, failed.model_dump_json())
            return False
        await self._end(notice, "")
        return True

    async def _end(self, notice: Notice, problem: str) -> None:
        """Remove a notice that was accepted, or that will not be, and say so in the run's events."""
        about = {"notice": notice.id, "type": notice.type}
        if problem:
            log.warning("run %s: %s not delivered: %s", notice.run, notice.type, problem)
            await self._report(notice.run, {"kind": "notice_lost", **about, "problem": problem})
        else:
            await self._report(notice.run, {"kind": "notice_delivered", **about})
        await self._store.delete_notice(notice.id)


def delay(attempts: int) -> float:
    """Seconds until the next attempt, after an attempt that followed ``attempts`` failed ones."""
    return float(min(LONGEST_DELAY, FIRST_DELAY * 2.0**attempts))
