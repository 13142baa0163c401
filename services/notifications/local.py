"""Notifications of `volley run`, which has no service beside it."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from services.notifications.deliveries import Deliveries
from services.notifications.notices import key_problem
from services.notifications.sending import Sender
from services.notifications.watch import Watch
from services.store.folder import RunFolder
from services.store.redis import Store
from services.tasks import cancel_all
from volley.errors import HostError, JobError
from volley.webhooks import WebhookSpec

log = logging.getLogger(__name__)

PASS_SECONDS = 2.0
END_SECONDS = 20.0  # for the last notices, after the run has ended


def check_keys(webhooks: Sequence[WebhookSpec]) -> None:
    """Raise `JobError` if a webhook's signing key is missing or unusable."""
    for webhook in webhooks:
        name = webhook.secret_env
        if name is not None and (problem := key_problem(os.environ.get(name), name)):
            raise JobError(f"notify: {problem}")


@contextlib.asynccontextmanager
async def notifying(
    webhooks: Sequence[WebhookSpec], folder: RunFolder, redis_url: str, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Tell the job's webhooks what happens during the block, in which the run starts and ends.

    Whoever starts the run has chosen the hosts, so all of them are allowed. What a webhook has not accepted
    `END_SECONDS` after the end of the run is lost, and the run's events say so.

    Args:
        say: prints a line for the user.
    """
    if not webhooks:
        yield
        return

    async def report(run_id: str, event: dict[str, Any]) -> None:
        if "problem" in event:
            say(f"  {event['type']} was not delivered: {event['problem']}")
        with contextlib.suppress(OSError):  # a full disk
            folder.append("events", [{"time": time.time(), **event}])

    hosts = {webhook.host for webhook in webhooks}
    async with (
        Store(redis_url) as store,
        Sender(hosts) as sender,
        Deliveries(store, sender, report=report, only=folder.run_id) as deliveries,
    ):
        watch = Watch(store)
        loops = (_look_forever(watch, store, folder.run_id), deliveries.run())
        tasks = [asyncio.create_task(loop, name="notifications") for loop in loops]
        try:
            yield
        finally:
            await cancel_all(tasks)
            await _finish(watch, deliveries, store, folder.run_id)


async def _look_forever(watch: Watch, store: Store, run_id: str) -> None:
    while True:
        try:
            await _look(watch, store, run_id, final=False)
        except HostError as error:  # a declared point: the next look makes up for this one
            log.warning("webhooks wait: %s", error)
        await asyncio.sleep(PASS_SECONDS)


async def _look(watch: Watch, store: Store, run_id: str, *, final: bool) -> None:
    for record, _, observed in await store.read_runs([run_id]):
        await watch.look(record, observed, final=final)


async def _finish(watch: Watch, deliveries: Deliveries, store: Store, run_id: str) -> None:
    """Deliver the last notices, within bounds."""
    deadline = time.monotonic() + END_SECONDS
    try:
        await _look(watch, store, run_id, final=True)
        while await deliveries.deliver():
            if time.monotonic() > deadline:
                await deliveries.give_up()
                return
            await asyncio.sleep(PASS_SECONDS / 2)
    except HostError as error:  # a declared point: the run itself has ended, and nothing else needs Redis
        log.warning("the last notices were not delivered: %s", error)
