"""A user's function as a tool.

    def search(query: str, limit: int = 3) -> list[str]:
        '''Search the archive.

        Args:
            query: words to look for.
        '''

becomes the tool ``search`` with the JSON schema of its parameters. The model's arguments are checked against the types
before the function is called.
"""

import asyncio
import concurrent.futures
import contextlib
import difflib
import inspect
import json
import re
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any, NotRequired, cast, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from environments.programs import is_own_cancellation, named
from environments.tools.base import Seen, ToolProblem, Use, as_text, described
from volley.errors import JobError, ToolUnavailable
from volley.imports import function_named
from volley.rollout import FunctionTool

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*$", re.M)
_PARAMETER = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_CANCEL_S = 1.0  # for a coroutine to end after it was cancelled
_PROBLEM = 300  # characters of an exception that the model sees


class Function:
    """A tool that calls ``function``: an ``async def`` on the episodes' loop, a plain one in a thread per call."""

    def __init__(
        self, function: Callable[..., Any], schema: Mapping[str, Any], arguments: TypeAdapter[Any], timeout_s: float
    ) -> None:
        self.schema = schema
        self.name = str(schema["function"]["name"])
        self._function, self._arguments, self._timeout = function, arguments, timeout_s
        self._late: set[threading.Thread] = set()

    @contextlib.asynccontextmanager
    async def episode(self) -> AsyncIterator[Use]:
        """Nothing is kept between calls."""
        yield self._call

    def stuck(self) -> bool:
        self._late = {thread for thread in self._late if thread.is_alive()}
        return bool(self._late)

    def close(self) -> None:
        """Nothing to end."""

    async def _call(self, given: Mapping[str, Any]) -> Seen:
        try:
            arguments = self._arguments.validate_python(given)
        except ValidationError as problem:
            raise ToolProblem(_wrong_arguments(problem)) from None
        answer = await (
            self._await(arguments) if inspect.iscoroutinefunction(self._function) else self._thread(arguments)
        )
        if inspect.iscoroutine(answer):
            answer.close()
            raise ToolUnavailable(f"tool {self.name} returned something to await: declare it with async def")
        return Seen(as_text(answer))

    async def _await(self, arguments: Mapping[str, Any]) -> object:
        async def call() -> object:
            try:
                return await self._function(**arguments)
            except BaseException as problem:
                if is_own_cancellation(problem):
                    raise
                raise _seen(problem) from problem

        running = asyncio.ensure_future(call())
        try:
            done, _ = await asyncio.wait({running}, timeout=self._timeout)
        finally:
            running.cancel()  # does nothing to a call that has ended
        if not done:
            await asyncio.wait({running}, timeout=_CANCEL_S)
            raise self._timed_out()
        if running.cancelled():
            raise ToolProblem("the tool cancelled itself")
        return running.result()

    async def _thread(self, arguments: Mapping[str, Any]) -> object:
        running: concurrent.futures.Future[object] = concurrent.futures.Future()

        def call() -> None:
            try:
                running.set_result(self._function(**arguments))
            except BaseException as problem:  # noqa: BLE001 - the user's function failed, not the worker
                running.set_exception(_seen(problem))

        thread = threading.Thread(target=call, name=f"tool {self.name}", daemon=True)
        thread.start()
        waiting = asyncio.wrap_future(running)
        done, _ = await asyncio.wait({waiting}, timeout=self._timeout)
        if not done:
            self._late.add(thread)
            raise self._timed_out()
        return waiting.result()

    def _timed_out(self) -> ToolProblem:
        return ToolProblem(f"the tool took longer than {self._timeout:g} s")


def _seen(problem: BaseException) -> Exception:
    """What an exception of the user's function becomes; the log gets the traceback."""
    if isinstance(problem, ToolUnavailable):
        return problem
    traceback.print_exception(problem)
    return ToolProblem(named(problem)[:_PROBLEM])


def _wrong_arguments(problem: ValidationError) -> str:
    """The first few problems with the arguments, in words that the model can act on."""
    found = [f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in problem.errors()[:3]]
    return f"wrong arguments: {'; '.join(found)}"


def load_function(spec: FunctionTool) -> Function:
    """The tool that ``spec`` names.

    Raises:
        JobError: it cannot be imported, or its signature cannot become a schema; says what to write instead.
    """
    where = f"tool {spec.target!r}"
    function = function_named(spec.target, "rollout.tools")
    if inspect.isclass(function):
        raise JobError(f"{where} is a class: name a function")
    text = inspect.getdoc(function) if inspect.isroutine(function) else None
    if not text:
        raise JobError(f"{where} has no docstring, which tells the model what the tool does: write one")
    description, about = _read_docstring(text)
    types, defaults = _parameters(function, where, about)
    _check_described(text, about, list(types), where)
    arguments = TypeAdapter(_typed_dict(types))
    parameters = _plain(arguments.json_schema())
    for name, value in defaults.items():
        with contextlib.suppress(ValueError, TypeError):  # a default that JSON cannot write is left out
            json.dumps(written := to_jsonable_python(value), allow_nan=False)
            parameters["properties"][name]["default"] = written
    return Function(
        function, described(spec.target.partition(":")[2], description, parameters), arguments, spec.timeout_s
    )


def _parameters(
    function: Callable[..., Any], where: str, about: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, object]]:
    """The type of each parameter, with its description, and the defaults there are; raises `JobError`."""
    try:
        signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    except (NameError, TypeError, ValueError, AttributeError) as problem:
        raise JobError(
            f"{where}: its signature cannot be read ({problem}): use types that its module imports"
        ) from None
    types: dict[str, Any] = {}
    defaults: dict[str, object] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise JobError(
                f"{where}: parameter {parameter} cannot be passed by name: give each parameter a name of its own"
            )
        if name not in hints:
            raise JobError(f"{where}: parameter {name} has no type: write {name}: str, for example")
        _check_type(hints[name], f"{where}: parameter {name}")
        types[name] = Annotated[hints[name], Field(description=about[name])] if name in about else hints[name]
        if parameter.default is not parameter.empty:
            types[name], defaults[name] = NotRequired[types[name]], parameter.default
    return types, defaults


def _check_described(text: str, about: Mapping[str, str], parameters: list[str], where: str) -> None:
    """Raise `JobError` if the docstring's ``Args:`` describes what is no parameter, or nothing that could be read."""
    for name in about:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(parameters) or 'none'}"
            raise JobError(f"{where}: its docstring describes a parameter {name!r} that it does not have; {meant}")
    if parameters and not about and (section := _args_section(text)) is not None:
        raise JobError(
            f"{where}: {section}: in its docstring names no parameter: write a line '{parameters[0]}: what it is' "
            f"below it, indented, or leave {section}: out"
        )


def _check_type(hint: object, where: str) -> None:
    try:
        TypeAdapter(cast(type[object], hint)).json_schema()
    except (PydanticUserError, TypeError, ValueError, NotImplementedError, AttributeError):
        name = getattr(hint, "__name__", str(hint))
        raise JobError(
            f"{where}: the type {name} has no JSON schema: use str, int, float, bool, list, dict, Literal, an Enum, a "
            "dataclass or a pydantic model"
        ) from None


def _typed_dict(types: Mapping[str, Any]) -> Any:
    """A type whose values are the keyword arguments, and which has no others."""
    made = cast(Any, TypedDict)("Arguments", dict(types))
    made.__pydantic_config__ = ConfigDict(extra="forbid")
    return made


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the titles that pydantic derives from names."""

    def cut(part: object, *, of_names: bool = False) -> object:
        if isinstance(part, dict):
            kept = {
                key: value for key, value in part.items() if of_names or key != "title" or not isinstance(value, str)
            }
            return {
                key: cut(value, of_names=key in ("properties", "$defs") and not of_names) for key, value in kept.items()
            }
        return [cut(each) for each in part] if isinstance(part, list) else part

    plain = cut(schema)
    assert isinstance(plain, dict)
    return {"type": "object", "properties": {}, **plain}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says before its first section, and about each parameter under ``Args:``."""
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    lines = sections.get(_args_section(text) or "", "")
    about: dict[str, str] = {}
    name, indent = "", None
    for line in filter(str.strip, lines.splitlines()):
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        found = _PARAMETER.match(line.strip()) if depth == indent else None
        if found:
            name = found[1]
            about[name] = found[2]
        elif name:
            about[name] = f"{about[name]} {line.strip()}".strip()
    return parts[0].strip(), about


def _args_section(text: str) -> str | None:
    """The name of the docstring's section about parameters; None without one."""
    found = _SECTION.findall(text)
    return next((name for name in ("Args", "Arguments", "Parameters") if name in found), None)
