"""Reads tasks that reasoning-gym generates.

They are made in a process of their own, without randomised hashing: five of its sets depend on the order of Python
sets, and a resumed run has to get the same prompts.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from services.data.readers import Row
from volley.data import SourceSpec
from volley.errors import HostError, JobError

TAGS = ("set", "level")


def read_generated(spec: SourceSpec) -> Iterator[Row]:
    """Yield the tasks of a source with a ``generator``; each has ``prompt``, ``answer``, ``task``, ``set``, ``level``.

    Raises:
        HostError: reasoning-gym is not installed.
        JobError: it has no such set, or refuses its config or level.
    """
    importable = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "services.data.generate"],
        input=spec.model_dump_json(include={"sets", "size", "seed"}),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": importable, "PYTHONHASHSEED": "0", "MPLBACKEND": "agg"},
    )
    if "No module named 'reasoning_gym'" in done.stderr:
        raise HostError("this data needs reasoning-gym: pip install 'volley-rl[reasoning-gym]'")
    if done.returncode:
        raise HostError(f"the process that generates data failed: {done.stderr.strip()[-400:]}")
    place = Path(f"{spec.generator}-{spec.seed}")
    for number, line in enumerate(done.stdout.splitlines(), 1):
        fields = json.loads(line)
        if "problem" in fields:
            raise JobError(f"data.sets: {fields['problem']}")
        yield Row(place, number, fields)
