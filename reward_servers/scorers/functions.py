"""The user's reward functions: how they are imported, and what their signature says of how they are called."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

from volley.errors import JobError
from volley.imports import function_named

RewardFunction = Callable[[Any, dict[str, Any]], Any]
Takes = Literal["sample", "group"]


def load_function(target: str) -> RewardFunction:
    """Import the function named by ``package.module:function``.

    Raises:
        JobError: it cannot be imported, or cannot be called with a sample, or samples, and a row.
    """
    function = function_named(target, "scorer target")
    if any(test(inspect.unwrap(function)) for test in (inspect.isgeneratorfunction, inspect.isasyncgenfunction)):
        raise JobError(f"scorer target {target!r}: the function yields; it must return its rewards")
    try:
        signature = inspect.signature(function)
    except ValueError:  # built in, without a signature
        return function
    try:
        signature.bind(None, None)
    except TypeError as problem:
        raise JobError(
            f"scorer target {target!r} takes {signature}: write (sample, row) for one sample, or (samples, row) for "
            "the whole group"
        ) from problem
    return function


def is_async(function: RewardFunction) -> bool:
    """Whether calling the function gives a coroutine; also for partials and instances with an async ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    called = getattr(function, "__call__", None)  # noqa: B004 - the method itself is looked at
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def takes_group(function: RewardFunction, takes: str | None) -> bool:
    """Whether one call scores the whole group: as ``takes`` says or, if None, as the first parameter's name says."""
    if takes is not None:
        return takes == "group"
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return False
    return next(iter(parameters), "") == "samples"
