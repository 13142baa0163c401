"""Routes about the service itself: cluster, tokens, the job schema, health, readiness, Prometheus metrics."""

import asyncio
import functools
from collections.abc import Awaitable
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from services.api.auth import ADMIN, READ, Sender
from services.api.cluster import holders
from services.api.context import Context, Ctx
from services.api.openapi import problems
from services.api.problems import FieldProblem, Problem
from services.api.prometheus import RunStatus
from services.api.routes.answers import as_json
from volley.errors import HostError
from volley.job import JOB
from volley.state import ENDED, Limits
from volley.views import ClusterView, Health, MadeToken, NewToken, Readiness, TokenList, TokenName, TokenView

public = APIRouter(tags=["service"])
read = APIRouter(tags=["service"], dependencies=[READ])
admin = APIRouter(prefix="/v1/tokens", tags=["tokens"], dependencies=[ADMIN])

READY_SECONDS = 5.0
RUNS_AT_ONCE = 100
TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text"}
}


@functools.cache
def job_schema() -> dict[str, Any]:
    """Build the JSON Schema of a job on first use, because that loads all plug-ins."""
    return JOB.json_schema()


@public.get("/healthz", response_model=Health)
async def get_health() -> Response:
    """Whether the process answers."""
    return as_json(Health())


@public.get("/readyz", response_model=Readiness, responses=problems(503))
async def get_readiness(context: Ctx) -> Response:
    """Whether Redis and Ray answer; 503 says which does not."""
    redis, ray = await asyncio.gather(_outage("redis", _ping(context)), _outage("ray", _nodes(context)))
    if errors := [each for each in (redis, ray) if each is not None]:
        detail = "; ".join(f"{each.pointer} is unavailable: {each.detail}" for each in errors)
        raise Problem(503, "not-ready", detail, errors=errors, headers={"Retry-After": "5"})
    return as_json(Readiness())


@read.get("/metrics", response_class=Response, status_code=200, responses=TEXT)
async def get_prometheus_metrics(context: Ctx) -> Response:
    """Metrics of this server and gauges of the runs, for Prometheus."""
    cards = await context.index.cards()
    runs = []
    for start in range(0, len(cards), RUNS_AT_ONCE):
        for card, _, observed in await context.index.read_states(cards[start : start + RUNS_AT_ONCE]):
            if observed.state in ENDED:
                runs.append(RunStatus(card, observed, {}))
                continue
            row, evaluation = [await _newest(context, card.id, stream) for stream in ("metrics", "evaluations")]
            runs.append(RunStatus(card, observed, row, evaluation))
    text = context.metrics.text(context.live.clients, runs)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@read.get("/v1/cluster", response_model=ClusterView)
async def get_cluster(context: Ctx) -> Response:
    """The machines, their total and free resources, and which run holds which resources."""
    nodes = await context.cluster.nodes()
    runs = await context.store.read_runs(await context.store.run_ids(), unreadable={})
    return as_json(ClusterView(nodes=nodes, holders=holders([(record, observed) for record, _, observed in runs])))


@read.get("/v1/schema/job", response_model=dict[str, object])
async def get_job_schema() -> Response:
    """JSON Schema of a job."""
    return JSONResponse(await asyncio.to_thread(job_schema))


@admin.get("", response_model=TokenList)
async def list_tokens(context: Ctx) -> Response:
    """Names, scopes and limits of all tokens; the tokens themselves are not stored."""
    return as_json(TokenList(items=await context.tokens.all()))


@admin.post("", status_code=201, response_model=MadeToken, responses=problems(409))
async def create_token(body: NewToken, context: Ctx, sender: Sender) -> Response:
    """Create a token. Only this response contains it."""
    return as_json(await context.tokens.make(body.name, body.scope, body.limits, sender), 201)


@admin.patch("/{name}", response_model=TokenView, responses=problems(404))
async def limit_token(name: TokenName, body: Limits, context: Ctx, sender: Sender) -> Response:
    """Replace the limits of a token's runs. Runs that hold more keep it until they end."""
    return as_json(await context.tokens.limit(name, body, sender))


@admin.delete("/{name}", status_code=204, responses=problems(404))
async def delete_token(name: TokenName, context: Ctx, sender: Sender) -> Response:
    """Revoke a token: this server rejects it at once, others within two seconds."""
    await context.tokens.delete(name, sender)
    return Response(status_code=204)


async def _newest(context: Context, run_id: str, stream: str) -> dict[str, Any]:
    """Return the newest row of a stream, {} before the first."""
    rows = await context.store.newest(run_id, stream, 1)
    return rows[0][1] if rows else {}


async def _ping(context: Context) -> None:
    await context.store.ping()


async def _nodes(context: Context) -> None:
    nodes = await context.cluster.nodes()
    if nodes and not any(node.alive for node in nodes):
        raise HostError("no node of the cluster is alive")


async def _outage(name: str, probe: Awaitable[None]) -> FieldProblem | None:
    """Return what is wrong with ``name``, or None if ``probe`` succeeds in time."""
    try:
        async with asyncio.timeout(READY_SECONDS):
            await probe
    except HostError as error:
        return FieldProblem(pointer=name, detail=str(error))
    except TimeoutError:
        return FieldProblem(pointer=name, detail=f"no answer within {READY_SECONDS:g} s")
    return None
