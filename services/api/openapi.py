"""The OpenAPI document: what FastAPI derives from the routes, plus the problems that every route may return."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from reward_servers.http_gate import SAFE
from services.api.gate import needs_token
from services.api.problems import MEDIA_TYPE, ProblemDocument

WORDS = {
    400: "the request is cut off or not JSON",
    401: "the request has no valid token",
    403: "the token's scope is too small, or a page of another site sent the request",
    404: "it does not exist",
    408: "the body arrived too slowly",
    409: "it is not possible in the present state",
    412: "somebody else changed it first",
    413: "the body is too large",
    415: "the body is not JSON",
    421: "the server does not have this host name",
    422: "a field is wrong, or the route has no such query parameter; `errors` says which",
    429: "too many requests; see Retry-After",
    503: "Redis or Ray does not answer; see Retry-After",
}
_PROBLEM = {"content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Document the problems that a route may return, besides those that every route may."""
    return {status: {"description": WORDS[status], **_PROBLEM} for status in statuses}


def install(app: FastAPI) -> None:
    """Replace the OpenAPI document of ``app`` by one with its problem responses."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def operation_id(route: APIRoute) -> str:
    """Use the name of the route's function as its operation id."""
    return route.name


def _describe(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
    )
    schemas = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    problem = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= problem.pop("$defs")
    schemas["Problem"] = problem
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete(path, method.upper(), operation)
    return document


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    answers: dict[str, Any] = operation["responses"]
    statuses = {421, 422, 429}
    if needs_token(path):
        statuses |= {401, 403, 503}
    if method not in SAFE:
        statuses |= {400, 403, 408, 413, 415}
    for status in statuses:
        if MEDIA_TYPE not in _content(answers.get(str(status))):
            answers[str(status)] = problems(status)[status]
    operation["responses"] = dict(sorted(answers.items()))


def _content(answer: Mapping[str, Any] | None) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (answer or {}).get("content", {})
    return found
