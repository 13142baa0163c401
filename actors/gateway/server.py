"""The gateway's listening socket, served on the event loop of the engine."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

STOP_SECONDS = 2.0
CONNECTIONS = 4096


class Server:
    """An HTTP server at ``url`` of this node, from `start` to `stop`. ``host`` is how URLs write its address.

    Args:
        bound: the socket to listen on; None for one with a free port.
    """

    def __init__(self, host: str, bound: socket.socket | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = bound or socket.create_server((host, 0), family=family, backlog=CONNECTIONS)
        self.host = f"[{host}]" if ":" in host else host
        self.url = f"http://{self.host}:{self._socket.getsockname()[1]}/v1"
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        """Begin to serve ``app``."""
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_config=None,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=int(STOP_SECONDS),
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="gateway")

    async def stop(self) -> None:
        """Close the socket and all connections."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=2 * STOP_SECONDS)
            self._serving.cancel()
        self._socket.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the actor's."""
        yield
