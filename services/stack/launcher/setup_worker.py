"""Ray runs this script, whose name it demands, for every worker with a runtime environment.

A worker whose environment names a fork server is forked from it; any other is left to Ray's own script of that name.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="
READ_LATER = ("RAY_", "VOLLEY_")  # beginnings of variables that nothing reads before the fork; the server lacks Ray


def main() -> None:
    """Start the worker whose command line is this script's, and end as it does."""
    sys.path.pop(0)  # this folder
    given = sys.argv[1:]
    variables = _variables(given)
    try:
        from volley import forking
        from volley.processes import die_with_parent
    except ImportError:
        _as_ray_would(given)
    # Any other variable might change what has been imported already.
    late = all(name.startswith(READ_LATER) for name in variables)
    if not late or not forking.server_of_this_code(variables, forking.FROM):
        _as_ray_would(given)
    die_with_parent()
    os.environ.update(variables)
    forking.fork_from(variables[forking.FROM], otherwise_own=False)
    command = [part for part in given if not part.startswith((CONTEXT, LANGUAGE))]
    worker = forking.Context().Process(target=forking.run_script, args=(command,))
    try:
        worker.start()
    except forking.NoServer:
        _as_ray_would(given)
    worker.join()
    sys.exit(worker.exitcode)


def _variables(given: Sequence[str]) -> dict[str, str]:
    """The variables of a runtime environment that has nothing but variables; none of any other."""
    context = json.loads(next((part.removeprefix(CONTEXT) for part in given if part.startswith(CONTEXT)), "{}"))
    plain = os.path.realpath(context.get("py_executable", "")) == os.path.realpath(sys.executable) and not any(
        context.get(name) for name in ("command_prefix", "override_worker_entrypoint", "java_jars")
    )
    return dict(context["env_vars"]) if plain else {}


def _as_ray_would(given: Sequence[str]) -> NoReturn:
    """Become Ray's script, which lies beside the worker's."""
    script = Path(given[0]).with_name(Path(__file__).name)
    os.execv(sys.executable, [sys.executable, str(script), *given])


if __name__ == "__main__":
    main()
