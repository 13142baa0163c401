"""Query parameters: a request with one that its route does not know is rejected rather than answered without it."""

import difflib

from fastapi import Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute

from services.api.problems import FieldProblem, Problem


def check_query(request: Request) -> None:
    """Raise `Problem` 422 for query parameters that the request's route does not have; it names those it has."""
    known = known_parameters(request.scope["route"])
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
    if unknown:
        errors = [FieldProblem(pointer=f"query/{name}", detail=_advice(name, known)) for name in unknown]
        raise Problem(
            422, "invalid-request", "; ".join(f"{each.pointer}: {each.detail}" for each in errors), errors=errors
        )


def known_parameters(route: APIRoute) -> list[str]:
    """The query parameters of a route, in the order of its function."""
    return [each.alias for each in get_flat_dependant(route.dependant).query_params]


def _advice(name: str, known: list[str]) -> str:
    if not known:
        return "this route has no query parameters: leave it out"
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"there is no such parameter; {meant}this route has {', '.join(known)}"
