"""Generates docs/configuration.md from the job models: ``python -m volley.reference``."""

import sys
import types
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from volley import job as jobs
from volley.base import Spec

HEAD = """# Configuration

All keys of a job file. Unknown keys are rejected; relative paths start from the job file's folder. A key without a
default here has the defaults of the section it links to. `volley schema` prints the same as JSON Schema, and
`volley check job.yaml` reports what is wrong with a file and what to write instead. `python -m volley.reference`
generates this page.
"""
PLAIN: dict[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    Path: "path",
    type(None): "null",
}
WORTH_A_REFERENCE = 2  # keys shared with an earlier section; fewer are listed again
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """The whole page."""
    sections = [HEAD]
    listed: list[type[BaseModel]] = []
    for model in _models():
        sections.append(_section(model, listed))
        listed.append(model)
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


def _section(model: type[BaseModel], listed: Sequence[type[BaseModel]]) -> str:
    """A heading, the docstring's first paragraph, and a table of the keys that no earlier section of its family has.

    Args:
        listed: the models of the earlier sections.
    """
    about = " ".join((model.__doc__ or "").split("\n\n")[0].split())
    rows, relative = _rows(model), model
    shared: dict[str, str] = {}
    for other in listed:
        same = rows.items() & _rows(other).items() if _family(model) & _family(other) else set()
        if len(same) > max(len(shared), WORTH_A_REFERENCE - 1):
            shared, relative = dict(same), other
    if shared:
        names = ", ".join(f"`{name}`" for name in rows if name in shared)
        about += f" It also has {names} of {_link(relative)}."
        rows = {name: row for name, row in rows.items() if name not in shared}
    table = ["", "| key | type (default) | |", "|---|---|---|", *rows.values()] if rows else []
    return "\n".join([f"## {_title(model)}", "", about, *table, ""])


def _rows(model: type[BaseModel]) -> dict[str, str]:
    """Each key's line of a table, without the ``kind`` that the title gives."""
    return {name: _row(name, field) for name, field in model.model_fields.items() if name != "kind"}


def _family(model: type[BaseModel]) -> set[type]:
    """The model and the classes it extends; only relatives refer to each other."""
    return {each for each in model.__mro__ if issubclass(each, Spec) and each is not Spec}


def _title(model: type[BaseModel]) -> str:
    """``kind: rl (job)`` for members of a union, else the model's name."""
    kind = model.model_fields.get("kind")
    if kind is not None and get_origin(kind.annotation) is Literal:
        group = "job" if model in get_args(get_args(jobs.JobSpec)[0]) else model.__name__
        return f"kind: {'/'.join(get_args(kind.annotation))} ({group})"
    return model.__name__


def _row(name: str, field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(each, key)}" for each in field.metadata for key, sign in BOUNDS.items() if hasattr(each, key)
    ]
    words = _words(field.annotation)
    if not field.is_required() and field.default is None:
        words = words.removesuffix(" or null")  # the default shows it
    value = ", ".join([words, *bounds]) + _default(field)
    about = (field.description or "").replace("|", "\\|")
    return f"| `{name}` | {value} |" + (f" {about} |" if about else "")  # Markdown fills up a row


def _words(annotation: object) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if origin is Annotated:
        return _words(parts[0])
    if origin is Literal:
        return _any_of([f"`{part}`" for part in parts])
    if origin in (Union, types.UnionType):
        return _any_of([_words(part) for part in parts])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _link(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _any_of([f"`{each.value}`" for each in annotation])
    if origin in (list, tuple, frozenset, set):
        return f"list of {_words(parts[0])}"
    if origin is dict:
        return f"mapping to {_words(parts[1])}"
    return "mapping" if annotation is dict else "any"


def _any_of(choices: list[str]) -> str:
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def _default(field: FieldInfo) -> str:
    """What follows the type: the default in brackets, or that there is none."""
    if field.is_required():
        return ", *required*"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        return f" (`{chosen}`)" if (chosen := _chosen(default)) != "{}" else ""
    if default is None:
        return " (null)"
    if isinstance(default, bool):
        return f" (`{str(default).lower()}`)"
    if isinstance(default, tuple | list):
        return f" (`[{', '.join(map(str, default))}]`)"
    return f" (`{default}`)" if default not in ({}, "") else " (empty)"


def _chosen(values: BaseModel) -> str:
    """The kind of ``values`` and what differs from their class's defaults, in YAML."""
    names = {"kind"} & type(values).model_fields.keys() | values.model_fields_set
    given = {name: getattr(values, name) for name in sorted(names)}
    shown = (f"{name}: {_chosen(value) if isinstance(value, BaseModel) else value}" for name, value in given.items())
    return f"{{{', '.join(shown)}}}"


def _link(model: type[BaseModel]) -> str:
    title = _title(model)
    return f"[{title.removeprefix('kind: ').partition(' ')[0]}](#{_anchor(title)})"


def _anchor(title: str) -> str:
    """The anchor that Markdown renderers give a heading."""
    kept = "".join(each for each in title.lower() if each.isalnum() or each in " -_")
    return kept.replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(page())
