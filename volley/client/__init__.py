"""The Python client of the service: submit jobs, follow and change runs, read what they measured.

Needs the extra `client`, which is httpx alone. `Client` blocks, and `AsyncClient` is awaited; docs/python.md
shows both. Errors are those of `volley.errors`.

operations   one definition of each operation for both forms      routes    requests, and what answers mean
http         connections and errors                               live      server-sent events
server       which server, which token                            results   arrays and DataFrames
clients      the two forms                                        changes   changes to a live run
"""

from importlib.util import find_spec

if find_spec("httpx") is None:
    advice = "volley.client needs httpx, which is not installed: pip install 'volley-rl[client]'"
    raise ModuleNotFoundError(advice, name="httpx")

from volley.client.clients import AsyncClient, AsyncRun, Client, Run
from volley.client.live import LiveEvent, Update
from volley.client.results import Evaluations, LogPiece, Metrics

__all__ = ["AsyncClient", "AsyncRun", "Client", "Evaluations", "LiveEvent", "LogPiece", "Metrics", "Run", "Update"]
