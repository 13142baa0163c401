# ruff: noqa: S102, S307 - runs inside the sandbox, where model-written code belongs
"""Calls a function of a model-written program and prints the result. Runs inside the sandbox as the program.

Standard input is one JSON object: the program's ``source``, ``setup`` code to run after it, and either ``expression``
or ``function`` with ``args`` and ``kwargs``. Standard output is one JSON value (see ``values.py``). This process does
not know the expected value, so whatever the program does to it can only change the program's own answer.
"""

import json
import os
import sys
import types
from typing import Any

CHUNK = 1 << 16


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    os.dup2(2, 1)  # the program's prints must not mix with the answer
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        code = compile(request["source"], "solution.py", "exec")
    except (SyntaxError, ValueError) as problem:
        reply(answer, {"compile_error": f"{type(problem).__name__}: {problem}"})
        return
    exec(code, module.__dict__)
    exec(request.get("setup", ""), module.__dict__)
    if "expression" in request:
        value = eval(request["expression"], module.__dict__)
    else:
        value = find(module, request["function"])(*request["args"], **request["kwargs"])
    reply(answer, {"value": encode(value)})


def find(module: types.ModuleType, name: str) -> Any:
    """Return a function of the program, or else a method of its class ``Solution``."""
    if name in vars(module):
        return vars(module)[name]
    return getattr(vars(module)["Solution"](), name)


def reply(fd: int, answer: dict[str, Any]) -> None:
    data = memoryview(json.dumps(answer).encode())
    while data:
        data = data[os.write(fd, data[:CHUNK]) :]


def encode(value: Any) -> Any:
    """Return ``value`` as JSON that preserves Python's types."""
    if value is None or value is True or value is False or type(value) is str:
        return value
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__.removeprefix("frozen"): [encode(item) for item in value]}
    return encode(value.item()) if hasattr(value, "item") else {"other": repr(value)[:200]}


if __name__ == "__main__":
    main()
