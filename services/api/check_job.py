"""``python -m services.api.check_job < JOB`` checks a job and prints what it found as its last line, in JSON.

``{"problem": "...", "memory_bytes": 0, "largest_bytes": 0}``: what is wrong, or "", and the memory of `Needs`
(0 for a job on GPUs).
"""

import json
import sys

from services.jobs.needs import needs_of
from services.runs.run import prepare_alone
from volley.errors import VolleyError
from volley.job import JOB


def main() -> None:
    """Check a resolved job and all the files and code it names."""
    found = {"problem": "", "memory_bytes": 0, "largest_bytes": 0}
    try:
        job = JOB.validate_json(sys.stdin.buffer.read())
        prepare_alone(job)
        needs = needs_of(job)
        if not needs.gpus:  # with GPUs, most of it is not the host's
            found |= {"memory_bytes": needs.memory_bytes, "largest_bytes": needs.largest_bytes}
    except VolleyError as error:
        found["problem"] = str(error) or type(error).__name__
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
