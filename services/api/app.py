"""The FastAPI application: its state, routes and background loops."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from fastapi import Depends, FastAPI
from starlette.staticfiles import StaticFiles

from services.api import openapi, problems
from services.api.auth import Tokens
from services.api.cluster import Cluster, NoCluster
from services.api.context import Context
from services.api.gate import Gate
from services.api.index import RunIndex
from services.api.jobs import Checker
from services.api.live import Live
from services.api.prometheus import ServiceMetrics
from services.api.query import check_query
from services.api.routes import data, live, queue, runs, service
from services.api.samples import SampleIndex
from services.api.series import SeriesCache
from services.api.settings import ApiSettings
from services.store.redis import Client, Store, close, connect
from services.supervisor.ray_jobs import Launcher
from services.tasks import cancel_all
from volley.errors import HostError

log = logging.getLogger(__name__)

DESCRIPTION = "Distributed reinforcement learning for language models that get k tries."
ROUTERS = (
    *(runs.read, runs.operate, runs.admin, data.read, live.read),
    *(queue.read, queue.admin),
    *(service.read, service.admin, service.public),
)
Background = Callable[[], Awaitable[None]]


def create_app(
    settings: ApiSettings,
    *,
    launcher: Launcher | None = None,
    cluster: Cluster | None = None,
    checker: Checker | None = None,
    background: Sequence[Background] = (),
) -> FastAPI:
    """Create the application.

    Args:
        launcher: source of the drivers' logs; None without a launcher.
        cluster: source of the nodes; None without a cluster.
        checker: checks the files and code that a new job names; if None, every well-formed job is accepted.
        background: loops that run as long as the application. If one ends or fails, the server ends, through
            ``app.state.give_up``.
    """
    redis = connect(settings.redis_url, retries=settings.redis_retries)
    context = _context(settings, redis, launcher, cluster or NoCluster(), checker)
    app = FastAPI(
        title="Volley",
        version="1",
        description=DESCRIPTION,
        lifespan=_lifespan(context, redis, background),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(check_query)],
        generate_unique_id_function=openapi.operation_id,
    )
    app.state.context = context
    app.state.give_up = _do_nothing
    problems.install(app)
    openapi.install(app)
    for router in ROUTERS:
        app.include_router(router)
    if settings.dashboard.is_dir():
        # A mount at / would answer 404 instead of 405 to wrong methods on the routes above.
        app.router.default = StaticFiles(directory=settings.dashboard, html=True)
    app.add_middleware(Gate, settings=settings, tokens=context.tokens, observe=context.metrics.observe)
    return app


def _context(
    settings: ApiSettings, redis: Client, launcher: Launcher | None, cluster: Cluster, checker: Checker | None
) -> Context:
    store = Store(settings.redis_url, retries=settings.redis_retries)
    admin_token = settings.admin_token.get_secret_value() if settings.admin_token else None
    index = RunIndex(store)
    return Context(
        settings=settings,
        store=store,
        tokens=Tokens(redis, admin_token, guarded=settings.guarded),
        index=index,
        series=SeriesCache(store, settings.cache_bytes),
        samples=SampleIndex(store),
        live=Live(store, index, settings.live_clients),
        metrics=ServiceMetrics(),
        launcher=launcher,
        cluster=cluster,
        checker=checker,
    )


def _lifespan(
    context: Context, redis: Client, background: Sequence[Background]
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with context.store, contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(close, redis)
            await _check_guard(context.settings, context.tokens)
            tasks = [_start(app, loop) for loop in background]
            try:
                yield
            finally:
                context.live.close()
                await cancel_all(tasks)

    return lifespan


async def _check_guard(settings: ApiSettings, tokens: Tokens) -> None:
    """Raise `HostError` if other machines can reach the server but there is no token to use it with."""
    if not settings.loopback and not await tokens.any():
        raise HostError(
            f"other machines can reach {settings.host}: set admin_token, or create a token while on a loopback host"
        )


def _start(app: FastAPI, loop: Background) -> "asyncio.Task[None]":
    async def run() -> None:
        await loop()

    def ended(task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            error = task.exception() or RuntimeError(f"{loop} ended")
            log.critical("the server stops because a background loop ended: %s", error, exc_info=error)
            app.state.give_up(error)

    task = asyncio.create_task(run())
    task.add_done_callback(ended)
    return task


def _do_nothing(error: BaseException) -> None:
    """Default of ``app.state.give_up``; `services.api.serve` replaces it by what ends the server."""
