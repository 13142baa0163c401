"""The configuration reference, made from the job's own models: ``python -m volley.reference``."""

import sys
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from volley import job as jobs

HEAD = """# Configuration

Every key of a job file. Unknown keys are refused; relative paths are taken from the job file's own folder. Numbers have
the bounds given. `volley schema` prints the same as JSON Schema, and `volley check job.yaml` says what is wrong with a
file, and what to write instead. This page is made by `python -m volley.reference`.
"""
PLAIN = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path", type(None): "null"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """The whole page."""
    models = list(_models())
    return "\n".join([HEAD, *(_section(model) for model in models)])


def _models() -> Iterator[type[BaseModel]]:
    """Each kind of job, then everything that lies in one, in the order met."""
    kinds = get_args(get_args(jobs.JobSpec)[0])
    waiting, seen = list(kinds), set(kinds)
    while waiting:
        model = waiting.pop(0)
        yield model
        for field in model.model_fields.values():
            for found in _models_in(field.annotation):
                if found not in seen:
                    seen.add(found)
                    waiting.append(found)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _section(model: type[BaseModel]) -> str:
    about = " ".join((model.__doc__ or "").split("\n\n")[0].split())
    rows = [_row(name, field) for name, field in model.model_fields.items()]
    table = ["| key | value | default | |", "|---|---|---|---|", *rows] if rows else ["Nothing more to set."]
    return "\n".join([f"## {_title(model)}", "", about, "", *table, ""])


def _title(model: type[BaseModel]) -> str:
    """``kind: rl`` where a kind says which of several it is; else the model's name."""
    kind = model.model_fields.get("kind")
    if kind is not None and get_origin(kind.annotation) is Literal:
        group = "job" if model in get_args(get_args(jobs.JobSpec)[0]) else model.__name__
        return f"kind: {get_args(kind.annotation)[0]} ({group})"
    return model.__name__


def _row(name: str, field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(each, key)}" for each in field.metadata for key, sign in BOUNDS.items() if hasattr(each, key)
    ]
    value = ", ".join([_words(field.annotation), *bounds])
    about = (field.description or "").replace("|", "\\|")
    return f"| `{name}` | {value} | {_default(field)} | {about} |"


def _words(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if origin is Annotated:
        return _words(parts[0])
    if origin is Literal:
        return " \\| ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " \\| ".join(_words(part) for part in parts)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{_title(annotation)}](#{_anchor(_title(annotation))})"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " \\| ".join(f"`{each.value}`" for each in annotation)
    if origin in (list, tuple, frozenset, set):
        return f"list of {_words(parts[0])}"
    if origin is dict:
        return f"mapping to {_words(parts[1])}"
    return "mapping" if annotation is dict else "any"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined or isinstance(default, BaseModel):
        return "as below"
    if default is None:
        return "null"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple | list):
        return f"`[{', '.join(map(str, default))}]`"
    return f"`{default}`" if default not in ({}, "") else "empty"


def _anchor(title: str) -> str:
    """As Markdown renderers make it."""
    kept = "".join(each for each in title.lower() if each.isalnum() or each in " -_")
    return kept.replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(page())
