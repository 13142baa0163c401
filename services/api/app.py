"""The application: what it holds, which routes it has, and what runs beside them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from fastapi import FastAPI
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
from services.api.routes import data, live, runs, service
from services.api.samples import SampleIndex
from services.api.series import SeriesCache
from services.api.settings import ApiSettings
from services.launcher import Launcher
from services.start import cancel_all
from services.store import Store, connect
from volley.errors import HostError

log = logging.getLogger(__name__)

DESCRIPTION = "Distributed reinforcement learning for language models that get k tries."
ROUTERS = (
    *(runs.read, runs.operate, runs.admin, data.read, live.read),
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
    """The application.

    Args:
        launcher: gives the drivers' logs; None: there are none to see.
        cluster: gives the nodes; None: there are none to see.
        checker: reads what a new job names; None: jobs are taken when they are well formed.
        background: loops that run as long as the application. One that ends or dies ends the server, by
            ``app.state.give_up``.
    """
    store = Store(settings.redis_url, retries=settings.redis_retries)
    redis = connect(settings.redis_url, retries=settings.redis_retries)
    admin_token = settings.admin_token.get_secret_value() if settings.admin_token else None
    tokens = Tokens(redis, admin_token, guarded=settings.guarded)
    index = RunIndex(store)
    context = Context(
        settings=settings,
        store=store,
        tokens=tokens,
        index=index,
        series=SeriesCache(store, settings.cache_bytes),
        samples=SampleIndex(store),
        live=Live(store, index, settings.live_clients),
        metrics=ServiceMetrics(),
        launcher=launcher,
        cluster=cluster or NoCluster(),
        checker=checker,
    )

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        async with store, contextlib.aclosing(redis):
            await _check_guard(settings, tokens)
            tasks = [_start(app, loop) for loop in background]
            try:
                yield
            finally:
                context.live.close()
                await cancel_all(tasks)

    app = FastAPI(
        title="Volley",
        version="1",
        description=DESCRIPTION,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=openapi.operation_id,
    )
    app.state.context = context
    app.state.give_up = _nobody_to_tell
    problems.install(app)
    openapi.install(app)
    for router in ROUTERS:
        app.include_router(router)
    if settings.dashboard.is_dir():
        # Not a mount at /, which would answer 404 to wrong methods on the routes above.
        app.router.default = StaticFiles(directory=settings.dashboard, html=True)
    app.add_middleware(Gate, settings=settings, tokens=tokens, observe=context.metrics.observe)
    return app


async def _check_guard(settings: ApiSettings, tokens: Tokens) -> None:
    """Raise `HostError` where the server is reached from outside and no token lets anybody in."""
    if not settings.loopback and not await tokens.any():
        raise HostError(
            f"{settings.host} is reached from other machines: set admin_token, or make a token while on a loopback host"
        )


def _start(app: FastAPI, loop: Background) -> "asyncio.Task[None]":
    async def run() -> None:
        await loop()

    def ended(task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            error = task.exception() or RuntimeError(f"{loop} ended")
            log.critical("the server ends, a part of it did: %s", error, exc_info=error)
            app.state.give_up(error)

    task = asyncio.create_task(run())
    task.add_done_callback(ended)
    return task


def _nobody_to_tell(error: BaseException) -> None:
    """Whoever serves the application puts in its place what ends the server."""
