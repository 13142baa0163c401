"""Answers from models that are known to be right: they are written out once, not validated again."""

from collections.abc import Mapping
from typing import Any

from fastapi import Response
from pydantic import BaseModel
from pydantic_core import to_json


def as_json(model: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``model`` as an answer; what JSON lacks, such as NaN, is null."""
    return Response(model.model_dump_json(), status, headers, media_type="application/json")


def raw_json(tree: Any) -> Response:
    """``tree``, whose shape the route vouches for, as an answer."""
    return Response(to_json(tree, inf_nan_mode="null"), media_type="application/json")
