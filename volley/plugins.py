"""Plug-ins: scorers, objectives and data readers from installed packages, found through entry points.

    [project.entry-points."volley.scorers"]
    palindrome = "my_package:PALINDROME"        # a `ScorerPlugin`; jobs write kind: palindrome

Entry points are only looked up when a job names a kind that Volley does not have, so a broken plug-in affects only the
jobs that use it. docs/extending.md has a full example.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from volley.base import Spec
from volley.errors import JobError

SCORERS, OBJECTIVES, DATA = "volley.scorers", "volley.objectives", "volley.data"


@dataclass(frozen=True, slots=True)
class ScorerPlugin:
    """A kind of scorer.

    Attributes:
        spec: the scorer's keys in a job; its field ``kind`` is a Literal of the entry point's name.
        scorer: ``package.module:Class``, imported by the reward workers. The class is constructed with the spec and
            implements `reward_servers.scorers.Scorer`. Its static methods ``check(spec)`` and
            ``check_row(spec, prompt)`` are optional; they are called before a run starts and may raise `JobError`.
    """

    spec: type[Spec]
    scorer: str


@dataclass(frozen=True, slots=True)
class ObjectivePlugin:
    """A kind of objective.

    Attributes:
        spec: a subclass of `volley.objectives.ObjectiveBase`; its ``kind`` is a Literal of the entry point's name.
        advantages: called with rewards, float64 [groups, n]; answer ids, int64 [groups, n], or None; and the spec.
            Returns advantages [groups, n] for a sum over the n samples of a group, which may depend on no other
            group. Masked samples are removed beforehand: all samples are valid, and n is at least 2. It may raise
            ValueError for rewards it is not defined for.
    """

    spec: type[Spec]
    advantages: Callable[[NDArray[np.float64], NDArray[np.int64] | None, Any], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class RecipePlugin:
    """A published layout: ``data: {recipe: <name>}``.

    Attributes:
        module: import path of a module that implements `services.data.recipes.base.Recipe`.
    """

    module: str


@dataclass(frozen=True, slots=True)
class ReaderPlugin:
    """A file format: ``data: {format: <name>}``.

    Attributes:
        read: ``package.module:function``. The function takes the file's path and yields rows as mappings from field
            to JSON value; its OSError and ValueError are reported as errors of the job.
    """

    read: str


Plugin = ScorerPlugin | ObjectivePlugin | RecipePlugin | ReaderPlugin
AnyPlugin = TypeVar("AnyPlugin", ScorerPlugin, ObjectivePlugin, RecipePlugin, ReaderPlugin)
TYPES: Mapping[str, tuple[type[Plugin], ...]] = {
    SCORERS: (ScorerPlugin,),
    OBJECTIVES: (ObjectivePlugin,),
    DATA: (RecipePlugin, ReaderPlugin),
}
_loaded: dict[tuple[str, str], Plugin] = {}


def installed(group: str) -> tuple[str, ...]:
    """Names of the installed plug-ins of ``group``, sorted. Imports none of them."""
    return tuple(sorted({point.name for point in importlib.metadata.entry_points(group=group)}))


def load(group: str, name: str) -> Plugin:
    """Import the plug-in called ``name``.

    Raises:
        JobError: no package or more than one offers it, or it does not load; names the package.
    """
    if (group, name) not in _loaded:
        points = list(importlib.metadata.entry_points(group=group, name=name))
        sources = {(point.value, _source(point)) for point in points}
        if not points:
            raise JobError(f"plug-in {name!r} is not installed; installed: {', '.join(installed(group)) or 'none'}")
        if len(sources) > 1:
            packages = " and ".join(sorted(source for _, source in sources))
            raise JobError(f"plug-in {name!r} is offered by {packages}: uninstall one of them")
        _loaded[group, name] = _imported(points[0])
    return _loaded[group, name]


def plugin_of(group: str, name: str, kind: type[AnyPlugin]) -> AnyPlugin:
    """`load`, but a plug-in that is not of type ``kind`` is a `JobError` too."""
    plugin = load(group, name)
    if not isinstance(plugin, kind):
        raise JobError(f"plug-in {name!r} is a {type(plugin).__name__}, but this key needs a {kind.__name__}")
    return plugin


def resolved(path: str) -> Any:
    """Import ``package.module:name`` or ``package.module``; raises `JobError` if that fails."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except (Exception, SystemExit) as error:  # the plug-in's module may raise anything
        raise JobError(f"{path} of a plug-in does not load ({type(error).__name__}: {error})") from error


def _imported(point: importlib.metadata.EntryPoint) -> Plugin:
    try:
        plugin = point.load()
    except (Exception, SystemExit) as error:  # the plug-in's module may raise anything
        raise JobError(
            f"plug-in {point.name!r} of {_source(point)} does not load ({type(error).__name__}: {error}): "
            "fix or uninstall that package"
        ) from error
    if problem := _problem(point.group, point.name, plugin):
        raise JobError(f"plug-in {point.name!r} of {_source(point)}: {point.value} {problem}")
    return plugin  # type: ignore[no-any-return]


def _problem(group: str, name: str, plugin: object) -> str:
    """What is wrong with a plug-in, or ""."""
    if not isinstance(plugin, TYPES[group]):
        return f"is a {type(plugin).__name__}, not a {' or '.join(each.__name__ for each in TYPES[group])}"
    if not isinstance(plugin, ScorerPlugin | ObjectivePlugin):
        return ""
    spec: object = plugin.spec
    if not (isinstance(spec, type) and issubclass(spec, Spec)):
        return "has a spec that is not a subclass of volley.base.Spec"
    if kinds_of(spec) != {name}:
        return f"has a spec without the field kind: Literal[{name!r}]"
    if isinstance(plugin, ObjectivePlugin) and not {"center", "normalize", "focal"} <= spec.model_fields.keys():
        return "has a spec that is not a subclass of volley.objectives.ObjectiveBase"
    return ""


def _source(point: importlib.metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def kinds_of(*specs: type[BaseModel]) -> frozenset[str]:
    """The values that the Literal fields ``kind`` of these classes allow."""
    return frozenset(
        kind for spec in specs if "kind" in spec.model_fields for kind in get_args(spec.model_fields["kind"].annotation)
    )


@dataclass(frozen=True, slots=True)
class OpenUnion:
    """Annotates a union, after ``Field(discriminator="kind")``: installed plug-ins extend it.

    Attributes:
        beside: appended to the list of known kinds in errors, such as where other kinds may be used.
    """

    group: str
    beside: str = ""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        closed, own = handler(source), kinds_of(*get_args(source))

        def validate(value: object, inner: Callable[[object], object]) -> object:
            kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
            if not isinstance(kind, str) or kind in own:
                return inner(value)
            return _open(self.group, kind, own, self.beside).model_validate(value)

        def serialize(value: object, inner: SerializerFunctionWrapHandler, info: SerializationInfo) -> object:
            if getattr(value, "kind", None) in own or not isinstance(value, Spec):
                return inner(value)
            return value.model_dump(
                mode=info.mode,
                exclude_unset=info.exclude_unset,
                exclude_defaults=info.exclude_defaults,
                exclude_none=info.exclude_none,
            )

        serializer = core_schema.wrap_serializer_function_ser_schema(serialize, info_arg=True, schema=closed)
        return core_schema.no_info_wrap_validator_function(validate, closed, serialization=serializer)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        shown = handler(core)
        union = handler.resolve_ref_schema(shown)
        for name, plugin in _working(self.group).items():
            if isinstance(plugin, ScorerPlugin | ObjectivePlugin) and "oneOf" in union:
                shape = handler(plugin.spec.__pydantic_core_schema__)
                union["oneOf"].append(shape)
                if "$ref" in shape:
                    union["discriminator"]["mapping"][name] = shape["$ref"]
        return shown


@dataclass(frozen=True, slots=True)
class OpenName:
    """Annotates a Literal of names: installed plug-ins of one type extend it."""

    kind: type[RecipePlugin] | type[ReaderPlugin]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        own = frozenset(get_args(source))

        def validate(value: object, inner: Callable[[object], object]) -> object:
            if not isinstance(value, str) or value in own:
                return inner(value)
            _known(DATA, value, own, self.kind)
            return value

        text = core_schema.plain_serializer_function_ser_schema(str, return_schema=core_schema.str_schema())
        return core_schema.no_info_wrap_validator_function(validate, handler(source), serialization=text)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        shown = handler(core)
        names = [name for name, plugin in _working(DATA).items() if isinstance(plugin, self.kind)]
        if names and "enum" in shown:
            shown["enum"] = [*shown["enum"], *names]
        return shown


def _open(group: str, name: str, own: frozenset[str], beside: str) -> type[Spec]:
    kind = ScorerPlugin if group == SCORERS else ObjectivePlugin
    plugin = _known(group, name, own, kind, beside)
    if not isinstance(plugin, ScorerPlugin | ObjectivePlugin):
        raise JobError(f"plug-in {name!r} has no spec")
    return plugin.spec


def _known(group: str, name: str, own: frozenset[str], kind: type[Any], beside: str = "") -> Plugin:
    """`plugin_of`, but if no such plug-in is installed, the error lists all known names."""
    if (group, name) not in _loaded and name not in installed(group):
        more = ", ".join(installed(group)) or "none"
        known = ", ".join(sorted(own)) + beside
        raise JobError(f"{name!r} is not known. Built in: {known}. Installed plug-ins: {more}")
    found: Plugin = plugin_of(group, name, kind)
    return found


def _working(group: str) -> dict[str, Plugin]:
    """The plug-ins that load, by name; `volley doctor` reports the others."""
    found: dict[str, Plugin] = {}
    for name in installed(group):
        try:
            found[name] = load(group, name)
        except JobError:
            continue
    return found
