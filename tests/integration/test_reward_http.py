# ruff: noqa: E501 - request bodies on one line
"""The HTTP reward server as its own process: contract, hostile requests, slow clients, a full queue, both clients."""

import asyncio
import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.reward_client.trl_reward import CodeReward
from reward_servers.client import (
    AsyncRewardClient,
    CodeItem,
    CountdownItem,
    ExactItem,
    Item,
    Limits,
    MathItem,
    RequestRefused,
    RewardClient,
)
from reward_servers.http_body import BadBody, parse_json
from reward_servers.sandbox import cgroups
from reward_servers.scorers.cases import StdinTest
from volley.errors import DeadlineExceeded
from volley.records import VerdictStatus

pytestmark = pytest.mark.integration

START = "import sys; from pathlib import Path; from reward_servers.http import serve; serve('127.0.0.1', int(sys.argv[1]), 1, Path(sys.argv[2]))"
ADD = {"kind": "code", "extract": "raw", "tests": [{"stdin": "3 4\n", "expected": "7"}]}
OWN = {"Authorization": "Bearer secret"}
JSON = {"Content-Type": "application/json"}
RIGHT = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("secret\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", START, str(port), str(token)], cwd=Path(__file__).parents[2])
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                break
        except httpx.TransportError:
            time.sleep(0.1)
    yield url
    process.terminate()
    process.wait(30)


def post(url: str, content: bytes | str, token: str = "secret") -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}", **JSON}
    return httpx.post(f"{url}/v1/score", content=content, headers=headers, timeout=60)


def ask(url: str, scorer: dict[str, Any], *responses: str) -> Any:
    answer = post(url, json.dumps({"items": [{"id": "a", "scorer": scorer, "responses": responses}]}))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_answers_follow_the_contract(server: str) -> None:
    answer = ask(server, ADD, RIGHT, "print(8)", "while True: pass".replace("pass", "x = 1"), RIGHT)
    verdicts = answer["items"][0]["verdicts"]
    assert [v["status"] for v in verdicts] == ["passed", "wrong_answer", "timeout", "passed"]
    assert [v["reward"] for v in verdicts] == [1.0, -1.0, -1.0, 1.0]
    assert verdicts[1]["failing_test"] == 0
    assert {"cpu_ms", "wall_ms", "peak_mb", "stdout", "stderr", "unsafe"} <= verdicts[0].keys()
    sandbox = answer["sandbox"]
    assert sandbox["tier"] in ("A", "B")
    assert sandbox["probes_passed"] == sandbox["probes_total"] > 25
    assert "seccomp" in sandbox["layers"]


def test_limits_in_the_request_apply(server: str) -> None:
    scorer = {**ADD, "limits": {"cpu_s": 0.3, "memory_mb": 64}}
    verdicts = ask(server, scorer, "while 1: 1", "x = bytearray(b'x') * (900 << 20)")["items"][0]["verdicts"]
    assert [v["status"] for v in verdicts] == ["timeout", "memory_limit"]
    assert verdicts[0]["cpu_ms"] < 2500


def test_the_other_scorers_are_served(server: str) -> None:
    assert (
        ask(server, {"kind": "math", "answer": "x^2"}, "\\boxed{x\\cdot x}")["items"][0]["verdicts"][0]["reward"] == 1
    )
    assert ask(server, {"kind": "exact", "answer": "a"}, " a", "b")["items"][0]["verdicts"][1]["reward"] == 0
    countdown = {"kind": "countdown", "numbers": [1, 2], "target": 3}
    assert ask(server, countdown, "1+2")["items"][0]["verdicts"][0]["answer"] == "1+2"


def test_equal_requests_are_answered_from_the_cache(server: str) -> None:
    ask(server, ADD, RIGHT)
    before = httpx.get(f"{server}/metrics", headers=OWN).text
    ask(server, ADD, RIGHT)
    after = httpx.get(f"{server}/metrics", headers=OWN).text

    def cached(text: str) -> int:
        return next(int(line.split()[-1]) for line in text.splitlines() if 'status="cached"' in line)

    assert cached(after) == cached(before) + 1
    assert "volley_reward_ready 1" in after


def test_health_and_openapi(server: str) -> None:
    assert httpx.get(f"{server}/healthz").json() == {"status": "ok"}
    paths = httpx.get(f"{server}/openapi.json").json()["paths"]
    assert "requestBody" in paths["/v1/score"]["post"]


ITEM = {"id": "a", "scorer": ADD, "responses": ["x"]}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000 + b"]" * 100_000, 400),
        (b'{"items": ' + b'{"a":' * 50_000, 400),
        (b'{"items": [], "items": []}', 400),
        (b'{"items": NaN}', 400),
        (b'{"items": [1e999]}', 422),
        (b"null", 422),
        (json.dumps({"items": []}).encode(), 422),
        (json.dumps({"items": [ITEM] * 257}).encode(), 422),
        (json.dumps({"items": [ITEM], "extra": 1}).encode(), 422),
        (json.dumps({"items": [{**ITEM, "responses": ["x"] * 257}]}).encode(), 422),
        (json.dumps({"items": [{**ITEM, "scorer": {"kind": "python", "target": "os:system"}}]}).encode(), 422),
        (json.dumps({"items": [{**ITEM, "scorer": {"kind": "http", "url": "http://169.254.169.254/"}}]}).encode(), 422),
        (json.dumps({"items": [{**ITEM, "scorer": {**ADD, "limits": {"memory_mb": 10**9}}}]}).encode(), 422),
        (json.dumps({"items": [{**ITEM, "responses": ["x" * 1_000_001]}]}).encode(), 422),
    ],
    ids=range(17),
)
def test_hostile_bodies_are_rejected(server: str, body: bytes, status: int) -> None:
    answer = post(server, body)
    assert answer.status_code == status, answer.text
    assert "error" in answer.json()


def test_a_huge_body_is_rejected_before_it_arrives(server: str) -> None:
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as raw:
        head = (
            "POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Authorization: Bearer secret\r\nContent-Length: 1000000000\r\n\r\n"
        )
        raw.sendall(head.encode())
        assert b" 413 " in raw.recv(100)


def test_a_client_that_is_still_sending_gets_the_reason(server: str) -> None:
    body = b" " * (50 << 20)
    assert post(server, body).status_code == 413

    async def at_once() -> list[int]:
        async with httpx.AsyncClient(headers=OWN | JSON, timeout=60) as client:
            return [(await client.post(f"{server}/v1/score", content=body)).status_code for _ in range(3)]

    assert asyncio.run(at_once()) == [413] * 3


def test_a_token_is_required(server: str) -> None:
    assert post(server, "{}", token="wrong").status_code == 401
    for none in ({}, {"Authorization": "Basic secret"}, {"Authorization": "secret"}, {"Authorization": "Bearer"}):
        answer = httpx.post(f"{server}/v1/score", content="{}", headers=none | JSON)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert httpx.get(f"{server}/metrics", headers=none).status_code == 401
    for scheme in ("bearer", "BEARER"):
        assert httpx.get(f"{server}/metrics", headers={"Authorization": f"{scheme} secret"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:1"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Origin": "http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Host": "[::1].evil.example"}, 421),
        ({"Host": "[::1"}, 421),
        ({"Host": "127.0.0.1:80.evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": ""}, 415),
    ],
    ids=str,
)
def test_a_web_page_cannot_have_programs_run(server: str, headers: dict[str, str], status: int) -> None:
    body = json.dumps({"items": [{"id": "a", "scorer": ADD, "responses": [RIGHT]}]})
    filled = {name: value.format(port=server.rpartition(":")[2]) for name, value in headers.items()}
    answer = httpx.post(f"{server}/v1/score", content=body, headers={**OWN, **JSON, **filled}, timeout=60)
    assert answer.status_code == status, answer.text
    assert status == 200 or answer.json()["error"]


def test_orchestrators_may_ask_by_any_name(server: str) -> None:
    for path in ("healthz", "readyz"):
        assert httpx.get(f"{server}/{path}", headers={"Host": "pod-17"}).status_code == 200
    assert httpx.get(f"{server}/metrics", headers={"Host": "pod-17", **OWN}).status_code == 421


def test_unusual_code_gets_a_verdict_instead_of_an_error(server: str) -> None:
    statuses = [v["status"] for v in ask(server, ADD, "print(1)\0", "", "x" * 300_000)["items"][0]["verdicts"]]
    assert statuses == ["compile_error", "no_answer", "compile_error"]


def test_random_bodies_never_break_the_server(server: str) -> None:
    rng = random.Random(1)
    valid = json.dumps({"items": [ITEM]}).encode()
    for _ in range(150):
        body = bytearray(valid)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(body))
            body[at : at + rng.randint(0, 3)] = bytes(rng.randrange(256) for _ in range(rng.randint(0, 3)))
        assert post(server, bytes(body)).status_code in (200, 400, 422)
    assert httpx.get(f"{server}/readyz").status_code == 200


def test_slow_headers_are_disconnected(server: str) -> None:
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as raw:
        raw.sendall(b"POST /v1/score HTTP/1.1\r\nHost:")
        began = time.monotonic()
        assert raw.recv(100) == b""
        assert 5 < time.monotonic() - began < 15


def test_slow_headers_of_a_later_request_are_disconnected(server: str) -> None:
    host, port = server.removeprefix("http://").split(":")
    connections = [socket.create_connection((host, int(port)), 5) for _ in range(40)]
    for each in connections:
        each.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in each.recv(1000)
        each.setblocking(False)
    began = time.monotonic()
    held = set(connections)
    for byte in b"GET /healthz HTTP/1.1\r\nX-Slow: ":
        held -= {each for each in held if not takes(each, bytes([byte]))}
        if not held:
            break
        time.sleep(1)
    for each in connections:
        each.close()
    assert not held
    assert 9 < time.monotonic() - began < 15
    assert httpx.get(f"{server}/healthz").status_code == 200


UNFINISHED = (
    b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer secret\r\nContent-Length: 100\r\n\r\n{"
)


@pytest.mark.parametrize("sent", [b"", UNFINISHED], ids=["silent", "unfinished body"])
def test_connections_without_a_whole_request_do_not_keep_others_out(server: str, sent: bytes) -> None:
    host, port = server.removeprefix("http://").split(":")
    with contextlib.ExitStack() as silent:
        for _ in range(300):
            silent.enter_context(socket.create_connection((host, int(port)), 5)).sendall(sent)
        time.sleep(0.5)
        for _ in range(5):
            assert httpx.get(f"{server}/healthz").status_code == 200
            assert ask(server, ADD, RIGHT)["items"][0]["verdicts"][0]["status"] == "passed"


def takes(connection: socket.socket, byte: bytes) -> bool:
    try:
        if connection.recv(1000) == b"":
            return False
    except BlockingIOError:
        pass
    except OSError:
        return False
    try:
        return connection.send(byte) == 1
    except OSError:
        return False


def test_a_full_queue_answers_when_to_retry(server: str) -> None:
    items = [
        {"id": str(i), "scorer": ADD, "responses": [f"import time\ntime.sleep(0.05)\nprint({i})"]} for i in range(60)
    ]
    body = json.dumps({"items": items})
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: post(server, body), range(6)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert all(answer.headers["retry-after"].isdecimal() for answer in refused)
    assert any(answer.status_code == 200 for answer in answers)


def items() -> list[Item]:
    code = CodeItem(kind="code", tests=[StdinTest(stdin="3 4", expected="7")], extract="raw", limits=Limits(cpu_s=1))
    return [
        Item(id="code", scorer=code, responses=[RIGHT, "print(1)"]),
        Item(id="math", scorer=MathItem(kind="math", answer="1/2"), responses=["\\boxed{0.5}"]),
        Item(id="countdown", scorer=CountdownItem(kind="countdown", numbers=[2, 3], target=6), responses=["2*3"]),
        Item(id="exact", scorer=ExactItem(kind="exact", answer="x"), responses=["x", "y"]),
    ]


def test_both_clients_score(server: str) -> None:
    with RewardClient(server, "secret", timeout_s=60) as client:
        answer = client.score(items())
    assert [item.id for item in answer.items] == ["code", "math", "countdown", "exact"]
    assert [[v.reward for v in item.verdicts] for item in answer.items] == [[1, -1], [1], [1], [1, 0]]
    assert answer.items[0].verdicts[0].status is VerdictStatus.PASSED

    async def concurrently() -> list[Any]:
        async with AsyncRewardClient(server, "secret", timeout_s=60) as client:
            return list(await asyncio.gather(*(client.score(items()) for _ in range(4))))

    assert all(other.items == answer.items for other in asyncio.run(concurrently()))


def test_the_example_is_a_trl_reward_function(server: str) -> None:
    reward = CodeReward(server, "secret")
    tests = [{"stdin": "3 4\n", "expected": "7"}]
    talk = [{"role": "assistant", "content": f"```python\n{RIGHT}\n```"}]
    assert reward(["a", "b"], [talk, "no program"], tests=[tests, tests], other=[1, 2]) == [1.0, -1.0]
    reward.close()


def test_the_client_raises_the_servers_error(server: str) -> None:
    with RewardClient(server, "wrong") as client, pytest.raises(RequestRefused, match="401"):
        client.score(items())


def test_the_client_retries_a_limited_time() -> None:
    busy = httpx.MockTransport(lambda _: httpx.Response(429, headers={"Retry-After": "0"}))
    with RewardClient("http://x", timeout_s=0.5, transport=busy) as client, pytest.raises(DeadlineExceeded):
        client.score(items())


@pytest.mark.parametrize("text", ['{"a": "[[[["}', '{"a": "\\"[[["}', '{"a\\\\": [1]}', "[[1], [2]]"])
def test_brackets_in_strings_do_not_count(text: str) -> None:
    assert parse_json(text.encode()) == json.loads(text)
    with pytest.raises(BadBody, match="deeper"):
        parse_json(b'["\\\\", ' + b"[" * 40 + b"]" * 41)


def test_no_process_is_left_of_a_killed_server(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", START, str(port), str(token)], cwd=Path(__file__).parents[2])
    for _ in range(300):
        try:
            httpx.get(f"http://127.0.0.1:{port}/readyz")
            break
        except httpx.TransportError:
            time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    assert pids
    process.kill()
    process.wait()
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            break
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # noqa: PTH110


def groups_of(pid: int) -> list[Path]:
    return list(cgroups.MOUNT.rglob(f"{cgroups.PREFIX}{pid}-*"))


def test_a_server_that_is_shutting_down_answers_when_to_retry(tmp_path: Path) -> None:
    token, log = tmp_path / "token", tmp_path / "log"
    token.write_text("secret")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{(port := probe.getsockname()[1])}"
    with log.open("wb") as errors:
        command = [sys.executable, "-c", START, str(port), str(token)]
        process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=errors)
    try:
        for _ in range(300):
            try:
                httpx.get(f"{url}/readyz")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        naps = [f"import time\ntime.sleep(60)\nprint({i})" for i in range(64)]
        patient = {**ADD, "limits": {"cpu_s": 30}}
        items = [{"id": str(i), "scorer": patient, "responses": [nap]} for i, nap in enumerate(naps)]
        if httpx.get(f"{url}/readyz").json()["sandbox"]["tier"] == "A":
            assert groups_of(process.pid)
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(post, url, json.dumps({"items": items}))
            time.sleep(1)
            assert not under_way.done()
            process.terminate()
            time.sleep(0.5)
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url}/healthz")
            answer = under_way.result(30)
        assert answer.status_code == 503
        assert answer.headers["retry-after"].isdecimal()
        assert process.wait(30) == -signal.SIGTERM
        assert log.read_text() == ""
        assert groups_of(process.pid) == [], "not even in the middle of a test"
    finally:
        process.kill()
        process.wait()


def test_work_of_a_disconnected_client_frees_slots_and_queue(server: str) -> None:
    loops = [f"while True:\n    pass  # {i}" for i in range(64)]
    body = json.dumps({"items": [{"id": "loops", "scorer": ADD, "responses": loops}] * 2}).encode()
    head = (
        "POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer secret\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as client:
        client.sendall(head.encode() + body)
        time.sleep(1)
    began = time.monotonic()
    honest = {"items": [{"id": "a", "scorer": ADD, "responses": [RIGHT]}]}
    assert post(server, json.dumps(honest)).json()["items"][0]["verdicts"][0]["status"] == "passed"
    assert time.monotonic() - began < 50, "a slot ends with the response at hand, not with all 64"
    assert httpx.get(f"{server}/readyz").json()["waiting"] == 0


@pytest.mark.parametrize(
    "tests",
    [
        [{"stdin": "1", "expected": "1"}, {"function": "f", "args": [], "expected": 1}],
        [{"asserts": "assert ("}],
        [{"asserts": "x = 1"}],
    ],
)
def test_tests_that_cannot_be_run_are_a_client_error(server: str, tests: list[dict[str, object]]) -> None:
    item = {"id": "a", "scorer": {"kind": "code", "tests": tests}, "responses": ["print(1)"]}
    answer = post(server, json.dumps({"items": [item]}))
    assert answer.status_code == 422
    assert "test" in answer.json()["error"]


def test_the_command_prints_its_address_and_ctrl_c_exits_with_130() -> None:
    command = [str(Path(sys.executable).parent / "volley"), "reward-server", "--port", "0", "--slots", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    attended = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background shell ignores Ctrl-C
    with subprocess.Popen(command, preexec_fn=attended, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+); scores at POST /v1/score\n", line)
        assert found is not None, line
        for _ in range(100):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{found[1]}/healthz").status_code == 200:
                    break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
