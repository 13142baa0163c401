"""The gateway's routes: who may call, how large a request may be, and how errors are answered.

    POST /v1/chat/completions   POST /v1/completions   POST /inference/v1/generate   POST /tokenize   GET /v1/models
    DELETE /v1/session          from whoever runs the episode, once it is over: no later call counts

Every request carries a session's key: ``Authorization: Bearer KEY``. Errors have OpenAI's form. None has a status that
OpenAI's clients repeat by themselves, since a repeated call would not continue the session.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.gateway import answers
from actors.gateway.aside import aside
from actors.gateway.asked import BadRequest, asked, given, prompt_of
from actors.gateway.bodies import Body, TooLarge, read_body
from actors.gateway.calls import Answer, Gateway, OpenSession, UnknownSession
from actors.gateway.generate import as_completion
from actors.gateway.messages import BadMessages, checked
from actors.gateway.rendering import Setting, TooLong
from actors.gateway.session import End, RanOut, Rewritten
from volley.errors import JobError, VolleyError

log = logging.getLogger(__name__)
Handler = Callable[[OpenSession, Body, Request], Awaitable[Response]]
_TOKENIZE = "/tokenize"  # the one route with a body that asks nothing of the model
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients would repeat a call with status 500


def create_app(gateway: Gateway, model: str, hosts: Collection[str] | None) -> ASGIApp:
    """The application.

    Args:
        model: the name under which the model is listed. Requests may use any.
        hosts: the names and addresses accepted in the Host header, as URLs write them; None accepts any.
    """
    routes = _Routes(gateway, model)
    handlers: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", routes.chat),
        ("POST", "/v1/completions", routes.completions),
        ("POST", "/inference/v1/generate", routes.generate),
        ("POST", _TOKENIZE, routes.tokenize),
        ("GET", "/v1/models", routes.models),
    ]
    unknown = _unknown_route([f"{method} {path}" for method, path, _ in handlers])
    handlers.append(("DELETE", "/v1/session", routes.end))
    app = Starlette(
        routes=[Route(path, _guarded(gateway, handler), methods=[method]) for method, path, handler in handlers],
        exception_handlers={404: unknown, 405: unknown},
    )
    return HostGate(app, hosts)


def _unknown_route(known: Collection[str]) -> Callable[[Request, Exception], Response]:
    """What answers requests to other routes than those ``known``."""

    def answer(request: Request, problem: Exception) -> Response:
        status = problem.status_code if isinstance(problem, HTTPException) else 404
        message = (
            f"this server has no {request.method} {request.url.path}, only {', '.join(known)}: "
            "use chat completions (client.chat.completions.create), with a base_url that ends in /v1"
        )
        return _error(status, "unknown_route", message)

    return answer


class HostGate:
    """Answers only requests to this server's own address that no web page sent."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        self._app, self._hosts = app, None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            name = headers.get(b"host", b"").decode("latin-1").lower()
            if self._hosts is not None and not {name, name.rpartition(":")[0]} & self._hosts:
                refusal = _error(421, "wrong_host", "this server does not have the host name of the request")
            elif b"origin" in headers:
                refusal = _error(403, "web_page", "web pages must not use this server")
            else:
                refusal = None
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Routes:
    def __init__(self, gateway: Gateway, model: str) -> None:
        self._gateway, self._model = gateway, model

    async def chat(self, found: OpenSession, body: Body, request: Request) -> Response:
        if body.fields.get("stream") is True:
            return await _streamed(self._gateway.chat, found, body, _CHAT, self._model)
        work = self._gateway.chat(found, body.fields, size=body.size)
        return await _whole(work, request, lambda a: answers.chat_body(a, self._model))

    async def completions(self, found: OpenSession, body: Body, request: Request) -> Response:
        if body.fields.get("stream") is True:
            return await _streamed(self._gateway.complete, found, body, _COMPLETION, self._model)
        work = self._gateway.complete(found, body.fields, size=body.size)
        return await _whole(work, request, lambda a: answers.completion_body(a, self._model))

    async def generate(self, found: OpenSession, body: Body, request: Request) -> Response:
        asked_for = await aside(body.size, as_completion, body.fields, self._gateway.stops)
        work = self._gateway.complete(found, asked_for, size=body.size)
        return await _whole(work, request, lambda a: answers.generate_body(a, self._model))

    async def tokenize(self, found: OpenSession, body: Body, request: Request) -> Response:
        context = found.session.limits.context
        try:
            ids = await aside(body.size, self._ids, body.fields, found, context)
        except TooLong as problem:
            raise BadRequest(f"the text has {problem}; the model takes {context}: shorten it") from None
        return JSONResponse({"count": len(ids), "max_model_len": context, "tokens": ids})

    async def models(self, found: OpenSession, body: Body, request: Request) -> Response:
        entry = {"id": self._model, "object": "model", "created": 0, "owned_by": "volley"}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": found.session.limits.context}]})

    async def end(self, found: OpenSession, body: Body, request: Request) -> Response:
        await found.end()
        return Response(status_code=204)

    def _ids(self, body: Mapping[str, Any], found: OpenSession, context: int) -> list[int]:
        renderer = self._gateway.renderer
        if "messages" not in body:
            prompt = prompt_of(body)
            return renderer.tokens(prompt, room=context) if isinstance(prompt, str) else prompt
        only = {key: body[key] for key in ("tools", "chat_template_kwargs") if key in body}
        setting: Setting = asked(only, found.sampling).setting
        replies = given(body, "add_generation_prompt", default=True)
        return renderer.tokens(renderer.text(checked(body["messages"]), setting, replies=replies), room=context)


def _guarded(gateway: Gateway, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """A route: find the session, read the body, and turn errors into answers."""

    async def route(request: Request) -> Response:
        try:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            found = gateway.find(key.strip() if scheme.lower() == "bearer" else "")
            return await handler(found, await _body(request, found), request)
        except Exception as problem:  # noqa: BLE001 - a server whose answer is an exception closes the connection
            return _answer_to(problem, request)

    return route


async def _body(request: Request, found: OpenSession) -> Body:
    """The request's body. A call too large for any conversation ends the session, like a prompt too long."""
    if request.method != "POST":
        return Body({}, 0)
    try:
        return await read_body(request, found.session.limits.context)
    except TooLarge:
        if not found.over and request.url.path != _TOKENIZE:
            found.session.end = found.session.end or End.CONTEXT
        raise


def _answer_to(problem: Exception, request: Request) -> Response:
    match problem:
        case UnknownSession():
            return _error(401, "unknown_session", str(problem))
        case Rewritten():
            return _error(400, "history_rewritten", f"the call does not continue this episode: {problem}")
        case RanOut():
            return _error(400, f"out_of_{problem.end}", f"{problem}: end the episode at an empty answer")
        case BadRequest() | BadMessages() | JobError():
            return _error(400, "bad_request", str(problem))
        case TooLarge():
            return _error(413, "too_large", str(problem))
        case VolleyError():  # the engine has died, and the episode with it
            return _error(410, "actor_died", str(problem).partition("\n")[0])
    log.error("%s %s failed", request.method, request.url.path, exc_info=problem)
    return _error(500, "server_error", f"the server failed: {_described(problem)}")


def _described(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".partition("\n")[0][:300]


async def _whole(work: Awaitable[Answer], request: Request, body: Callable[[Answer], dict[str, Any]]) -> Response:
    """Answer in one piece. If the client goes away first, the call is dropped."""
    answering, gone = asyncio.ensure_future(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answering.cancelled():
            raise UnknownSession("the episode is over")
        if answering.done():
            return JSONResponse(body(answering.result()))
        return _error(400, "client_left", "the client closed its connection")
    finally:
        await _ended(answering, gone)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks that still run, and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


class _Form:
    """How a route's stream looks."""

    def __init__(self, kind: str, text: Callable[..., dict[str, Any]], end: Callable[..., dict[str, Any]]) -> None:
        self.kind, self.text, self.end = kind, text, end


_CHAT = _Form("chat.completion.chunk", answers.chat_text, answers.chat_end)
_COMPLETION = _Form("text_completion", answers.completion_text, answers.completion_end)


async def _streamed(
    call: Callable[..., Awaitable[Answer]], found: OpenSession, body: Body, form: _Form, model: str
) -> Response:
    """Answer piece by piece. Errors of the request are raised before the first one."""
    usage = asked(body.fields, found.sampling).usage
    texts: asyncio.Queue[str | None] = asyncio.Queue()
    started: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    work = asyncio.ensure_future(
        call(found, body.fields, size=body.size, on_start=started.set_result, on_text=texts.put_nowait)
    )
    work.add_done_callback(lambda _: texts.put_nowait(None))
    try:
        await asyncio.wait({work, started}, return_when=asyncio.FIRST_COMPLETED)
    except BaseException:
        await _ended(work)
        raise
    if work.cancelled():
        raise UnknownSession("the episode is over")
    if work.done() and (problem := work.exception()) is not None:
        raise problem
    pieces = _pieces(work, texts, form, model, started.result(), usage=usage)
    return StreamingResponse(pieces, media_type="text/event-stream")


async def _pieces(
    work: asyncio.Future[Answer],
    texts: "asyncio.Queue[str | None]",
    form: _Form,
    model: str,
    number: int,
    *,
    usage: bool,
) -> AsyncIterator[str]:
    sent = False
    try:
        while (text := await texts.get()) is not None:
            sent = True
            yield _event(form.text(text, model, number))
        try:
            answer = work.result()
        except (asyncio.CancelledError, Exception) as problem:  # it has begun, so it ends with the error
            if not isinstance(problem, asyncio.CancelledError | VolleyError):
                log.error("a streamed call failed", exc_info=problem)
            reason = str(problem).partition("\n")[0] or "the episode is over"
            yield _event({"error": {"message": reason, "type": "volley", "param": None, "code": "call_failed"}})
            return
        yield _event(form.end(answer, model, text_sent=sent))
        if usage:
            yield _event(answers.usage_chunk(answer, model, form.kind))
        yield "data: [DONE]\n\n"
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await _ended(work)


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _error(status: int, code: str, message: str) -> JSONResponse:
    error = {"message": message, "type": "volley", "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status, headers=NO_RETRY if status >= 500 else None)
