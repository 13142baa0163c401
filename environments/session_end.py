"""Tells the gateway that an episode is over, so that what its program left behind cannot go on with it."""

import asyncio
import concurrent.futures
import http.client
import logging
import urllib.request

SECONDS = 10.0  # for an actor to answer; one that does not is replaced, and its episodes are lost
_THREADS = concurrent.futures.ThreadPoolExecutor(64, "session end")  # or the episodes of an actor that hangs queue up
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))

log = logging.getLogger(__name__)


async def end_session(base_url: str, api_key: str) -> None:
    """End the session of an episode, if it is still there. What prevents that is logged, and fails no episode."""
    headers = {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/session", method="DELETE", headers=headers)
    try:
        await asyncio.get_running_loop().run_in_executor(_THREADS, _ask, request)
    except (OSError, http.client.HTTPException) as problem:
        if getattr(problem, "code", None) != http.client.UNAUTHORIZED:  # of the group's end, which ended it too
            log.warning("the session of an episode could not be ended: %s", problem)


def _ask(request: urllib.request.Request) -> None:
    with _DIRECTLY.open(request, timeout=SECONDS):
        pass
