"""Plug-ins: scorers, objectives and data readers of installed packages, found by entry points.

    [project.entry-points."volley.scorers"]
    palindrome = "my_package:PALINDROME"        # a `ScorerPlugin`; the name is the kind that jobs write

Nothing is looked up until a job names a kind that Volley does not have, so a plug-in that is broken stands in nobody
else's way. docs/extending.md has a whole example.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, SerializationInfo, SerializerFunctionWrapHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from volley.base import Spec
from volley.errors import JobError

SCORERS, OBJECTIVES, DATA = "volley.scorers", "volley.objectives", "volley.data"


@dataclass(frozen=True, slots=True)
class ScorerPlugin:
    """A kind of scorer.

    Attributes:
        spec: what a job says of it; its field ``kind`` is a Literal of the entry point's name.
        scorer: ``package.module:Class``, imported where samples are scored. The class is made with the spec and has
            ``score`` and ``close`` of `reward_servers.scorers.Scorer`; its static methods ``check(spec)`` and
            ``check_row(spec, prompt)``, if there, are called before a run starts and raise `JobError`.
    """

    spec: type[Spec]
    scorer: str


@dataclass(frozen=True, slots=True)
class ObjectivePlugin:
    """A kind of objective.

    Attributes:
        spec: a subclass of `volley.objectives.ObjectiveBase`; its ``kind`` is a Literal of the entry point's name.
        advantages: called with rewards, float64 [groups, n], the answers' ids, int64 of that shape or None, and the
            spec; returns advantages of that shape for a sum over the n samples of a group. All samples it sees are
            valid and n is at least 2: masked samples are gone. A group's advantages may depend on that group only. It
            may raise ValueError for rewards it is not defined for.
    """

    spec: type[Spec]
    advantages: Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class RecipePlugin:
    """A published layout: ``data: {recipe: <name>}``.

    Attributes:
        module: import path of a module with the names of `services.data.recipes.base.Recipe`.
    """

    module: str


@dataclass(frozen=True, slots=True)
class ReaderPlugin:
    """A kind of file: ``data: {format: <name>}``.

    Attributes:
        read: ``package.module:function``. It takes the file's path and yields rows, each a mapping from field to JSON
            value; OSError and ValueError become the job's error.
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
    """The names under which packages offer plug-ins of ``group``, sorted. Imports none of them."""
    return tuple(sorted({point.name for point in importlib.metadata.entry_points(group=group)}))


def load(group: str, name: str) -> Plugin:
    """The plug-in called ``name``.

    Raises:
        JobError: there is none, there are two, or it does not load; names its package.
    """
    if (group, name) not in _loaded:
        points = list(importlib.metadata.entry_points(group=group, name=name))
        sources = {(point.value, _source(point)) for point in points}
        if not points:
            raise JobError(f"no plug-in {name!r} is installed; installed: {', '.join(installed(group)) or 'none'}")
        if len(sources) > 1:
            offered = " and ".join(sorted(source for _, source in sources))
            raise JobError(f"plug-in {name!r} is offered by {offered}: uninstall one of them")
        _loaded[group, name] = _imported(points[0])
    return _loaded[group, name]


def plugin_of(group: str, name: str, kind: type[AnyPlugin]) -> AnyPlugin:
    """As `load`, and a plug-in of another kind is none."""
    plugin = load(group, name)
    if not isinstance(plugin, kind):
        raise JobError(f"plug-in {name!r} is a {type(plugin).__name__}, and a {kind.__name__} is wanted here")
    return plugin


def resolved(path: str) -> Any:
    """What ``package.module:name`` or ``package.module`` names; raises `JobError` where there is nothing."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except (Exception, SystemExit) as error:  # a fault-tolerance point: whatever the user's module raises
        raise JobError(f"{path} of a plug-in does not load ({type(error).__name__}: {error})") from error


def _imported(point: importlib.metadata.EntryPoint) -> Plugin:
    try:
        plugin = point.load()
    except (Exception, SystemExit) as error:  # a fault-tolerance point: whatever the plug-in's module raises
        raise JobError(
            f"plug-in {point.name!r} of {_source(point)} does not load ({type(error).__name__}: {error}): "
            "mend or uninstall that package"
        ) from error
    if problem := _problem(point.group, point.name, plugin):
        raise JobError(f"plug-in {point.name!r} of {_source(point)}: {point.value} {problem}")
    return plugin  # type: ignore[no-any-return]


def _problem(group: str, name: str, plugin: Any) -> str:
    """What is wrong with a plug-in, or nothing."""
    if not isinstance(plugin, TYPES[group]):
        return f"is a {type(plugin).__name__}, not a {' or '.join(each.__name__ for each in TYPES[group])}"
    if not isinstance(plugin, ScorerPlugin | ObjectivePlugin):
        return ""
    spec: Any = plugin.spec
    if not (isinstance(spec, type) and issubclass(spec, Spec)):
        return "has a spec that is no subclass of volley.base.Spec"
    if kinds_of(spec) != {name}:
        return f"has a spec without the field kind: Literal[{name!r}]"
    if isinstance(plugin, ObjectivePlugin) and not {"center", "normalize"} <= spec.model_fields.keys():
        return "has a spec that is no subclass of volley.objectives.ObjectiveBase"
    return ""


def _source(point: importlib.metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def kinds_of(*specs: Any) -> frozenset[str]:
    """The kinds of spec classes: what their Literal ``kind`` may be."""
    return frozenset(
        kind for spec in specs if "kind" in spec.model_fields for kind in get_args(spec.model_fields["kind"].annotation)
    )


@dataclass(frozen=True, slots=True)
class OpenUnion:
    """After ``Field(discriminator="kind")`` of a union: the kinds of installed plug-ins belong to it, too.

    Attributes:
        beside: what the list of known kinds ends with, such as where other kinds belong.
    """

    group: str
    beside: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        closed, own = handler(source), kinds_of(*get_args(source))

        def validate(value: Any, inner: Callable[[Any], Any]) -> Any:
            kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
            if not isinstance(kind, str) or kind in own:
                return inner(value)
            return _open(self.group, kind, own, self.beside).model_validate(value)

        def serialize(value: Any, inner: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
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
    """After a Literal of names: the names of installed plug-ins of one kind belong to it, too."""

    kind: type[RecipePlugin] | type[ReaderPlugin]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        own = frozenset(get_args(source))

        def validate(value: Any, inner: Callable[[Any], Any]) -> Any:
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
    """The plug-in; where there is none the error lists all that is known."""
    if (group, name) not in _loaded and name not in installed(group):
        more = ", ".join(installed(group)) or "none"
        known = ", ".join(sorted(own)) + beside
        raise JobError(f"{name!r} is not known. Built in: {known}. Plug-ins installed: {more}")
    found: Plugin = plugin_of(group, name, kind)
    return found


def _working(group: str) -> dict[str, Plugin]:
    """The plug-ins that load, by name; `volley doctor` tells of the others."""
    found: dict[str, Plugin] = {}
    for name in installed(group):
        try:
            found[name] = load(group, name)
        except JobError:
            continue
    return found
