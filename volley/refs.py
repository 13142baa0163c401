"""References to objects in Ray's object store, typed without importing Ray."""

from collections.abc import Generator
from typing import Any, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Ref(Protocol[T_co]):
    """A reference to one object, such as ``Ref[Group]``; awaiting it fetches the object. `ray.ObjectRef` is one."""

    def __await__(self) -> Generator[Any, None, T_co]: ...
