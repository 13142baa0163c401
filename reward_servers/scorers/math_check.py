# ruff: noqa: T201 - a program of the sandbox: its answer is what it prints
"""One symbolic comparison. Runs inside the sandbox: a process of its own that can be killed, without gmpy2.

Standard input: {"gold", "answer"}, LaTeX without delimiters. Prints ``equal`` or ``different``.
"""

import json
import logging
import sys

from math_verify import parse, verify

logging.disable(logging.CRITICAL)
request = json.loads(sys.stdin.read())
gold, answer = (parse(f"${request[name]}$", parsing_timeout=None) for name in ("gold", "answer"))
print("equal" if gold and answer and verify(gold, answer, timeout_seconds=None) else "different")
