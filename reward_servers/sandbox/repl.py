# ruff: noqa: S102 - this program stands in for the interpreter's own loop
"""The program that an `Interpreter` runs in its sandbox: executes cells in one namespace until its input ends.

A cell arrives as a line ``TOKEN LENGTH CPU_SECONDS`` and LENGTH bytes. When it has been executed, a line with a zero
byte and TOKEN is written to both outputs, to standard error behind `RAISED` if the cell raised an exception. Code in a
cell shares the process and can forge that line, or break this loop, but only its own episode sees the result.
"""

import linecache
import os
import resource
import signal
import sys
import traceback
import types

RAISED = b"\0raised"


def main() -> None:
    cells = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # so that input() in a cell ends at once, and takes no cell
    scope = types.ModuleType("__main__")
    sys.modules["__main__"] = scope
    number = 0
    while line := cells.readline():
        token, length, cpu_s = line.split()
        number += 1
        _limit(float(cpu_s))
        returned = _execute(cells.read(int(length)), f"cell {number}", scope)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        mark = b"\0" + token + b"\n"
        os.write(2, mark if returned else RAISED + mark)
        os.write(1, mark)


def _limit(cpu_s: float) -> None:
    """Let this process use ``cpu_s`` more processor seconds, as a whole number, before it is killed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = int(usage.ru_utime + usage.ru_stime + cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if most < 0 else min(wanted, most), most))


def _execute(source: bytes, name: str, scope: types.ModuleType) -> bool:
    """Execute a cell; returns whether it came to its end without an exception."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    text = source.decode("utf-8", "backslashreplace")
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    try:
        exec(compile(source, name, "exec", dont_inherit=True), scope.__dict__)
    except BaseException as problem:  # noqa: BLE001 - the model is to see whatever its code raises
        inner = problem.__traceback__.tb_next if problem.__traceback__ else None
        traceback.print_exception(type(problem), problem, inner)
        return False
    return True


main()
