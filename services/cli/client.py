"""The command line's client of the REST API. Every call has a timeout.

Server, in this order:  --server, VOLLEY_SERVER, `server` in the configuration file, the stack of `volley up`
Token, in this order:   VOLLEY_TOKEN, `token` in the configuration file if `server` there is the one used, the stack's

The configuration file is ~/.config/volley/config.toml (or in XDG_CONFIG_HOME if that is set):

    server = "https://volley.example.org"
    token = "..."
"""

import json
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack
from urllib.parse import quote

import httpx

from services.stack.folder import StackFolder
from volley.errors import HostError, JobError, VolleyError

CALL_SECONDS = 30.0
CHECK_SECONDS = 150.0  # the server checks a new job's data, tokenizer and scorer, with a limit of its own
SILENCE_SECONDS = 45.0  # of a live stream, which carries a ping every 15 s
AWAY_SECONDS = 120.0  # how long a live view waits for a server that does not answer
RETRY_SECONDS = 1.0


class Refused(VolleyError):
    """The server rejected a request.

    Args:
        status: HTTP status.
    """

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status

    @property
    def exit_code(self) -> int:
        """3 if something does not exist, 4 for a conflict, else 1."""
        return {404: 3, 409: 4, 412: 4}.get(self.status, 1)


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Configuration:
    """The content of the configuration file."""

    server: str | None = None
    token: str | None = None

    @classmethod
    def read(cls) -> "Configuration":
        """Read the file if it exists. Raises `HostError` if it is invalid, or if others can read a token in it."""
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        file = base / "volley" / "config.toml"
        try:
            tree = tomllib.loads(file.read_text())
        except FileNotFoundError:
            return cls()
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise HostError(f"{file}: {error}") from error
        if unknown := sorted(set(tree) - {"server", "token"}):
            raise HostError(f'{file}: unknown key {", ".join(unknown)}; write server = "..." and token = "..."')
        if not all(isinstance(value, str) for value in tree.values()):
            raise HostError(f"{file}: server and token must be strings")
        if "token" in tree and file.stat().st_mode & 0o077:
            raise HostError(f"{file} contains a token and others can read it: chmod 600 {file}")
        return cls(**tree)


class RequestOptions(TypedDict, total=False):
    """Options of one request, as of `httpx.Client.request`."""

    json: dict[str, Any]
    params: dict[str, Any]
    headers: dict[str, str]
    timeout: float


class ApiClient:
    """The API of one server; use as a context manager.

    Args:
        seconds: how long a call may take, unless it says otherwise.
        transport: replaces the network, for tests.
    """

    def __init__(
        self,
        server: str,
        token: str | None = None,
        *,
        seconds: float = CALL_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.server = server.rstrip("/")
        self._http = httpx.Client(
            base_url=self.server,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=seconds,
            transport=transport,
        )

    @classmethod
    def find(cls, server: str | None = None, *, seconds: float = CALL_SECONDS) -> "ApiClient":
        """Return a client for ``server`` or the configured server. Raises `HostError` if there is none."""
        configured = Configuration.read()
        token = os.environ.get("VOLLEY_TOKEN")
        where = server or os.environ.get("VOLLEY_SERVER") or configured.server
        if where is None:
            return cls(*_local_stack(token), seconds=seconds)
        if token is None and where == configured.server:
            token = configured.token
        return cls(where, token, seconds=seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    # ---- runs --------------------------------------------------------------------------------------------------

    def create(self, job: Mapping[str, Any], tags: Mapping[str, str], key: str | None = None) -> dict[str, Any]:
        """Create a run, or return the one that the same idempotency ``key`` created before."""
        headers = {"Idempotency-Key": key} if key else {}
        return self._json(
            "POST", "/v1/runs", json={"job": dict(job), "tags": dict(tags)}, headers=headers, timeout=CHECK_SECONDS
        )

    def check(self, job: Mapping[str, Any]) -> None:
        """Raise `Refused` if the server would not accept the job."""
        self._json("POST", "/v1/jobs/check", json={"job": dict(job)}, timeout=CHECK_SECONDS)

    def runs(self, limit: int, **filters: str | list[str] | None) -> list[dict[str, Any]]:
        """Return summaries of at most ``limit`` runs, newest first."""
        found: list[dict[str, Any]] = []
        cursor = None
        while len(found) < limit:
            query = {**filters, "limit": min(200, limit - len(found)), "cursor": cursor}
            page = self._json("GET", "/v1/runs", params={k: v for k, v in query.items() if v not in (None, [])})
            found += page["items"]
            cursor = page["next"]
            if cursor is None:
                break
        return found

    def run(self, run_id: str) -> dict[str, Any]:
        return self._json("GET", _path(run_id))

    def change(self, run_id: str, changes: Mapping[str, Any], revision: int | None = None) -> dict[str, Any]:
        """Change the run's desired state; if ``revision`` is given, only if that is still its revision."""
        headers = {} if revision is None else {"If-Match": str(revision)}
        return self._json("PATCH", _path(run_id), json=dict(changes), headers=headers)

    def stop(self, run_id: str) -> dict[str, Any]:
        return self._json("POST", _path(run_id, "stop"))

    def resume(self, run_id: str) -> dict[str, Any]:
        return self._json("POST", _path(run_id, "resume"))

    def delete(self, run_id: str) -> None:
        self._call("DELETE", _path(run_id))

    def metrics(self, run_id: str, names: str | None = None, points: int = 1000, first: int = 0) -> dict[str, Any]:
        """Return metrics by step, from step ``first``; rows beyond ``points`` are averaged in buckets."""
        params: dict[str, Any] = {"points": points, "from": first, **({"names": names} if names else {})}
        return self._json("GET", _path(run_id, "metrics"), params=params)

    def events(self, run_id: str, limit: int = 100, **filters: str | bool) -> list[dict[str, Any]]:
        """Return events of the run, oldest first."""
        return list(self._json("GET", _path(run_id, "events"), params={"limit": limit, **filters})["items"])

    def evaluations(self, run_id: str) -> list[dict[str, Any]]:
        return list(self._json("GET", _path(run_id, "evaluations"))["items"])

    def ledger(self, run_id: str) -> dict[str, int]:
        return dict(self._json("GET", _path(run_id, "ledger"))["counts"])

    def processes(self, run_id: str) -> list[dict[str, Any]]:
        """Return the run's processes that have a log."""
        return list(self._json("GET", _path(run_id, "logs"))["items"])

    def log(self, run_id: str, process: str, tail: int) -> str:
        """Return the last ``tail`` bytes of one process's log."""
        return self.log_piece(run_id, process, tail)[0]

    def log_piece(self, run_id: str, process: str, most: int, offset: int | None = None) -> tuple[str, int]:
        """Return at most ``most`` bytes of a log from ``offset`` (None: the log's end), and the next offset."""
        params = {"tail": most, **({} if offset is None else {"offset": offset})}
        answer = self._call("GET", _path(run_id, "logs", process), params=params)
        return answer.text, int(answer.headers["x-next-offset"])

    def follow(self, run_id: str) -> Iterator[Event]:
        """Yield what happens in the run from now on, without end, reconnecting when the connection breaks.

        Raises:
            HostError: the server has not answered for `AWAY_SECONDS`.
        """
        last_id, heard = "", time.monotonic()
        while True:
            try:
                for name, event in self._stream(_path(run_id, "live"), last_id):
                    last_id, heard = name or last_id, time.monotonic()
                    yield event
            except httpx.HTTPError as error:
                if time.monotonic() - heard > AWAY_SECONDS:
                    message = f"{self.server} still does not answer: {error}. The run continues without this view"
                    raise HostError(message) from error
            time.sleep(RETRY_SECONDS)

    # ---- the rest ----------------------------------------------------------------------------------------------

    def tokens(self) -> list[dict[str, Any]]:
        return list(self._json("GET", "/v1/tokens")["items"])

    def create_token(self, name: str, scope: str) -> dict[str, Any]:
        """Create a token; only this response contains it."""
        return self._json("POST", "/v1/tokens", json={"name": name, "scope": scope})

    def delete_token(self, name: str) -> None:
        self._call("DELETE", f"/v1/tokens/{quote(name, safe='')}")

    def cluster(self) -> dict[str, Any]:
        return self._json("GET", "/v1/cluster")

    def _json(self, method: str, path: str, **request: Unpack[RequestOptions]) -> dict[str, Any]:
        answer = self._call(method, path, **request)
        try:
            return dict(answer.json())
        except (ValueError, TypeError) as error:
            raise HostError(f"{self.server}{path} does not answer like a Volley server: {answer.text[:100]}") from error

    def _call(self, method: str, path: str, **request: Unpack[RequestOptions]) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **request)
        except httpx.HTTPError as error:
            raise self._away(error) from error
        except httpx.InvalidURL as error:
            raise JobError(f"{self.server} is not a URL: {error}") from error
        if answer.is_error:
            raise _refusal(answer)
        return answer

    def _away(self, error: httpx.HTTPError) -> HostError:
        return HostError(
            f"{self.server} does not answer: {error or type(error).__name__}. "
            "Is it up? `volley up` starts one on this machine"
        )

    def _stream(self, path: str, last_id: str) -> Iterator[tuple[str, Event]]:
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {})}
        timeout = httpx.Timeout(CALL_SECONDS, read=SILENCE_SECONDS)
        with self._http.stream("GET", path, headers=headers, timeout=timeout) as answer:
            if answer.is_error:
                answer.read()
                if answer.status_code < 500:
                    raise _refusal(answer)
                status = f"it answers {answer.status_code}"
                raise httpx.HTTPStatusError(status, request=answer.request, response=answer)
            yield from read_events(answer.iter_lines())


def read_events(lines: Iterator[str]) -> Iterator[tuple[str, Event]]:
    """Parse server-sent events and their ids; https://html.spec.whatwg.org/multipage/server-sent-events.html"""
    name, kind, data = "", "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield name, Event(kind, json.loads("\n".join(data)))
            kind, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            kind = value
        elif field == "id":
            name = value


def _refusal(answer: httpx.Response) -> Refused:
    """Convert a problem document (RFC 9457) to an error with one line per field."""
    try:
        problem = dict(answer.json())
    except (ValueError, TypeError):
        problem = {}
    text = str(problem.get("detail") or problem.get("title") or f"HTTP {answer.status_code} {answer.reason_phrase}")
    if answer.status_code in (401, 403) and "token" not in text:
        text += ": set VOLLEY_TOKEN to a token with this scope"
    lines = [text]
    for error in problem.get("errors") or ():
        if error["detail"] not in text:
            lines.append(f"  {error['pointer']}: {error['detail']}")
    return Refused(answer.status_code, "\n".join(lines))


def _local_stack(token: str | None) -> tuple[str, str | None]:
    """Return the URL of this machine's stack, and the token to use with it."""
    folder = StackFolder.at()
    state = folder.state()
    if state is None:
        raise HostError("no server: `volley up` starts one on this machine; --server or VOLLEY_SERVER names another")
    return state.server, token or (folder.admin_token.read_text() if state.guarded else None)


def _path(run_id: str, *more: str) -> str:
    return "/".join(("/v1/runs", quote(run_id, safe=""), *(quote(part, safe="") for part in more)))
