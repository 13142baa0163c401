"""One definition of each operation for both forms of the client.

An operation is a generator: it yields `Request`s, is sent the answers, and returns the result. It does no input or
output itself, so `Client` runs it to its end and `AsyncClient` awaits it. A watch does the same for a live stream: it
says what to request, and what to make of each line.

    @operation
    def view(self) -> Operation[RunView]: ...

    client_run.view()            -> RunView
    await async_client_run.view() -> RunView
"""

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import httpx

from volley.errors import ApiError, ServerAway

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
ItemOut = TypeVar("ItemOut", covariant=True)


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the server.

    Attributes:
        timeout: seconds that the answer may take; None for the client's own limit.
        delay: seconds to wait before sending it.
    """

    method: str
    path: str
    params: Mapping[str, object] = field(default_factory=dict)
    json: Mapping[str, object] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None
    delay: float = 0.0


Operation = Generator[Request, httpx.Response, T]


class Watch(Protocol[ItemOut]):
    """A live stream, read line by line over any number of connections."""

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be read."""
        ...

    def request(self) -> Request:
        """Return the request that opens the next connection."""
        ...

    def take(self, line: str) -> Iterable[ItemOut]:
        """Return the items that a line completes."""
        ...

    def lost(self, error: ServerAway | ApiError) -> None:
        """A connection failed. Return to try again; raise to give up."""
        ...


class Blocking:
    """Base of what runs operations to their end."""

    def _run(self, steps: Operation[T]) -> T:
        raise NotImplementedError

    def _watch(self, watch: Watch[T]) -> Iterator[T]:
        raise NotImplementedError


class Awaiting:
    """Base of what awaits operations."""

    async def _run(self, steps: Operation[T]) -> T:
        raise NotImplementedError

    def _watch(self, watch: Watch[T]) -> AsyncIterator[T]:
        raise NotImplementedError


Owner = Blocking | Awaiting


class operation(Generic[P, T]):  # noqa: N801 - used as a decorator
    """A method that is blocking on a `Blocking` object and a coroutine function on an `Awaiting` one."""

    def __init__(self, steps: Callable[Concatenate[Any, P], Operation[T]]) -> None:
        self.steps = steps
        self.__doc__ = steps.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> "operation[P, T]": ...
    @overload
    def __get__(self, owner: Blocking, kind: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, owner: Awaiting, kind: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, owner: Owner | None, kind: type) -> Any:
        if owner is None:
            return self
        return _method(self.steps, lambda *args, **kwargs: owner._run(self.steps(owner, *args, **kwargs)))


class watch(Generic[P, Item]):  # noqa: N801 - used as a decorator
    """A method that returns an iterator on a `Blocking` object and an asynchronous iterator on an `Awaiting` one."""

    def __init__(self, make: Callable[Concatenate[Any, P], Watch[Item]]) -> None:
        self.make = make
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> "watch[P, Item]": ...
    @overload
    def __get__(self, owner: Blocking, kind: type) -> Callable[P, Iterator[Item]]: ...
    @overload
    def __get__(self, owner: Awaiting, kind: type) -> Callable[P, AsyncIterator[Item]]: ...
    def __get__(self, owner: Owner | None, kind: type) -> Any:
        if owner is None:
            return self
        return _method(self.make, lambda *args, **kwargs: owner._watch(self.make(owner, *args, **kwargs)))


def _method(function: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``call`` the name, the documentation and the parameters of ``function``, without ``self``."""
    functools.update_wrapper(call, function)
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    call.__dict__["__signature__"] = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return call
