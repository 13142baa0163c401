"""The API server as a process: ``python -m services.api.serve < SETTINGS``, with `ApiSettings` as JSON.

The settings arrive on standard input because they may contain a token, and others can see arguments and environment.
"""

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Iterator, Sequence

import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from reward_servers.http_connections import WaitingConnections
from services.api.app import Background, create_app
from services.api.cluster import Cluster, RayCluster
from services.api.jobs import ProcessChecker
from services.api.settings import ApiSettings
from services.notifications.deliveries import Deliveries
from services.notifications.sending import Sender
from services.notifications.watch import Watch
from services.store.redis import Store
from services.supervisor.ray_jobs import Launcher, RayJobLauncher
from services.supervisor.supervisor import Supervisor
from volley.errors import HostError, VolleyError

GRACE_SECONDS = 2
KEEP_ALIVE_SECONDS = 30
MAX_HEAD = 64 << 10
CONNECTIONS_BESIDE_LIVE = 500


async def serve(
    settings: ApiSettings,
    *,
    launcher: Launcher | None = None,
    cluster: Cluster | None = None,
    background: Sequence[Background] = (),
) -> None:
    """Serve until SIGTERM or SIGINT; live views are closed within two seconds of the signal.

    Raises:
        HostError: the port is taken, other machines could reach the server without a token, or Redis does not answer.
        Exception: the error of a background loop that failed.
    """
    checker = ProcessChecker(settings.check_seconds, cluster) if settings.check_jobs else None
    app = create_app(settings, launcher=launcher, cluster=cluster, checker=checker, background=background)
    server = GracefulServer(app, settings)
    with listening(settings) as listener:
        await server.serve(sockets=[listener])
    if server.failure is not None:
        raise server.failure
    if not server.started:
        raise HostError("the API server did not start; its log says why")


async def serve_stack(settings: ApiSettings) -> None:
    """Run `serve` with the supervisor, which starts the drivers through Ray's job server, and deliver notifications."""
    if settings.ray_address is None:
        raise HostError("the server needs ray_address: http://host:port of Ray's job server")
    address, url = settings.ray_address, settings.redis_url
    async with (
        Store(url, retries=settings.redis_retries) as store,
        RayJobLauncher(address, url) as launcher,
        RayCluster(address) as cluster,
        Supervisor(store, launcher, url, cluster.resources_by_node, Watch(store)) as supervisor,
        Sender(settings.webhook_hosts) as sender,
        Deliveries(store, sender) as deliveries,
    ):
        background = [supervisor.run, deliveries.run]
        await serve(settings, launcher=launcher, cluster=cluster, background=background)


class GracefulServer(uvicorn.Server):
    """Closes the live views before it shuts down, and shuts down when a background loop of the application ends."""

    def __init__(self, app: FastAPI, settings: ApiSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HeaderTimeoutProtocol.within(settings.head_seconds),
                ws="none",
                lifespan="on",
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_level="warning",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=GRACE_SECONDS,
                limit_concurrency=settings.live_clients + CONNECTIONS_BESIDE_LIVE,
            )
        )
        self.failure: BaseException | None = None
        self._app = app
        app.state.give_up = self._give_up

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.context.live.close()
        await super().shutdown(sockets)

    def _give_up(self, failure: BaseException) -> None:
        self.failure = self.failure or failure
        self.should_exit = True


class HeaderTimeoutProtocol(HttpToolsProtocol):
    """Disconnects clients whose request headers arrive too slowly or never end.

    If a request was answered before its body was read, the rest of the body is still read, for ``head_seconds`` at
    most; otherwise the client, still sending, would see a connection reset instead of the answer.

    When all places are taken, the connection that has waited longest without a whole request is closed for a new one.
    """

    head_seconds = 10.0
    waiting = WaitingConnections()

    @classmethod
    def within(cls, seconds: float) -> type["HeaderTimeoutProtocol"]:
        """Return the protocol class of one server, with this time limit."""
        return type("HeaderTimeoutProtocol", (cls,), {"head_seconds": seconds, "waiting": WaitingConnections()})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._alarm: asyncio.TimerHandle | None = self.loop.call_later(self.head_seconds, self.cut_off)
        self._arriving = False
        self._leftover: asyncio.TimerHandle | None = None
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self.waiting.cut_longest()
        self.waiting.add(self)

    def data_received(self, data: bytes) -> None:
        if self._alarm is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._alarm is not None and self._head_bytes > MAX_HEAD:
            self.cut_off()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._alarm is None:
            self._head_bytes = 0
            self._alarm = self.loop.call_later(self.head_seconds, self.cut_off)

    def on_headers_complete(self) -> None:
        self._cancel_timers()
        self._arriving = True
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self.waiting.add(self)
        if self._arriving and self.cycle.response_complete and not self.transport.is_closing():
            self._leftover = self.loop.call_later(self.head_seconds, self.cut_off)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._arriving = False
        if not self.cycle.response_complete:
            self.waiting.discard(self)
        if self._leftover is not None:
            self._cancel_timers()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.discard(self)
        self._cancel_timers()
        super().connection_lost(exc)

    def _cancel_timers(self) -> None:
        for timer in (self._alarm, self._leftover):
            if timer is not None:
                timer.cancel()
        self._alarm = self._leftover = None

    def cut_off(self) -> None:
        self._cancel_timers()
        self.connections.discard(self)  # at once: its loss may be reported after the next request has been counted
        if not self.transport.is_closing():
            self.transport.close()


@contextlib.contextmanager
def listening(settings: ApiSettings) -> Iterator[socket.socket]:
    """Yield a socket bound to the host and port. Raises `HostError` if that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise HostError(f"{settings.host} is not an address of this machine: {error}") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise HostError(
                f"cannot listen on port {settings.port} of {settings.host}: {error.strerror}; choose another port"
            ) from error
        yield listener


def main() -> int:
    """Serve until SIGTERM or SIGINT with the settings on standard input; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        asyncio.run(serve_stack(ApiSettings.model_validate_json(sys.stdin.buffer.read())))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        sys.stderr.write(f"volley: invalid settings of the API server\n{problems}\n")
        return 2
    except VolleyError as error:
        sys.stderr.write(f"volley: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
