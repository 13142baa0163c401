"""Tokens that another release wrote, or nobody: they are refused, and everybody else's work."""

import json
import logging
from typing import Any

import pytest

from services.api.auth import BOOTSTRAP, Tokens
from services.api.problems import Problem
from services.store.redis import TOKENS_KEY, Store, connect
from tests.unit.fake_redis import FakeRedis, serve
from volley.state import Limits

GOOD: dict[str, Any] = {"sha256": "0" * 64, "scope": "operate", "created": 1.0, "limits": {"runs": 3}}
ODD = ["{", "[]", "null", "7", json.dumps({**GOOD, "scope": "owner"}), json.dumps({**GOOD, "sha256": None}), "{}"]
ODD_LIMITS: list[Any] = [{"runs": -1}, {"runs": 3, "disks": 2}, [], None, "none", {"priority": "high"}]


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> FakeRedis:
    return serve(monkeypatch)


@pytest.fixture
def tokens(redis: FakeRedis) -> Tokens:
    return Tokens(connect("redis://x", retries=0), None, guarded=True)


@pytest.mark.parametrize("odd", ODD)
async def test_a_token_that_cannot_be_read_is_refused_and_may_be_deleted(
    redis: FakeRedis, tokens: Tokens, odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    redis.data[TOKENS_KEY] = {"odd": odd}
    made = await tokens.make("alice", "operate", Limits(runs=2), BOOTSTRAP)
    found = await tokens.principal(made.token)
    assert found is not None
    assert (found.name, found.limits) == ("alice", Limits(runs=2))
    assert [view.name for view in await tokens.all()] == ["alice"]
    (logged,) = [each.message for each in caplog.records if each.levelno >= logging.ERROR]
    assert "the token odd is not accepted" in logged
    with pytest.raises(Problem, match="delete it and create another"):
        await tokens.limit("odd", Limits(), BOOTSTRAP)
    await tokens.delete("odd", BOOTSTRAP)
    assert set(redis.data[TOKENS_KEY]) == {"alice"}


@pytest.mark.parametrize("limits", ODD_LIMITS)
async def test_limits_that_cannot_be_read_allow_no_run_until_they_are_set_again(
    redis: FakeRedis, tokens: Tokens, limits: Any
) -> None:
    redis.data[TOKENS_KEY] = {"odd": json.dumps({**GOOD, "limits": limits}), "good": json.dumps(GOOD)}
    store = Store("redis://x")
    assert await store.limits() == {"odd": Limits(runs=0), "good": Limits(runs=3)}
    assert {view.name: view.limits.runs for view in await tokens.all()} == {"odd": 0, "good": 3}
    assert (await tokens.limit("odd", Limits(runs=1), BOOTSTRAP)).limits == Limits(runs=1)
    assert (await store.limits())["odd"] == Limits(runs=1)
