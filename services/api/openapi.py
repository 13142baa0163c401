"""The contract, ``/openapi.json``: what FastAPI derives from the routes, with the problems every route may answer."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from services.api.gate import SAFE, needs_token
from services.api.problems import MEDIA_TYPE, ProblemDocument

WORDS = {
    400: "the request is cut off, or is not JSON",
    401: "there is no valid token",
    403: "the token's scope is too small, or another site's page sent the request",
    404: "there is no such thing",
    408: "the body came too slowly",
    409: "it can not be done as things stand",
    412: "somebody else changed it first",
    413: "the body is too large",
    415: "the body is not JSON",
    421: "the server is not known by this name",
    422: "a field is wrong; `errors` says which",
    429: "too many requests; see Retry-After",
    503: "Redis or Ray is away; see Retry-After",
}
_PROBLEM = {"content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Documentation of the problems that a route may answer, beside those that all may."""
    return {status: {"description": WORDS[status], **_PROBLEM} for status in statuses}


def install(app: FastAPI) -> None:
    """Let ``app`` describe itself exactly."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def operation_id(route: APIRoute) -> str:
    """The name of the function that answers."""
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
    statuses = {421, 429}
    if needs_token(path):
        statuses |= {401, 403, 503}
    if method not in SAFE:
        statuses |= {400, 403, 408, 413, 415}
    if "422" in answers or operation.get("parameters") or "requestBody" in operation:
        statuses.add(422)
    for status in statuses:
        if MEDIA_TYPE not in _content(answers.get(str(status))):
            answers[str(status)] = problems(status)[status]
    operation["responses"] = dict(sorted(answers.items()))


def _content(answer: Mapping[str, Any] | None) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (answer or {}).get("content", {})
    return found
