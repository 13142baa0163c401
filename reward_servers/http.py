"""The HTTP front: the same scorers for anyone else's trainer.

    POST /v1/score   groups in, verdicts out, in order        GET /healthz   the process answers
    GET  /readyz     every slot's sandbox is as proved        GET /metrics   Prometheus text

With a token, /v1/score and /metrics want it; health, readiness and /openapi.json answer anybody, as the API's do.
A request is read within limits of size, time, depth and count before a slot hears of it; a full queue answers 429
with ``Retry-After``; a client that is slow to send its headers or body is cut off; one that leaves frees its place.
Told to end, the server takes no new work and has ``DRAIN_S`` for the old; what is left gets 503 with ``Retry-After``.
"""

import asyncio
import hmac
import json
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from uvicorn.protocols.http.h11_impl import H11Protocol

from reward_servers.http_body import BadBody, read_json
from reward_servers.http_schema import ItemOut, SandboxOut, ScoreAnswer, ScoreRequest, VerdictOut, job_of
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
) -> None:
    """Serve until interrupted.

    Raises:
        HostError: the host does not reach ``min_tier``, lacks one of ``packages``, ``port`` is taken, or
            ``token_file`` holds no token.
    """
    token = _read_token(token_file) if token_file else None
    interpreter(packages)
    with _listener(host, port) as listener:
        _serve_on(listener, Slots(slots, SandboxSpec(min_tier=min_tier, packages=packages)), token)


def _serve_on(listener: socket.socket, slots: Slots, token: str | None) -> None:
    ending = Ending()
    config = uvicorn.Config(
        create_app(slots, token, ending),
        http=Impatient,
        lifespan="off",
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(DRAIN_S) + 2,
        log_level="warning",
        access_log=False,
    )
    server = DrainingServer(config, slots, ending)
    with suppress(KeyboardInterrupt):
        server.run([listener])
    if server.failure is not None:
        raise HostError(str(server.failure)) from server.failure


class Ending:
    """That the server was told to end: ``begun`` from then on, ``over`` once requests under way are out of time."""

    def __init__(self) -> None:
        self.begun = False
        self.over = asyncio.Event()

    def begin(self) -> None:
        self.begun = True
        asyncio.get_running_loop().call_later(DRAIN_S, self.over.set)


class DrainingServer(uvicorn.Server):
    """Starts ``slots`` and ends them, and answers the requests under way before that."""

    def __init__(self, config: uvicorn.Config, slots: Slots, ending: Ending) -> None:
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


def create_app(slots: Slots, token: str | None, ending: Ending) -> FastAPI:
    """The application around ``slots``."""
    app = FastAPI(title="Volley reward server", version="1", docs_url=None, redoc_url=None)
    body = {"required": True, "content": {"application/json": {"schema": ScoreRequest.model_json_schema()}}}

    @app.post("/v1/score", response_model=ScoreAnswer, openapi_extra={"requestBody": body})
    async def score(request: Request) -> Response:
        if not _allowed(request, token):
            return _unknown()
        return await _unless_over(judged(request), ending)

    async def judged(request: Request) -> Response:
        try:
            jobs = await asyncio.to_thread(_jobs, await read_json(request))  # other requests are answered meanwhile
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
            return _unknown()
        return PlainTextResponse("\n".join(metric_lines(slots)) + "\n", media_type="text/plain; version=0.0.4")

    return app


def sandbox_of(slots: Slots) -> SandboxOut:
    """The weakest slot's report."""
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
    """Every metric of the front: name, unit and meaning in its HELP line."""
    sandbox = sandbox_of(slots)
    gauges = {
        "volley_reward_ready": ("1 while every slot's sandbox is as it was proved", int(slots.ready)),
        "volley_reward_waiting": ("groups waiting for a slot", slots.waiting),
        "volley_reward_slots": ("scoring threads", len(slots.reports)),
        "volley_reward_probes_passed": ("probe attacks denied at the last look", sandbox.probes_passed),
        "volley_reward_probes_total": ("probe attacks tried at the last look", sandbox.probes_total),
    }
    for name, (meaning, value) in gauges.items():
        yield from (f"# HELP {name} {meaning}", f"# TYPE {name} gauge", f"{name} {value}")
    yield "# HELP volley_reward_verdicts_total verdicts given, by status; status cached: answered from memory"
    yield "# TYPE volley_reward_verdicts_total counter"
    for status, count in sorted(slots.counts.items()):
        yield f'volley_reward_verdicts_total{{status="{status}",tier="{sandbox.tier}"}} {count}'


class Impatient(H11Protocol):
    """A connection that is closed when the headers of a request, the first or a later one, do not arrive in time.

    What a client sends while no answer is owed to it has one deadline: a head, and before that the rest of a body that
    was answered unread.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._alarm: asyncio.TimerHandle | None = None
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
            self._calm()
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._alarm is None:
            self._alarm = self.loop.call_later(HEADERS_DEADLINE_S, self._cut_off)

    def _calm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _cut_off(self) -> None:
        self._alarm = None
        if not self.transport.is_closing():
            self.transport.close()


def _jobs(raw: Any) -> list[Job]:
    return [_job(item) for item in ScoreRequest.model_validate(raw).items]


def _job(item: Any) -> Job:
    spec, row = job_of(item.scorer, SandboxLimits())
    return Job(spec, Prompt(item.id, "", row), tuple(item.responses), item.scorer.model_dump_json())


async def _unless_over(work: Coroutine[Any, Any, Response], ending: Ending) -> Response:
    """The answer that ``work`` gives, or 503 where the server ends first."""
    busy = {"Retry-After": str(RETRY_AFTER_S)}
    if ending.begun:
        work.close()
        return _refusal(503, "the server is ending", busy)
    answer, over = asyncio.ensure_future(work), asyncio.ensure_future(ending.over.wait())
    try:
        await asyncio.wait({answer, over}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else _refusal(503, "the server is ending", busy)
    finally:
        answer.cancel()
        over.cancel()


async def _answer(request: Request, slots: Slots, jobs: list[Job]) -> Response:
    try:
        slots.submit(jobs)
    except Full:
        return _refusal(429, "the queue is full", {"Retry-After": str(RETRY_AFTER_S)})
    with _wanted(slots, jobs):
        verdicts = asyncio.ensure_future(_verdicts(jobs))
        gone = asyncio.ensure_future(_disconnected(request))
        either: set[asyncio.Future[Any]] = {verdicts, gone}
        try:
            done, _ = await asyncio.wait(either, timeout=ANSWER_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            verdicts.cancel()
        if verdicts not in done:
            return _refusal(503, "out of time", {"Retry-After": str(RETRY_AFTER_S)})
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
def _wanted(slots: Slots, jobs: list[Job]) -> Iterator[None]:
    """Somebody waits for these jobs for the length of the block, and not after."""
    try:
        yield
    finally:
        slots.give_up(jobs)


def _allowed(request: Request, token: str | None) -> bool:
    if token is None:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def _unknown() -> Response:
    return _refusal(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})


def _refusal(status: int, problem: str, headers: dict[str, str] | None = None) -> Response:
    content = json.dumps({"error": problem[:500]})
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def _first_error(problem: ValidationError) -> str:
    first = problem.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


@contextmanager
def _listener(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound before a sandbox is built. Raises HostError where ``port`` is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as problem:
        raise HostError(f"--host {host} is no address of this machine: {problem.strerror}") from problem
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as problem:
            wanted = f"port {port} of {host} can not be had"
            raise HostError(f"{wanted}: {problem.strerror}; end what holds it, or choose another --port") from problem
        yield listener


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as problem:
        raise HostError(f"token file {path}: {problem.strerror}") from problem
    if not token:
        raise HostError(f"token file {path} is empty: write one line with the token")
    return token
