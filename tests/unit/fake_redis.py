"""A stand-in for Redis that keeps the keys of the store in memory, with transactions that notice changes."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import WatchError


class FakeRedis:
    """The server, and every client of it.

    Attributes:
        data: what each key has: text, a hash, the scores of a sorted set, or the entries of a stream.
        is_away: whether a command of this name gets no answer.
        writes_left: writes that are still answered; a transaction counts as one.
        before_execute: called before the next transaction, as another client that is quicker.
        loses_answers: how many transactions from now on are applied although their answer is lost.
    """

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.is_away: Callable[[str], bool] = lambda name: False
        self.writes_left = math.inf
        self.before_execute: Callable[[], object] | None = None
        self.loses_answers = 0

    def do(self, name: str, *args: Any, **options: Any) -> Any:
        """Execute a command."""
        if self.is_away(name):
            raise RedisConnectionError("away")
        if name in ("set", "hset", "hdel"):
            self.count_write()
        return self.apply(name, *args, **options)

    def count_write(self) -> None:
        if self.writes_left <= 0:
            raise RedisConnectionError("away")
        self.writes_left -= 1

    def apply(self, name: str, *args: Any, **options: Any) -> Any:
        return getattr(self, f"_{name}")(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*args: Any, **options: Any) -> Any:
            return self.do(name, *args, **options)

        return call

    def pipeline(self, transaction: bool = True) -> "Pipeline":
        return Pipeline(self)

    def _aclose(self) -> None: ...

    def _get(self, key: str) -> Any:
        return self.data.get(key)

    def _mget(self, keys: list[str]) -> list[Any]:
        return [self.data.get(key) for key in keys]

    def _exists(self, key: str) -> int:
        return int(key in self.data)

    def _set(self, key: str, value: object, *, nx: bool = False, px: int = 0, ex: int = 0) -> bool | None:
        if nx and key in self.data:
            return None
        self.data[key] = str(value)
        return True

    def _delete(self, *keys: str) -> None:
        for key in keys:
            self.data.pop(key, None)

    def _eval(self, script: str, _count: int, key: str, owner: str, *_more: object) -> int:
        return int(self.data.get(key) == owner)

    def _hgetall(self, key: str) -> dict[str, str]:
        return dict(self.data.get(key, {}))

    def _hget(self, key: str, name: str) -> str | None:
        found: str | None = self.data.get(key, {}).get(name)
        return found

    def _hset(self, key: str, name: str, value: str) -> None:
        self.data.setdefault(key, {})[name] = value

    def _hdel(self, key: str, *names: str) -> None:
        for name in names:
            self.data.get(key, {}).pop(name, None)

    def _zadd(self, key: str, scores: dict[str, float]) -> None:
        self.data.setdefault(key, {}).update(scores)

    def _zrem(self, key: str, name: str) -> None:
        self.data.get(key, {}).pop(name, None)

    def _zrevrange(self, key: str, _first: int, _last: int) -> list[str]:
        scores = self.data.get(key, {})
        return sorted(scores, key=lambda name: scores[name], reverse=True)

    def _xadd(self, key: str, fields: dict[str, str], **_options: object) -> None:
        self.data.setdefault(key, []).append(fields)

    def _execute_command(self, name: str, key: str, *rest: Any) -> None:
        if name == "XADD":
            return self._xadd(key, {"json": rest[-1]})
        self._set(key, rest[0])
        return None


def serve(monkeypatch: pytest.MonkeyPatch) -> FakeRedis:
    """Return a server whose clients are all that are made from now on."""
    server = FakeRedis()
    monkeypatch.setattr("redis.asyncio.from_url", lambda *_args, **_options: server)
    return server


class Pipeline:
    """Commands that are applied together, if no watched key has changed."""

    def __init__(self, server: FakeRedis) -> None:
        self._server = server
        self._watched: dict[str, Any] = {}
        self._direct = False
        self._commands: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    async def __aenter__(self) -> "Pipeline":
        return self

    async def __aexit__(self, *_error: object) -> None: ...

    async def watch(self, *keys: str) -> None:
        self._watched = {key: copy.deepcopy(self._server.do("get", key)) for key in keys}
        self._direct = True

    def multi(self) -> None:
        self._direct = False

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if self._direct:
                return getattr(self._server, name)(*args, **options)
            self._commands.append((name, args, options))
            return self

        return call

    async def execute(self) -> None:
        server, commands, watched = self._server, self._commands, self._watched
        self._commands, self._watched = [], {}
        quicker, server.before_execute = server.before_execute, None
        if quicker is not None:
            quicker()
        if any(server.data.get(key) != value for key, value in watched.items()):
            raise WatchError
        server.count_write()
        for name, args, options in commands:
            server.apply(name, *args, **options)
        if server.loses_answers:
            server.loses_answers -= 1
            raise RedisConnectionError("the answer is lost")
