"""Generates docs/configuration.md from the job models: ``python -m volley.reference``."""

import sys
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from volley import job as jobs
from volley.base import Spec

HEAD = """# Configuration

All keys of a job file. Unknown keys are rejected; relative paths start from the job file's folder. `volley schema`
prints the same as JSON Schema, and `volley check job.yaml` reports what is wrong with a file and what to write instead.
`python -m volley.reference` generates this page.
"""
PLAIN: dict[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "true or false",
    Path: "path",
    type(None): "null",
}
WORTH_A_REFERENCE = 3  # inherited keys; fewer are listed again
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """The whole page."""
    sections = [HEAD]
    listed: dict[type[BaseModel], type[BaseModel]] = {}
    for model in _models():
        sections.append(_section(model, listed))
        for base in model.__mro__:
            if issubclass(base, BaseModel) and base not in (BaseModel, Spec) and not base.__name__.startswith("_"):
                listed.setdefault(base, model)
    return "\n".join(sections)


def _models() -> Iterator[type[BaseModel]]:
    """Each kind of job, then the models nested in them, breadth first."""
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


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _section(model: type[BaseModel], listed: Mapping[type[BaseModel], type[BaseModel]]) -> str:
    """A heading, the docstring's first paragraph, and a table of keys.

    Args:
        listed: base classes whose keys an earlier section lists, and the model of that section, to refer to.
    """
    about = " ".join((model.__doc__ or "").split("\n\n")[0].split())
    base = next((each for each in listed if each in model.__mro__[1:]), None)
    rows = {name: _row(name, field) for name, field in model.model_fields.items()}
    if base is not None and len(base.model_fields) >= WORTH_A_REFERENCE:
        inherited = [name for name, field in base.model_fields.items() if rows[name] == _row(name, field)]
        about += f" It also has {', '.join(f'`{name}`' for name in inherited)} of {_link(listed[base])}."
        rows = {name: row for name, row in rows.items() if name not in inherited}
    table = ["| key | value | default | |", "|---|---|---|---|", *rows.values()] if rows else ["No keys."]
    return "\n".join([f"## {_title(model)}", "", about, "", *table, ""])


def _title(model: type[BaseModel]) -> str:
    """``kind: rl (job)`` for members of a union, else the model's name."""
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


def _words(annotation: object) -> str:
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
        return _link(annotation)
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


def _link(model: type[BaseModel]) -> str:
    return f"[{_title(model)}](#{_anchor(_title(model))})"


def _anchor(title: str) -> str:
    """The anchor that Markdown renderers give a heading."""
    kept = "".join(each for each in title.lower() if each.isalnum() or each in " -_")
    return kept.replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(page())
