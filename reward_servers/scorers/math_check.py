# ruff: noqa: T201 - a program for the sandbox prints its answer
"""Makes one symbolic comparison. Runs inside the sandbox, where it can be killed, and without gmpy2.

Standard input is {"gold", "answer"}, both LaTeX without delimiters. Prints ``equal`` or ``different``.
"""

import json
import logging
import sys

from math_verify import LatexExtractionConfig, parse, verify


def equal(gold: str, answer: str) -> bool:
    """Compare two answers. The sample's must be LaTeX as a whole: a number that merely begins it does not count."""
    expected = parse(f"${gold}$", parsing_timeout=None)
    given = parse(f"${answer}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return bool(expected and given and verify(expected, given, timeout_seconds=None))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    request = json.loads(sys.stdin.read())
    print("equal" if equal(request["gold"], request["answer"]) else "different")
