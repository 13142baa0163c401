"""Assert-style tests split into a call, made inside the sandbox, and an expectation, checked outside.

An in-process ``assert f(2) == 4`` trusts whatever ``==`` the program returns. Split, ``f(2)`` is evaluated inside, its
value leaves as JSON, and 4 never enters. What can not be split is evaluated inside as a whole and marked weak.
"""

import ast
import builtins
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from reward_servers.scorers.values import Check, near, same

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
        setup: statements before it, run inside after the program.
        expression: evaluated inside.
        check: value -> is it right.
        weak: the decision itself is made inside, where the program could influence it.
    """

    setup: str
    expression: str
    check: Check
    weak: bool = False


def split_asserts(code: str, candidate: str | None = None) -> list[SplitAssert]:
    """The assertions of trusted test code, at its top level or in the body of a ``check(candidate)`` function.

    Raises:
        ValueError: the code does not parse or asserts nothing.
    """
    try:
        body = ast.parse(code).body
    except SyntaxError as problem:
        raise ValueError(f"test code does not parse: {problem}") from problem
    setup: list[ast.stmt] = []
    found: list[SplitAssert] = []
    for statement in _flatten(body):
        if isinstance(statement, ast.Assert):
            before = _source(setup, candidate)
            found += [SplitAssert(before, *parts) for parts in _split(statement.test, _bound(setup))]
        elif _asserts_inside(statement):
            weak = _source([*setup, statement], candidate)
            found.append(SplitAssert(weak, "True", lambda value: value is True, weak=True))
        else:
            setup.append(statement)
    if not found:
        raise ValueError("test code holds no assert")
    return found


def _flatten(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements themselves; of ``def check(candidate)`` its body, of a bare ``check(f)`` call nothing."""
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


def _source(statements: list[ast.stmt], candidate: str | None) -> str:
    lines = [f"candidate = {candidate}"] if candidate else []
    return "\n".join([*lines, *(ast.unparse(statement) for statement in statements)])


def _bound(setup: list[ast.stmt]) -> frozenset[str]:
    """Names that the test code itself gives a meaning."""
    nodes = [node for statement in setup for node in ast.walk(statement)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {(alias.asname or alias.name).partition(".")[0] for alias in nodes if isinstance(alias, ast.alias)}
    return frozenset(defined | assigned | imported)


def _split(test: ast.expr, bound: frozenset[str]) -> Iterator[tuple[str, Check, bool]]:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for part in test.values:
            yield from _split(part, bound)
        return
    parts = _comparison(test) or _closeness(test)
    if parts is not None:
        yield (*parts, False)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and _only_asks(test.operand, bound):
        yield ast.unparse(test.operand), lambda value: not value, False
    elif _only_asks(test, bound):
        yield ast.unparse(test), bool, False
    else:
        yield f"bool({ast.unparse(test)})", lambda value: value is True, True


def _only_asks(test: ast.expr, bound: frozenset[str]) -> bool:
    """``f(3, x)``: the program's own function, asked about plain values.

    Of a builtin or a helper, as in ``all(f(i) == i for i in ...)``, the program could make what it likes, and an
    expectation among the arguments would be compared by what it returned.
    """
    if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Name)):
        return False
    if test.func.id in bound or hasattr(builtins, test.func.id):
        return False
    given = [*test.args, *(keyword.value for keyword in test.keywords)]
    return all(_literal(each) is not None or isinstance(each, ast.Name) for each in given)


def _comparison(test: ast.expr) -> tuple[str, Check] | None:
    """``f(x) == literal`` and its kin, either way around."""
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
        difference = _difference(left)
        if difference is not None:  # abs(f(x) - 4) == 0
            return None
        return ast.unparse(left), lambda value: same(value, wanted)
    if isinstance(op, ast.Lt | ast.LtE) and (difference := _difference(left)) is not None:
        call, centre = difference
        compare = _ORDER[type(op)]
        return call, lambda value: _is_number(value) and bool(compare(abs(value - centre), wanted))
    if isinstance(op, ast.In) and isinstance(wanted, list | tuple | set):
        return ast.unparse(left), lambda value: any(same(value, item) for item in wanted)
    return None


def _difference(node: ast.expr) -> tuple[str, Any] | None:
    """(call, number) of ``abs(call - number)`` or ``abs(number - call)``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "abs" and node.args):
        return None
    inner = node.args[0]
    if not (isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub)):
        return None
    for call, number in ((inner.left, inner.right), (inner.right, inner.left)):
        literal = _literal(number)
        if literal is not None and _is_number(literal[0]) and _literal(call) is None:
            return ast.unparse(call), literal[0]
    return None


def _closeness(test: ast.expr) -> tuple[str, Check] | None:
    """``math.isclose(call, number, rel_tol=..., abs_tol=...)``."""
    if not (
        isinstance(test, ast.Call) and ast.unparse(test.func) in ("math.isclose", "isclose") and len(test.args) == 2
    ):
        return None
    call, number = test.args if _literal(test.args[1]) is not None else reversed(test.args)
    literal = _literal(number)
    options = {keyword.arg: _literal(keyword.value) for keyword in test.keywords}
    if literal is None or _literal(call) is not None or not all(options.values()):
        return None
    values = [option[0] for option in options.values() if option is not None]
    tolerance = max([*values, 1e-9] if values else [1e-9])
    return ast.unparse(call), lambda value: _is_number(value) and near(value, literal[0], tolerance)


def _literal(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal in a 1-tuple, None where the node is none."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
