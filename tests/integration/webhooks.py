"""A real receiver of webhooks, which checks their signatures."""

import base64
import hmac
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "whsec_" + base64.b64encode(bytes(range(32))).decode()


class Receiver:
    """A webhook. ``answers`` are given first, then 204."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.answers: list[int] = []
        self.paths: list[str] = []
        self.port = 0

    @property
    def types(self) -> list[str]:
        return [body["type"] for _, body in self.got]

    def url(self, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/hook?x=1"

    def take(self, request: BaseHTTPRequestHandler) -> None:
        raw = request.rfile.read(int(request.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in request.headers.items()}
        if "webhook-signature" in headers:
            signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + raw
            expected = base64.b64encode(hmac.digest(bytes(range(32)), signed, "sha256")).decode()
            assert headers["webhook-signature"] == f"v1,{expected}"
        self.paths.append(request.path)
        self.got.append((headers, json.loads(raw)))
        request.send_response(self.answers.pop(0) if self.answers else 204)
        request.send_header("Location", "/elsewhere")
        request.end_headers()


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver at ``url()`` of this machine."""
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.take(self)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield made
        server.shutdown()
        thread.join()
