"""Responses from models that are known to be valid, serialised without being validated again."""

from collections.abc import Mapping

from fastapi import Response
from pydantic import BaseModel
from pydantic_core import to_json


def as_json(model: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return ``model`` as a response; values that JSON lacks, such as NaN, become null."""
    return Response(model.model_dump_json(), status, headers, media_type="application/json")


def raw_json(tree: object) -> Response:
    """Return ``tree`` as a response; the route is responsible for its shape."""
    return Response(to_json(tree, inf_nan_mode="null"), media_type="application/json")
