# ruff: noqa: T201 - a program for the sandbox prints its answer
"""Makes one symbolic comparison. Runs inside the sandbox, where it can be killed, and without gmpy2.

Standard input is {"gold", "answer"}, both LaTeX without delimiters. Prints ``equal`` or ``different``.
"""

import json
import logging
import sys

from math_verify import parse, verify

logging.disable(logging.CRITICAL)
request = json.loads(sys.stdin.read())
gold, answer = (parse(f"${request[name]}$", parsing_timeout=None) for name in ("gold", "answer"))
print("equal" if gold and answer and verify(gold, answer, timeout_seconds=None) else "different")
