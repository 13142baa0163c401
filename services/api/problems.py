"""Errors as clients see them: problem documents as in RFC 9457."""

import http
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from services.jobs.job_file import explain
from volley.errors import HostError
from volley.patterns import pattern_words

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


class FieldProblem(BaseModel):
    """What is wrong with one field."""

    model_config = ConfigDict(extra="forbid")

    pointer: str = Field(description="the field: a JSON pointer into the body, or query/NAME, path/NAME, header/NAME")
    detail: str


class ProblemDocument(BaseModel):
    """The body of every error response."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"title": "Problem"})

    type: str = Field(description="identifies the kind of problem; the same for all its occurrences")
    title: str = Field(description="the kind of problem in words")
    status: int = Field(description="the HTTP status")
    detail: str = Field("", description="what went wrong this time, and what to do about it")
    errors: list[FieldProblem] = Field(default_factory=list)


class Problem(Exception):
    """Raised by a route to answer with a problem document.

    Args:
        kind: the last part of the problem's type, such as ``run-has-ended``.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail = status, kind, detail
        self.errors, self.headers = list(errors), dict(headers or {})

    def response(self) -> Response:
        document = ProblemDocument(
            type=f"urn:volley:problem:{self.kind}",
            title=self.kind.replace("-", " "),
            status=self.status,
            detail=self.detail,
            errors=self.errors,
        )
        return Response(document.model_dump_json(), self.status, self.headers, media_type=MEDIA_TYPE)


def no_run(run_id: str) -> Problem:
    return Problem(404, "no-such-run", f"there is no run {run_id}")


def away(error: HostError) -> Problem:
    """Return the problem for Redis or Ray being unreachable."""
    return Problem(503, "unavailable", str(error), headers={"Retry-After": "5"})


def internal_error(scope: Scope, error: Exception) -> Problem:
    """Return the problem for a bug, which says nothing of what happened inside; log which request met it."""
    log.error("%s %r failed: %s", scope["method"], scope["path"], type(error).__name__)  # the path holds no secret
    return Problem(500, "internal-error", "the server failed; its log says why")


def field_problems(error: ValidationError | RequestValidationError, prefix: str = "") -> list[FieldProblem]:
    """Return one problem per field that failed validation."""
    found = error.errors(include_url=False) if isinstance(error, ValidationError) else error.errors()
    return [FieldProblem(pointer=_pointer(each["loc"], prefix), detail=_words(each)) for each in found]


def invalid_job(error: ValidationError, pointer: str = "/job") -> Problem:
    return Problem(422, "invalid-job", explain("job", error), errors=field_problems(error, pointer))


def install(app: FastAPI) -> None:
    """Make ``app`` answer every error with a problem document."""

    @app.exception_handler(Problem)
    async def problem(_: Request, error: Problem) -> Response:
        return error.response()

    @app.exception_handler(HostError)
    async def host_error(_: Request, error: HostError) -> Response:
        log.warning("answered 503: %s", error)
        return away(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        errors = field_problems(error)
        return Problem(
            422, "invalid-request", "; ".join(f"{e.pointer}: {e.detail}" for e in errors), errors=errors
        ).response()

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        title = http.HTTPStatus(error.status_code).phrase
        kind = title.lower().replace(" ", "-")
        detail = "" if error.detail == title else str(error.detail)
        return Problem(error.status_code, kind, detail, headers=error.headers).response()


def _pointer(loc: Sequence[Any], prefix: str) -> str:
    places = [str(part) for part in loc]
    if not prefix and places[:1] == ["body"]:
        places, prefix = places[1:], "/"
    elif not prefix:
        return "/".join(places)
    escaped = [place.replace("~", "~0").replace("/", "~1") for place in places]
    return "/".join([prefix.rstrip("/"), *escaped]) or "/"


def _words(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "string_pattern_mismatch":
        return pattern_words(problem)
    message = str(problem["msg"]).removeprefix("Value error, ")
    return {"extra_forbidden": "there is no such field", "missing": "required, but missing"}.get(
        str(problem["type"]), message
    )
