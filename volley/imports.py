"""Imports made cheap at the start of a process, and imports of functions that a job names."""

import contextlib
import difflib
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from volley.errors import JobError


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector: an import leaves next to no garbage, and collections take a seventh of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def without(*packages: str) -> Iterator[None]:
    """Let imports of ``packages`` fail, as if they were not installed. Has no effect on those imported already."""
    absent = [name for name in packages if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def function_named(target: str, key: str) -> Callable[..., Any]:
    """Import the function ``package.module:function`` that a job names under ``key``.

    Raises:
        JobError: the module does not import, or has no such function.
    """
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as problem:  # the module's own code may raise anything
        raise JobError(
            f"{key} {target!r}: module {module_name!r} does not import ({type(problem).__name__}: {problem}); "
            "put it next to the job file or install it"
        ) from problem
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [each for each, value in vars(module).items() if callable(value)], n=1)
        meant = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise JobError(f"{key} {target!r}: {module_name!r} has no function {name!r}{meant}")
    return function
