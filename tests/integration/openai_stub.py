"""A stub of the gateway for tests of programs: an OpenAI-compatible server that says what a test wants."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Asked = list[tuple[str, dict[str, Any]]]


@contextlib.contextmanager
def stub(says: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[tuple[str, Asked]]:
    """A server's URL, and the keys and bodies of the calls it got.

    Args:
        says: the message that answers a call's body.
    """
    asked: Asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.headers["authorization"], body))
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            message = {"role": "assistant", "content": "", **says(body)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            head = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
            answer = json.dumps({**head, "choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()


def calling(name: str, **arguments: object) -> dict[str, Any]:
    """A message that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}
