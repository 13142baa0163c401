"""Parses Python code in programs that have threads."""

import ast

TRIES = 5


def syntax_tree(code: str) -> ast.Module:
    """`ast.parse`, called again if another thread may have disturbed it.

    Up to Python 3.11.7 and 3.12.1 all threads share one count of nesting while trees are built, and the interpreter may
    change threads then, in a finaliser: the count does not fit at the end, or seems too high. Each call sets it anew.

    Raises:
        SyntaxError, RecursionError, MemoryError, ValueError: as `ast.parse`.
    """
    for _ in range(TRIES):
        try:
            return ast.parse(code)
        except (SystemError, RecursionError):  # "AST constructor recursion depth mismatch"
            continue
    return ast.parse(code)
