"""Small parts of the API: settings, cursors, positions of live views, nodes and the processes on them."""

import contextlib
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.api.auth import Tokens
from services.api.cluster import grows as adds_nodes
from services.api.cluster import holders, may_grow, memory_of, node_view
from services.api.gate import Gate
from services.api.index import Filter, RunCard, cursor_of, place_of
from services.api.live import BACKLOG, Message, Subscription, entries_event, only_new, position_text, positions_of
from services.api.problems import Problem
from services.api.settings import ApiSettings
from volley.state import Observed, RunRecord, objective_text


@pytest.mark.parametrize(
    ("host", "token", "loopback", "guarded"),
    [
        ("127.0.0.1", None, True, False),
        ("127.8.8.8", None, True, False),
        ("::1", None, True, False),
        ("localhost", None, True, False),
        ("localhost", "a-token-of-some-length", True, True),
        ("0.0.0.0", None, False, True),
        ("10.0.0.1", None, False, True),
        ("::", None, False, True),
        ("example.org", None, False, True),
    ],
)
def test_which_servers_need_a_token(host: str, token: str | None, loopback: bool, guarded: bool) -> None:
    settings = ApiSettings.model_validate({"redis_url": "x", "host": host, "admin_token": token})
    assert (settings.loopback, settings.guarded) == (loopback, guarded)


def test_a_short_token_is_rejected_and_not_shown() -> None:
    with pytest.raises(ValidationError, match="fewer than 16"):
        ApiSettings.model_validate({"redis_url": "x", "admin_token": "short"})
    settings = ApiSettings.model_validate({"redis_url": "x", "admin_token": "a-token-of-some-length"})
    assert "a-token" not in repr(settings) + settings.model_dump_json()


@given(st.floats(0, 1e12), st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True))
def test_a_cursor_survives_encoding(created: float, name: str) -> None:
    assert place_of(cursor_of((created, name))) == (created, name)


@given(st.text(max_size=50))
def test_arbitrary_cursors_are_rejected_or_decoded(text: str) -> None:
    with contextlib.suppress(Problem):
        assert isinstance(place_of(text)[0], float)


def test_positions_survive_encoding() -> None:
    positions = {"metrics": "17-0", "events": "0-0", "evaluations": "18-3"}
    assert positions_of(position_text(positions)) == positions


def entries(*milliseconds: int) -> list[tuple[str, dict[str, Any]]]:
    return [(f"{each}-0", {"step": each}) for each in milliseconds]


def test_a_client_with_a_later_position_gets_only_what_it_has_not_seen() -> None:
    new = entries(5, 6, 7)
    after = {"metrics": "7-0", "events": "3-0", "evaluations": "0-0"}
    message = Message(entries_event("metrics", new, after), after, "metrics", new)
    level = {"metrics": "4-0", "events": "3-0", "evaluations": "0-0"}
    assert only_new(message, level) is message.data, "all clients share the same bytes"
    assert level == after
    ahead = {"metrics": "6-0", "events": "9-0", "evaluations": "0-0"}
    sent = only_new(message, ahead)
    assert sent is not None
    assert b'{"rows":[{"step":7}]}' in sent
    assert b"id: 7-0.9-0.0-0\n" in sent, "the event id is not older than what the client has seen"
    beyond = {"metrics": "10-0", "events": "9-0", "evaluations": "0-0"}
    assert only_new(message, beyond) is None


async def test_a_client_that_does_not_keep_up_is_disconnected() -> None:
    own = Subscription()
    for _ in range(BACKLOG):
        own.put(Message(b"x"))
    assert await own.get() == Message(b"x")
    own.put(Message(b"x"))
    own.put(Message(b"one too many"))
    assert await own.get() is None


async def test_queued_messages_are_delivered_before_the_end() -> None:
    own = Subscription()
    own.put(Message(b"last"))
    own.close()
    own.put(Message(b"later"))
    assert await own.get() == Message(b"last")
    assert await own.get() is None


def test_filters_match_name_kind_and_tags() -> None:
    card = RunCard("r", "Sevens-1", "rl", 1.0, {"a": "1"}, 10, {})
    for wanted, takes in (
        (Filter(), True),
        (Filter(name="sevens"), True),
        (Filter(name="eights"), False),
        (Filter(kind="sft"), False),
        (Filter(tags=(("a", "1"),)), True),
        (Filter(tags=(("a", "1"), ("b", "2"))), False),
    ):
        assert wanted.matches(card) is takes


def test_objectives_are_described_in_words() -> None:
    assert objective_text({"kind": "max_at_k", "k": 8}) == "max_at_k k=8"
    assert objective_text({"kind": "max_at_k", "k": 8, "weights": None}) == "max_at_k k=8"
    assert objective_text({"kind": "max_at_k", "k": None, "weights": {"1": 0.5, "8": 0.5}}) == "max_at_k 1:0.5 8:0.5"
    assert objective_text({"kind": "max_at_k", "weights": "harmonic", "order": 8}) == "max_at_k harmonic 8"
    assert objective_text({"kind": "mean"}) == "mean"
    assert objective_text({}) == ""


def test_a_node_has_its_resources_and_use() -> None:
    node = {
        "node_id": "n1",
        "node_ip": "10.0.0.1",
        "state": "ALIVE",
        "resources_total": {"CPU": 4.0, "object_store_memory": 100.0, "node:10.0.0.1": 1.0},
    }
    view = node_view(node, {"CPU": [1.5, 4.0], "objectStoreMemory": [25.0, 100.0]})
    assert view.resources == {"CPU": 4.0, "object_store_memory": 100.0}
    assert view.available == {"CPU": 2.5, "object_store_memory": 75.0}
    assert node_view({**node, "state": "DEAD"}, None).alive is False


def test_memory_is_known_once_every_live_node_has_reported_it() -> None:
    live, dead = {"raylet": {"state": "ALIVE"}, "mem": [8, 3, 60.0, 5]}, {"raylet": {"state": "DEAD"}}
    assert memory_of([live, dead, live]) == [8, 8]
    assert memory_of([live, {"raylet": {"state": "ALIVE"}}]) == []


@pytest.mark.parametrize(
    ("types", "grows"),
    [
        ({"node" + "0F" * 28: 1}, False),
        ({"node_" + "9e" * 28: 1, "9e" * 28: 1}, False),
        ({"headgroup": 1, "node" + "0f" * 28: 1}, True),
        ({}, True),  # it may have an autoscaler that has not reported yet
    ],
)
def test_a_cluster_that_may_add_nodes_is_recognised(types: dict[str, int], grows: bool) -> None:
    status = {"clusterStatus": {"autoscalerReport": {"activeNodes": types}}}
    assert may_grow(status) is grows
    assert adds_nodes(status) is (grows and bool(types)), "the queue does not let everything in meanwhile"


def test_a_cluster_without_a_report_may_add_nodes() -> None:
    assert may_grow({"clusterStatus": None})
    assert not adds_nodes({"clusterStatus": None})


def test_resources_are_assigned_to_runs() -> None:
    job = {
        "actors": {"cpus": 2, "gpus": 1},
        "reward_workers": {"cpus": 0.5},
        "environment_workers": {"cpus": 0.25},
        "learner": {"cpus_per_rank": 4, "gpus_per_rank": 1},
    }
    record = RunRecord(id="r", name="r", kind="rl", job=job, created=0.0, folder="/r")
    live = Observed(state="running", actors=3, reward_workers=2, environment_workers=4, learner_ranks=2)
    assert [(h.role, h.count, h.cpus, h.gpus) for h in holders([(record, live)])] == [
        ("actor", 3, 6.0, 3.0),
        ("reward_worker", 2, 1.0, 0.0),
        ("environment_worker", 4, 1.0, 0.0),
        ("learner_rank", 2, 8.0, 2.0),
    ]
    assert holders([(record, live.model_copy(update={"state": "done"}))]) == []


async def ignored(*_: object) -> None:
    """Stands in for the application, which a check of the host does not reach."""


@pytest.mark.parametrize(("host", "known"), [("10.0.0.7", True), ("volley.example:80", True), ("evil.example", False)])
def test_a_server_that_was_told_its_names_is_also_known_by_its_address(host: str, known: bool) -> None:
    settings = ApiSettings(redis_url="redis://x", host="10.0.0.7", hosts=("Volley.example",))
    gate = Gate(ignored, settings, cast("Tokens", None), lambda *_: None)
    with contextlib.nullcontext() if known else pytest.raises(Problem, match="--known-as HOST"):
        gate._check_host({b"host": host.encode()})
