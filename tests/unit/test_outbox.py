"""A driver's writes while Redis comes and goes, with a Redis in memory."""

import json

import pytest

from services.store import outbox as module
from services.store.outbox import Outbox
from services.store.redis import run_key
from tests.unit.fake_redis import FakeRedis, serve
from tests.unit.fake_roles import until


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> FakeRedis:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    return serve(monkeypatch)


async def test_a_write_whose_answer_is_lost_is_not_repeated_though_redis_is_still_away_for_a_while(
    redis: FakeRedis,
) -> None:
    asked = 0

    def away(name: str) -> bool:
        nonlocal asked
        asked += name == "get"
        return name == "get" and asked in (2, 3)  # the first is that of a new outbox

    redis.is_away = away
    redis.loses_answers = 1
    async with Outbox("", "r") as outbox:
        outbox.step({"step": 0}, {})
        await until(lambda: outbox.away_since is not None)
        outbox.step({"step": 1}, {})
    assert [json.loads(entry["json"])["step"] for entry in redis.data[run_key("r", "metrics")]] == [0, 1]
    assert (asked, outbox.away_since) == (4, None)
