"""The reward server: Volley's scorers over HTTP, for any trainer.

    POST /v1/score   scores groups, in order                  GET /healthz   200 while the process responds
    GET  /readyz     200 if all slots pass their probes       GET /metrics   Prometheus text

If the server has a token, /v1/score and /metrics require it; /healthz, /readyz and /openapi.json never do.
Requests from web pages are rejected: ``http_gate.py`` checks Host, Origin and Content-Type before anything else.
A request must satisfy limits on size, time, depth and count before it is queued. If the queue is full, the answer is
429 with ``Retry-After``. A client that sends its headers or body too slowly is disconnected, and the queued work of a
client that disconnects is dropped. On shutdown the server accepts no new work and gives pending requests ``DRAIN_S``
seconds to finish; those still pending then get 503 with ``Retry-After``.
"""

import asyncio
import hmac
import json
import socket
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from uvicorn.protocols.http.h11_impl import H11Protocol

from reward_servers.http_body import BadBody, read_json
from reward_servers.http_connections import WaitingConnections
from reward_servers.http_gate import BrowserGate, accepted_hosts, is_loopback
from reward_servers.http_listener import listener_on, read_token
from reward_servers.http_schema import Item, ItemOut, SandboxOut, ScoreAnswer, ScoreRequest, VerdictOut, job_of
from reward_servers.sandbox.launch import interpreter
from reward_servers.slots import Full, Job, Slots
from volley.errors import HostError, VolleyError
from volley.records import Prompt, Verdict
from volley.scoring import SandboxLimits, SandboxSpec

HEADERS_DEADLINE_S = 10.0
ANSWER_DEADLINE_S = 900.0
DRAIN_S = 8.0
RETRY_AFTER_S = 2
CONNECTIONS = 256
MinTier = Literal["auto", "A", "B", "C", "none"]


def serve(
    host: str,
    port: int,
    slots: int,
    token_file: Path | None = None,
    min_tier: MinTier = "auto",
    packages: tuple[str, ...] = (),
    known_as: tuple[str, ...] = (),
) -> None:
    """Print the address, and serve until interrupted.

    Raises:
        HostError: the host does not reach ``min_tier`` or lacks one of ``packages``, ``port`` is in use, other machines
            can reach ``host`` and there is no token, or ``token_file`` or ``known_as`` is invalid.
    """
    if token_file is None and not is_loopback(host):
        raise HostError(f"other machines can reach --host {host}: pass --token-file")
    token = read_token(token_file) if token_file else None
    hosts = accepted_hosts(host, known_as)
    interpreter(packages)
    with listener_on(host, port) as listener:
        name = f"[{host}]" if ":" in host else host
        sys.stdout.write(f"listening on http://{name}:{listener.getsockname()[1]}; scores at POST /v1/score\n")
        sys.stdout.flush()
        _serve_on(listener, Slots(slots, SandboxSpec(min_tier=min_tier, packages=packages)), token, hosts)


def _serve_on(listener: socket.socket, slots: Slots, token: str | None, hosts: frozenset[str] | None) -> None:
    ending = Drain()
    config = uvicorn.Config(
        create_app(slots, token, ending, hosts),
        http=HeaderTimeoutProtocol.for_server(),
        lifespan="off",
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(DRAIN_S) + 2,
        log_level="warning",
        access_log=False,
    )
    server = DrainingServer(config, slots, ending)
    try:
        server.run([listener])
    finally:
        if server.failure is not None:
            raise HostError(str(server.failure)) from server.failure


class Drain:
    """Shutdown state: ``begun`` is True once shutdown starts; ``over`` is set ``DRAIN_S`` seconds later."""

    def __init__(self) -> None:
        self.begun = False
        self.over = asyncio.Event()

    def begin(self) -> None:
        self.begun = True
        asyncio.get_running_loop().call_later(DRAIN_S, self.over.set)


class DrainingServer(uvicorn.Server):
    """A uvicorn server that starts ``slots`` with itself and stops them after draining pending requests."""

    def __init__(self, config: uvicorn.Config, slots: Slots, ending: Drain) -> None:
        super().__init__(config)
        self._slots, self._ending = slots, ending
        self.failure: Exception | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await asyncio.to_thread(self._slots.start)
            await super().startup(sockets)
        except (VolleyError, OSError) as problem:
            self.failure, self.should_exit = problem, True
            await asyncio.to_thread(self._slots.stop)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending.begin()
        try:
            await super().shutdown(sockets)
        finally:
            await asyncio.to_thread(self._slots.stop)


def create_app(slots: Slots, token: str | None, ending: Drain, hosts: frozenset[str] | None) -> FastAPI:
    """Return the application that scores on ``slots``; ``hosts`` lists the accepted Host names, None accepts any."""
    app = FastAPI(title="Volley reward server", version="1", docs_url=None, redoc_url=None)
    app.add_middleware(BrowserGate, hosts=hosts)
    body = {"required": True, "content": {"application/json": {"schema": ScoreRequest.model_json_schema()}}}

    @app.post("/v1/score", response_model=ScoreAnswer, openapi_extra={"requestBody": body})
    async def score(request: Request) -> Response:
        if not _allowed(request, token):
            return _unauthorised()
        return await _until_shutdown(judged(request), ending)

    async def judged(request: Request) -> Response:
        try:
            jobs = await asyncio.to_thread(_jobs, await read_json(request))  # keeps the event loop responsive
        except BadBody as problem:
            return _refusal(problem.status, problem.problem)
        except ValidationError as problem:
            return _refusal(422, _first_error(problem))
        except ValueError as problem:
            return _refusal(422, str(problem))
        return await _answer(request, slots, jobs)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        content = {"ready": slots.ready, "waiting": slots.waiting, "sandbox": sandbox_of(slots).model_dump()}
        return JSONResponse(content, status_code=200 if slots.ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        if not _allowed(request, token):
            return _unauthorised()
        return PlainTextResponse("\n".join(metric_lines(slots)) + "\n", media_type="text/plain; version=0.0.4")

    return app


def sandbox_of(slots: Slots) -> SandboxOut:
    """Return the report of the slot with the weakest tier. Raises HostError if no slot has started."""
    known = [report for report in slots.reports if report is not None]
    if not known:
        raise HostError("no reward slot has started")
    weakest = max(known, key=lambda report: ("A", "B", "C", "none").index(report.tier))
    return SandboxOut(
        tier=weakest.tier,
        layers=list(weakest.layers),
        probes_passed=weakest.probes_passed,
        probes_total=weakest.probes_total,
    )


def metric_lines(slots: Slots) -> Iterator[str]:
    """Yield the server's metrics in the Prometheus text format."""
    sandbox = sandbox_of(slots)
    gauges = {
        "volley_reward_ready": ("1 if every slot runs and its sandbox passed its last probes", int(slots.ready)),
        "volley_reward_waiting": ("Groups waiting for a slot", slots.waiting),
        "volley_reward_slots": ("Scoring threads", len(slots.reports)),
        "volley_reward_probes_passed": ("Attacks denied in the last probe", sandbox.probes_passed),
        "volley_reward_probes_total": ("Attacks tried in the last probe", sandbox.probes_total),
    }
    for name, (meaning, value) in gauges.items():
        yield from (f"# HELP {name} {meaning}", f"# TYPE {name} gauge", f"{name} {value}")
    yield "# HELP volley_reward_verdicts_total Verdicts by status; status cached counts those served from the cache"
    yield "# TYPE volley_reward_verdicts_total counter"
    for status, count in sorted(slots.counts.items()):
        yield f'volley_reward_verdicts_total{{status="{status}",tier="{sandbox.tier}"}} {count}'


class HeaderTimeoutProtocol(H11Protocol):
    """An HTTP/1.1 connection that is closed if the headers of a request do not arrive within ``HEADERS_DEADLINE_S``.

    The deadline also covers the unread rest of a body whose request was already answered. When the server has reached
    its connection limit, a new connection closes the one that has been without a complete request for longest.
    """

    waiting = WaitingConnections()

    @classmethod
    def for_server(cls) -> type["HeaderTimeoutProtocol"]:
        """Return a subclass whose list of waiting connections belongs to one server."""
        return type("HeaderTimeoutProtocol", (cls,), {"waiting": WaitingConnections()})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._alarm: asyncio.TimerHandle | None = None
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self.waiting.cut_longest()
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.our_state not in (h11.SEND_RESPONSE, h11.SEND_BODY):
            self._arm()
            return
        self._disarm()
        if self.conn.their_state is not h11.SEND_BODY:
            self.waiting.discard(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.discard(self)
        self._disarm()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self.waiting.add(self)

    def _arm(self) -> None:
        if self._alarm is None:
            self.waiting.add(self)
            self._alarm = self.loop.call_later(HEADERS_DEADLINE_S, self.cut_off)

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def cut_off(self) -> None:
        self._alarm = None
        self.connections.discard(self)  # at once: its loss may be reported after the next request has been counted
        if not self.transport.is_closing():
            self.transport.close()


def _jobs(raw: object) -> list[Job]:
    return [_job(item) for item in ScoreRequest.model_validate(raw).items]


def _job(item: Item) -> Job:
    spec, row = job_of(item.scorer, SandboxLimits())
    return Job(spec, Prompt(item.id, "", row), tuple(item.responses), item.scorer.model_dump_json())


async def _until_shutdown(work: Coroutine[Any, Any, Response], ending: Drain) -> Response:
    """Return the result of ``work``, or a 503 if the server shuts down first."""
    busy = {"Retry-After": str(RETRY_AFTER_S)}
    if ending.begun:
        work.close()
        return _refusal(503, "the server is shutting down", busy)
    answer, over = asyncio.ensure_future(work), asyncio.ensure_future(ending.over.wait())
    try:
        await asyncio.wait({answer, over}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else _refusal(503, "the server is shutting down", busy)
    finally:
        answer.cancel()
        over.cancel()


async def _answer(request: Request, slots: Slots, jobs: list[Job]) -> Response:
    try:
        slots.submit(jobs)
    except Full:
        return _refusal(429, "the queue is full", {"Retry-After": str(RETRY_AFTER_S)})
    with _cancelling(slots, jobs):
        verdicts = asyncio.ensure_future(_verdicts(jobs))
        gone = asyncio.ensure_future(_disconnected(request))
        either: set[asyncio.Future[Any]] = {verdicts, gone}
        try:
            done, _ = await asyncio.wait(either, timeout=ANSWER_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            verdicts.cancel()
        if verdicts not in done:
            problem = f"scoring took longer than {ANSWER_DEADLINE_S:g} s"
            return _refusal(503, problem, {"Retry-After": str(RETRY_AFTER_S)})
    items = [
        ItemOut(id=job.prompt.id, verdicts=[VerdictOut.of(verdict) for verdict in scored])
        for job, scored in zip(jobs, verdicts.result(), strict=True)
    ]
    return Response(
        ScoreAnswer(items=items, sandbox=sandbox_of(slots)).model_dump_json(), media_type="application/json"
    )


async def _verdicts(jobs: list[Job]) -> list[list[Verdict]]:
    return await asyncio.gather(*(asyncio.wrap_future(job.done) for job in jobs))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


@contextmanager
def _cancelling(slots: Slots, jobs: list[Job]) -> Iterator[None]:
    """Cancel whatever is left of the jobs when the block ends."""
    try:
        yield
    finally:
        slots.give_up(jobs)


def _allowed(request: Request, token: str | None) -> bool:
    if token is None:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def _unauthorised() -> Response:
    return _refusal(401, "a bearer token is required", {"WWW-Authenticate": "Bearer"})


def _refusal(status: int, problem: str, headers: dict[str, str] | None = None) -> Response:
    content = json.dumps({"error": problem[:500]})
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def _first_error(problem: ValidationError) -> str:
    first = problem.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
