"""``python -m services.api.check_job < JOB``: what is wrong with it, as ``{"problem": "..."}`` on the last line."""

import json
import sys

from services.run import prepare_alone
from volley.errors import VolleyError
from volley.job import JOB


def main() -> None:
    """Read a resolved job, and all that it names."""
    problem = ""
    try:
        prepare_alone(JOB.validate_json(sys.stdin.buffer.read()))
    except VolleyError as error:
        problem = str(error) or type(error).__name__
    sys.stdout.write("\n" + json.dumps({"problem": problem}) + "\n")


if __name__ == "__main__":
    main()
