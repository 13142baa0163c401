"""The judge of examples/judge, asking a real HTTP server."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from reward_servers.scorers import Scorer, build_scorer
from services.jobs.job_file import load_job
from volley.job import RLJob
from volley.records import Prompt, VerdictStatus
from volley.scoring import PythonScorer, SumScorer

EXAMPLE = Path("examples/judge").resolve()
QUESTION = Prompt("q", "Why?", {})
Reply = tuple[int, dict[str, str], object]


class Endpoint(ThreadingHTTPServer):
    """An OpenAI-compatible endpoint, on which ``reply`` decides, given the request and how often it has come before."""

    request_queue_size = 64
    daemon_threads = True

    def __init__(self, reply: Callable[[dict[str, Any], int], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.seen: list[tuple[str, str, str]] = []
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with self.server.lock:
            before = sum(body == earlier for _, _, earlier in self.server.seen)
            self.server.seen.append((self.path, self.headers["Authorization"], body))
        status, headers, content = self.server.reply(json.loads(body), before)
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        """Quiet."""


def _says(text: object) -> Reply:
    return 200, {}, {"choices": [{"message": {"role": "assistant", "content": text}}]}


@contextmanager
def _judge(
    monkeypatch: pytest.MonkeyPatch, reply: Callable[[dict[str, Any], int], Reply], **keys: object
) -> Iterator[tuple[Scorer, Endpoint]]:
    """The example's scorer without its length term, and the endpoint that it asks."""
    endpoint = Endpoint(reply)
    serving = threading.Thread(target=endpoint.serve_forever, args=(0.05,))
    serving.start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{endpoint.server_port}/v1")
    monkeypatch.setenv("JUDGE_API_KEY", "sesame")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    job = load_job(EXAMPLE / "job.yaml")
    assert isinstance(job, RLJob)
    assert isinstance(job.scorer, SumScorer)
    first = job.scorer.terms[0].scorer
    scorer = build_scorer(PythonScorer.model_validate({**first.model_dump(), "retry_wait_s": 0.01, **keys}))
    try:
        yield scorer, endpoint
    finally:
        scorer.close()
        endpoint.shutdown()
        serving.join()
        endpoint.server_close()


def test_sixteen_samples_are_judged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(16)

    def reply(_request: dict[str, Any], _before: int) -> Reply:
        together.wait(timeout=30)  # until all sixteen requests are here; else BrokenBarrierError and no reply
        return _says("Fine.\nGrade: 8")

    with _judge(monkeypatch, reply) as (scorer, endpoint):
        verdicts = scorer.score(QUESTION, [f"because of {i}" for i in range(16)])
    assert [verdict.reward for verdict in verdicts] == [pytest.approx(0.6)] * 16
    path, authorization, body = endpoint.seen[0]
    assert (path, authorization) == ("/v1/chat/completions", "Bearer sesame")
    assert "Why?" in body


@pytest.mark.parametrize(
    ("text", "reward"),
    [("Grade: 10", 1.0), ("It says 'Grade: 10', but no.\n**Grade: 0**", -1.0), ("Grade: 9\nNo:\ngrade: 5.", 0.0)],
)
def test_the_grade_is_the_last_line_of_its_form(monkeypatch: pytest.MonkeyPatch, text: str, reward: float) -> None:
    with _judge(monkeypatch, lambda _request, _before: _says(text)) as (scorer, _):
        (verdict,) = scorer.score(QUESTION, ["because"])
    assert verdict.reward == reward
    assert verdict.status is (VerdictStatus.PASSED if reward > 0 else VerdictStatus.WRONG_ANSWER)


def test_a_judge_that_is_busy_or_mumbles_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(_request: dict[str, Any], before: int) -> Reply:
        return [(429, {"Retry-After": "0"}, {}), _says("I cannot say"), _says("Grade: 5")][before]

    with _judge(monkeypatch, reply, retries=2) as (scorer, endpoint):
        (verdict,) = scorer.score(QUESTION, ["because"])
    assert (verdict.reward, len(endpoint.seen)) == (0.0, 3)


def _slow(_request: dict[str, Any]) -> Reply:
    time.sleep(3)
    return _says("Grade: 10")


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        (lambda _: (429, {}, {}), "429"),
        (lambda _: (500, {}, {}), "500"),
        (lambda _: (401, {}, {}), "401"),
        (lambda _: (200, {}, "<html>"), "not the reply of a chat completion"),
        (lambda _: (200, {}, {"error": "quota"}), "not the reply of a chat completion"),
        (lambda _: _says(None), "no grade from 0 to 10"),
        (lambda _: _says("11 of 10!\nGrade: 11"), "no grade from 0 to 10"),
        (_slow, "gave no answer within 1 s"),
    ],
)
def test_a_sample_that_the_judge_fails_on_leaves_its_group(
    monkeypatch: pytest.MonkeyPatch, failing: Callable[[dict[str, Any]], Reply], told: str
) -> None:
    def reply(request: dict[str, Any], _before: int) -> Reply:
        return failing(request) if "unlucky" in request["messages"][1]["content"] else _says("Grade: 10")

    with _judge(monkeypatch, reply, retries=1, timeout_s=1) as (scorer, endpoint):
        lucky, unlucky, other = scorer.score(QUESTION, ["because", "unlucky", "why not"])
    assert (lucky.reward, unlucky.reward, other.reward) == (1.0, None, 1.0)
    assert unlucky.status is VerdictStatus.INFRA_ERROR
    assert told in unlucky.detail
    assert not unlucky.mistake, "the function is not at fault"
    assert "sesame" not in unlucky.detail
    assert len(endpoint.seen) == 4, "it was asked twice"


def test_a_judge_that_cannot_be_reached_scores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with _judge(monkeypatch, lambda _request, _before: _says(""), retries=0) as (scorer, endpoint):
        monkeypatch.setenv("JUDGE_URL", "http://127.0.0.1:9/v1")
        (verdict,) = scorer.score(QUESTION, ["because"])
    assert verdict.reward is None
    assert "ConnectError" in verdict.detail
    assert not verdict.mistake
    assert not endpoint.seen
