"""One episode in a process of its own, for `volley check`. ``python -m environments.trial`` reads a request from stdin.

What the program prints goes to standard error; the answer, one JSON object, to standard output.
"""

import asyncio
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from environments.outside.programs import OutsidePrograms, start_programs
from environments.programs import Programs, timed
from volley.errors import HostError, JobError, WorkerDied
from volley.processes import die_with_parent, take_stdout
from volley.rollout import EnvironmentWorkersSpec, Rollout, ToolsRollout


async def episode(asked: dict[str, Any]) -> dict[str, Any]:
    """The outcome of one episode as JSON; ``error`` if the program could not be started."""
    try:
        rollout = TypeAdapter(Rollout).validate_python(asked["rollout"])
        spec = EnvironmentWorkersSpec.model_validate(asked["workers"])
        programs = await _started(rollout, asked["timeout_s"], spec)
    except (JobError, HostError, WorkerDied) as problem:
        return {"error": str(problem)}
    ended = await timed(programs.run(asked["row"], asked["base_url"], asked["api_key"]))
    if not ended.stuck:
        await programs.close()
    return asdict(ended.outcome)


async def _started(rollout: Rollout, timeout_s: float, spec: EnvironmentWorkersSpec) -> Programs | OutsidePrograms:
    if not isinstance(rollout, ToolsRollout):
        return await start_programs(rollout, timeout_s, spec)
    from environments.tools.loop import open_loop  # as in the worker

    tools = await asyncio.to_thread(open_loop, rollout)
    return Programs(tools.solve, timeout_s, owner=tools)


def main() -> None:
    """Run the episode that standard input describes."""
    die_with_parent()
    answers = take_stdout()
    asked = json.loads(sys.stdin.read())
    sys.path[:0] = [path for path in asked["import_path"] if path not in sys.path]
    answers.write(json.dumps(asyncio.run(episode(asked))) + "\n")
    answers.flush()
    os._exit(0)  # a thread of the program may still run


if __name__ == "__main__":
    main()
