"""vLLM imported for an engine that compiles nothing, in six seventh of the time."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from volley.imports import without, without_collection


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Import what ``TORCH_COMPILE_DISABLE`` makes run eagerly without the compiler that would not compile it.

    vLLM decorates functions with ``torch.compile`` and patches inductor as it is imported; either imports inductor.
    """
    with without_collection():
        import torch

        kept, torch.compile = torch.compile, _compile
        try:
            with without("torch._inductor.lowering"):
                yield
        finally:
            torch.compile = kept


def _compile(model: Any = None, **_options: Any) -> Any:
    """Stand in for ``torch.compile``, as a function and as a decorator."""
    return _same if model is None else model


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
