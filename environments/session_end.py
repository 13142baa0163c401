"""Tells the gateway that an episode is over, so that what its program left behind cannot go on with it."""

import asyncio
import http.client
import logging
import urllib.error
import urllib.request

SECONDS = 10.0  # for an actor to answer; one that does not is replaced, and its episodes are lost
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))

log = logging.getLogger(__name__)


async def end_session(base_url: str, api_key: str) -> None:
    """End the session of an episode; a session that is not there any more is left alone."""
    headers = {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/session", method="DELETE", headers=headers)
    try:
        await asyncio.to_thread(_ask, request)
    except urllib.error.HTTPError as answer:
        if answer.code != http.client.UNAUTHORIZED:
            raise
    except (OSError, http.client.HTTPException) as problem:
        log.warning("the session of an episode could not be ended, since its actor does not answer: %s", problem)


def _ask(request: urllib.request.Request) -> None:
    with _DIRECTLY.open(request, timeout=SECONDS):
        pass
