"""Functions as tools: what their signatures become, which cannot become a tool, and what the model sees of a call."""

import asyncio
import dataclasses
import enum
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from environments.tools.base import ToolProblem, as_text, shortened
from environments.tools.functions import Function, load_function
from volley.errors import JobError, ToolUnavailable
from volley.rollout import FunctionTool

HERE = __name__


class Unit(enum.Enum):
    METRES = "m"
    FEET = "ft"


@dataclasses.dataclass
class Place:
    lat: float
    lon: float = 0.0


def search(query: str, limit: int = 3, *, kinds: list[Literal["book", "page"]] | None = None) -> list[str]:
    """Search the archive.

    It knows everything.

    Args:
        query: words to look for,
            in any order.
        limit (int): most results.

    Returns:
        Titles.
    """
    return [f"{query} {number} {kinds}" for number in range(limit)]


async def measure(
    place: Place, unit: Unit = Unit.METRES, schema: Annotated[str, Field(description="which")] = "x"
) -> Any:
    """Measure a place."""
    return {"lat": place.lat, "unit": unit.value, "schema": schema}


def nothing() -> None:
    """Do nothing."""


def fails(how: str) -> object:
    """Fail."""
    match how:
        case "raise":
            raise KeyError("no such key")
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "cancelled":
            raise asyncio.CancelledError
        case "down":
            raise ToolUnavailable("the archive is down")
        case "sleep":
            RELEASE.wait(20)
    return {1, 2}


async def fails_later(how: str) -> object:
    """Fail."""
    match how:
        case "sleep":
            await asyncio.sleep(30)
        case "stubborn":
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(30)
            await asyncio.sleep(30)
        case "cancel":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(30)
        case _:
            return fails(how)
    return None


def unawaited(x: str) -> object:
    """Return a coroutine."""
    return fails_later(x)


RELEASE = threading.Event()


def tool(name: str, timeout: float = 10.0) -> Function:
    return load_function(FunctionTool(target=f"{HERE}:{name}", timeout_s=timeout))


async def use(function: Function, **given: Any) -> str:
    async with function.episode() as call:
        return (await call(given)).text


def test_a_signature_becomes_a_schema() -> None:
    function = tool("search")
    assert function.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the archive.\n\nIt knows everything.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "query": {"type": "string", "description": "words to look for, in any order."},
                    "limit": {"type": "integer", "description": "most results.", "default": 3},
                    "kinds": {
                        "anyOf": [
                            {"type": "array", "items": {"type": "string", "enum": ["book", "page"]}},
                            {"type": "null"},
                        ],
                        "default": None,
                    },
                },
                "required": ["query"],
            },
        },
    }


def test_nested_types_and_awkward_names() -> None:
    parameters = tool("measure").schema["function"]["parameters"]
    assert parameters["required"] == ["place"]
    assert parameters["$defs"]["Place"]["properties"] == {
        "lat": {"type": "number"},
        "lon": {"type": "number", "default": 0.0},
    }
    assert parameters["$defs"]["Unit"]["enum"] == ["m", "ft"]
    assert parameters["properties"]["schema"] == {"type": "string", "description": "which", "default": "x"}
    assert parameters["properties"]["unit"]["default"] == "m"
    assert tool("nothing").schema["function"]["parameters"]["properties"] == {}


def bounded(low: float = float("-inf"), high: float = 1.0, bounds: list[float] = [float("nan")]) -> None:  # noqa: B006
    """Bound it."""


def test_a_default_that_json_cannot_write_is_left_out() -> None:
    schema = tool("bounded").schema
    assert {name: part.get("default") for name, part in schema["function"]["parameters"]["properties"].items()} == {
        **{"low": None, "high": 1.0},
        "bounds": None,
    }
    json.dumps(schema, allow_nan=False)


async def test_calls() -> None:
    assert await use(tool("search"), query="a", limit="2") == '["a 0 None", "a 1 None"]'
    assert await use(tool("measure"), place={"lat": 1}, unit="ft") == '{"lat": 1.0, "unit": "ft", "schema": "x"}'
    assert await use(tool("nothing")) == ""
    assert await use(tool("fails"), how="") == "{1, 2}"


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("search", {}, "wrong arguments: query: Field required"),
        ("search", {"query": "a", "limit": "many"}, "wrong arguments: limit: Input should be a valid integer"),
        ("search", {"query": "a", "color": 1}, "wrong arguments: color: Extra inputs"),
        ("measure", {"place": {"lon": 1}}, "wrong arguments: place.lat: Field required"),
        ("fails", {"how": "raise"}, "KeyError: 'no such key'"),
        ("fails", {"how": "exit"}, "SystemExit: 3"),
        ("fails_later", {"how": "raise"}, "KeyError"),
        ("fails_later", {"how": "exit"}, "SystemExit"),
        ("fails", {"how": "interrupt"}, "KeyboardInterrupt"),
        ("fails", {"how": "cancelled"}, "CancelledError"),
        ("fails_later", {"how": "interrupt"}, "KeyboardInterrupt"),
        ("fails_later", {"how": "cancelled"}, "CancelledError"),
        ("fails_later", {"how": "cancel"}, "cancelled itself"),
    ],
)
async def test_what_the_model_sees_of_a_failure(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolProblem) as problem:
        await use(tool(name), **given)
    assert message in str(problem.value)


@pytest.mark.parametrize(("name", "how"), [("fails", "down"), ("fails_later", "down"), ("unawaited", "x")])
async def test_what_is_not_the_models_fault(name: str, how: str) -> None:
    with pytest.raises(ToolUnavailable):
        await use(tool(name), **({"how": how} if name != "unawaited" else {"x": how}))


async def test_time_outs_and_the_threads_they_leave() -> None:
    for name, how in (("fails_later", "sleep"), ("fails_later", "stubborn")):
        function, begun = tool(name, 0.1), time.monotonic()
        with pytest.raises(ToolProblem, match=r"took longer than 0\.1 s"):
            await use(function, how=how)
        assert time.monotonic() - begun < 10
        assert not function.stuck()
    function = tool("fails", 0.1)
    with pytest.raises(ToolProblem, match="took longer"):
        await use(function, how="sleep")
    assert function.stuck()
    RELEASE.set()
    async with asyncio.timeout(10):
        while function.stuck():  # noqa: ASYNC110 - nothing tells when a thread has ended
            await asyncio.sleep(0.01)


def no_docstring(x: int) -> int:
    return x


def untyped(x, y: int = 0):  # type: ignore[no-untyped-def]
    """Say so."""


def many(*words: str) -> None:
    """Say so."""


def more(**words: str) -> None:
    """Say so."""


def by_place(x: int, /) -> None:
    """Say so."""


def calls_back(then: Callable[[int], int]) -> None:
    """Say so."""


def shares(lock: threading.Thread) -> None:
    """Say so."""


def imagines(x: "Imaginary") -> None:  # type: ignore[name-defined]  # noqa: F821
    """Say so."""


def misspelt(fruit: str) -> None:
    """Say so.

    Args:
        friut: what to buy.
    """


def without_parameters() -> None:
    """Say so.

    Args:
        x: what it does not take.
    """


def by_dashes(fruit: str) -> None:
    """Say so.

    Args:
        - fruit, what to buy
    """


def empty(fruit: str) -> None:
    """Say so.

    Parameters:

    Returns:
        Nothing.
    """


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misspelt", "describes a parameter 'friut' that it does not have; did you mean fruit"),
        ("without_parameters", "describes a parameter 'x' that it does not have; there are none"),
        ("by_dashes", "Args: in its docstring names no parameter: write a line 'fruit: what it is'"),
        ("empty", "Parameters: in its docstring names no parameter"),
    ],
)
def test_a_docstring_that_describes_no_parameter(name: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        tool(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "has no function 'missing'"),
        ("Place", "is a class: name a function"),
        ("no_docstring", "has no docstring"),
        ("untyped", "parameter x has no type: write x: str, for example"),
        ("many", r"parameter \*words: str cannot be passed by name"),
        ("more", r"parameter \*\*words: str cannot be passed by name"),
        ("by_place", "parameter x: int cannot be passed by name"),
        ("calls_back", "parameter then: the type .* has no JSON schema: use str, int"),
        ("shares", "parameter lock: the type Thread has no JSON schema"),
        ("imagines", "its signature cannot be read .*Imaginary"),
    ],
)
def test_signatures_that_cannot_become_a_schema(name: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        tool(name)


def test_texts() -> None:
    assert as_text({"a": "ü"}) == '{"a": "ü"}'
    assert as_text(None) == ""
    ring: list[Any] = []
    ring.append(ring)
    assert as_text(ring) == "[[...]]"
    assert shortened("a" * 100, 100) == "a" * 100
    assert shortened("a" * 150 + "b" * 51, 100) == "a" * 50 + "\n... 101 characters left out ...\n" + "b" * 50
    assert shortened("\ud800", 100) == "\\ud800"
