"""A lease in Redis: of all who want it one holds it, for as long as it is renewed."""

import secrets
import time
from typing import Any

from redis.exceptions import RedisError

from services.store import connect
from volley.errors import HostError

_TAKE = """
local holder = redis.call('get', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_GIVE_BACK = "if redis.call('get', KEYS[1]) == ARGV[1] then redis.call('del', KEYS[1]) end"


class Lease:
    """Owned by one event loop.

    Args:
        seconds: how long it holds without being renewed.
    """

    def __init__(self, url: str, name: str, seconds: float = 15.0) -> None:
        self._redis: Any = connect(url, retries=0)
        self._name, self._seconds = f"volley:lease:{name}", seconds
        self._token = secrets.token_hex(16)
        self._until = 0.0

    @property
    def held(self) -> bool:
        """Is it ours at this moment, by our own clock?"""
        return time.monotonic() < self._until

    async def take(self) -> bool:
        """Take or renew it; False while another holds it.

        Raises:
            HostError: Redis does not answer. What is held stays so until it runs out.
        """
        until = (
            time.monotonic() + self._seconds
        )  # counted from before the call: we never hold it longer than Redis says
        try:
            mine = bool(await self._redis.eval(_TAKE, 1, self._name, self._token, round(self._seconds * 1000)))
        except (RedisError, OSError) as error:
            raise HostError(f"Redis does not answer: {error}") from error
        self._until = until if mine else 0.0
        return mine

    async def close(self) -> None:
        """Give it back, if Redis answers; it runs out by itself otherwise."""
        try:
            if self.held:
                await self._redis.eval(_GIVE_BACK, 1, self._name, self._token)
        except (RedisError, OSError):
            pass  # its time runs out
        finally:
            self._until = 0.0
            await self._redis.aclose()
