"""``python -m services.api.check_job < JOB`` checks a job and prints ``{"problem": "..."}`` as its last line."""

import json
import sys

from services.runs.run import prepare_alone
from volley.errors import VolleyError
from volley.job import JOB


def main() -> None:
    """Check a resolved job and all the files and code it names; the problem is "" if there is none."""
    problem = ""
    try:
        prepare_alone(JOB.validate_json(sys.stdin.buffer.read()))
    except VolleyError as error:
        problem = str(error) or type(error).__name__
    sys.stdout.write("\n" + json.dumps({"problem": problem}) + "\n")


if __name__ == "__main__":
    main()
