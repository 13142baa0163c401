"""Splits assert-style tests into a call, made inside the sandbox, and an expectation, checked outside.

In ``assert f(2) == 4``, the program could return an object whose ``==`` is always true. After the split, the sandbox
evaluates ``f(2)`` and returns the value as JSON, and 4 never enters it. An assertion that cannot be split so is
evaluated inside as a whole and marked as weak; ``assert_values.py`` says what may be evaluated alone.
"""

import ast
import builtins
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reward_servers.scorers.assert_values import Names, is_answer
from reward_servers.scorers.values import Check, near, same
from volley.syntax import syntax_tree

MAX_CODE = 500_000  # characters
MAX_DEPTH = 100  # of the syntax tree
MAX_ASSERTS = 1000  # each runs the program once
MAX_SETUP = 16_000_000  # characters: the setups of all assertions together
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True, slots=True)
class SplitAssert:
    """One assertion.

    Attributes:
        setup: preceding statements, run in the sandbox after the program.
        expression: evaluated in the sandbox.
        check: returns whether the value of the expression is correct.
        weak: the assertion is decided in the sandbox, where the program could influence it.
    """

    setup: str
    expression: str
    check: Check
    weak: bool = False


def split_asserts(code: str, candidate: str | None = None) -> list[SplitAssert]:
    """Return the assertions of trusted test code, at its top level or in the body of a ``check(candidate)`` function.

    Raises:
        ValueError: the code does not parse, is too long or nested too deeply, or contains no assert or too many.
    """
    if len(code) > MAX_CODE:
        raise ValueError(
            f"test code of {len(code)} characters, and it may have {MAX_CODE}: compute large values in it, or write "
            'calls with their results as {"function", "args", "expected"}'
        )
    try:
        tree = syntax_tree(code)
    except SyntaxError as problem:
        raise ValueError(f"test code does not parse: {problem}") from problem
    except (RecursionError, MemoryError) as problem:  # the parser may report deep nesting as MemoryError
        raise ValueError("test code is nested too deeply") from problem
    if _deeper_than(tree, MAX_DEPTH):
        raise ValueError(f"test code is nested deeper than {MAX_DEPTH}")
    return _split_all(tree.body, candidate)


def _deeper_than(tree: ast.AST, limit: int) -> bool:
    nodes = [tree]
    for _ in range(limit):
        nodes = [child for node in nodes for child in ast.iter_child_nodes(node)]
    return bool(nodes)


def check_total(splits: Sequence[SplitAssert]) -> None:
    """Raise ValueError if a problem has more assertions than are run, or their setups are too long together."""
    if len(splits) > MAX_ASSERTS:
        raise ValueError(f"{len(splits)} or more assertions: a problem may have {MAX_ASSERTS}, so write fewer")
    if sum(len(each.setup) for each in splits) > MAX_SETUP:
        raise ValueError(
            f"the statements before each assertion, which run again for it, come to more than {MAX_SETUP} characters: "
            "write fewer assertions or shorter statements, or put the assertions into a loop"
        )


def _split_all(body: list[ast.stmt], candidate: str | None) -> list[SplitAssert]:
    setup = [f"candidate = {candidate}"] if candidate else []
    names, found = Names(), list[SplitAssert]()
    for statement in _flatten(body):
        if isinstance(statement, ast.Assert):
            before = "\n".join(setup)
            found += [SplitAssert(before, *parts) for parts in _split(statement.test, names)]
        elif _asserts_inside(statement):
            weak = "\n".join([*setup, ast.unparse(statement)])
            found.append(SplitAssert(weak, "True", lambda value: value is True, weak=True))
        else:
            setup.append(ast.unparse(statement))
            names.add(statement)
            continue
        check_total(found)
    if not found:
        raise ValueError("test code contains no assert")
    return found


def _flatten(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, with ``def check(candidate)`` replaced by its body and ``check(f)`` calls left out."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check":
            yield from statement.body
        elif not _calls_check(statement):
            yield statement


def _calls_check(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Name)
        and statement.value.func.id == "check"
    )


def _asserts_inside(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _split(test: ast.expr, names: Names) -> Iterator[tuple[str, Check, bool]]:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for part in test.values:
            yield from _split(part, names)
        return
    parts = _comparison(test, names) or _closeness(test, names)
    if parts is not None:
        yield (*parts, False)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and _is_plain_call(test.operand, names):
        yield ast.unparse(test.operand), lambda value: not value, False
    elif _is_plain_call(test, names):
        yield ast.unparse(test), bool, False
    else:
        yield f"bool({ast.unparse(test)})", lambda value: value is True, True


def _is_plain_call(test: ast.expr, names: Names) -> bool:
    """Return whether the expression calls a function of the program on literals and names, as in ``f(3, x)``.

    The truth of such a call can be judged outside. Calls of builtins or helpers, as in ``all(f(i) == i for i in ...)``,
    are excluded: they may compare an expectation with an object of the program, which controls the result.
    """
    if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Name)):
        return False
    if names.kinds.get(test.func.id, "constants") != "constants" or hasattr(builtins, test.func.id):
        return False
    given = [*test.args, *(keyword.value for keyword in test.keywords)]
    return all(_literal(each) is not None or isinstance(each, ast.Name) for each in given)


def _comparison(test: ast.expr, names: Names) -> tuple[str, Check] | None:
    """Split ``f(x) == literal``, in either order, and the similar ``is``, ``in`` and ``abs(f(x) - c) < literal``."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        return None
    left, op, right = test.left, test.ops[0], test.comparators[0]
    if isinstance(op, ast.Eq | ast.Is) and _literal(left) is not None and _literal(right) is None:
        left, right = right, left
    literal = _literal(right)
    if literal is None or _literal(left) is not None:
        return None
    wanted = literal[0]
    if isinstance(op, ast.Eq | ast.Is):
        return (ast.unparse(left), lambda value: same(value, wanted)) if is_answer(left, names) else None
    if isinstance(op, ast.Lt | ast.LtE) and (difference := _difference(left, names)) is not None:
        call, centre = difference
        compare = _ORDER[type(op)]
        return call, lambda value: _is_number(value) and _within(compare, value, centre, wanted)
    if isinstance(op, ast.In) and isinstance(wanted, list | tuple | set) and is_answer(left, names):
        return ast.unparse(left), lambda value: any(same(value, item) for item in wanted)
    return None


def _difference(node: ast.expr, names: Names) -> tuple[str, Any] | None:
    """Return (call, number) for ``abs(call - number)`` or ``abs(number - call)``, else None."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "abs" and node.args):
        return None
    inner = node.args[0]
    if not (isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub)):
        return None
    for call, number in ((inner.left, inner.right), (inner.right, inner.left)):
        literal = _literal(number)
        if literal is not None and _is_number(literal[0]) and _literal(call) is None and is_answer(call, names):
            return ast.unparse(call), literal[0]
    return None


def _closeness(test: ast.expr, names: Names) -> tuple[str, Check] | None:
    """Split ``math.isclose(call, number, rel_tol=..., abs_tol=...)``; None for anything else."""
    if not (
        isinstance(test, ast.Call) and ast.unparse(test.func) in ("math.isclose", "isclose") and len(test.args) == 2
    ):
        return None
    call, number = test.args if _literal(test.args[1]) is not None else reversed(test.args)
    literal = _literal(number)
    options = {keyword.arg: _literal(keyword.value) for keyword in test.keywords}
    if literal is None or not is_answer(call, names) or _literal(call) is not None:
        return None
    values: list[Any] = [option and option[0] for option in options.values()]
    if not all(map(_is_number, [literal[0], *values])):
        return None
    tolerance = max([*values, 1e-9])
    return ast.unparse(call), lambda value: _is_number(value) and near(value, literal[0], tolerance)


def _literal(node: ast.expr) -> tuple[Any] | None:
    """Return the value of a literal as a 1-tuple, or None if the node is not a literal."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _within(compare: Callable[[Any, Any], bool], value: Any, centre: Any, wanted: Any) -> bool:
    try:
        return bool(compare(abs(value - centre), wanted))
    except OverflowError:  # an integer too large for a float
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
