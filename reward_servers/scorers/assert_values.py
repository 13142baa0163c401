"""Tells which expressions of a test have the program's answer as their value, and nothing else.

Such an expression is evaluated in the sandbox, and its value is compared outside. In ``(f(2) == 4) == True`` or
``f(2) - 4 == 0`` the expectation would meet an object of the program inside, and that object would decide the result.
"""

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Builtins that turn one value into another: the program sees nothing there but its own values.
_CONVERTERS = frozenset({
    "abs", "all", "any", "bin", "bool", "bytes", "chr", "dict", "float", "frozenset", "hex", "int", "iter", "len",
    "list", "max", "min", "next", "oct", "ord", "repr", "reversed", "round", "set", "sorted", "str", "sum", "tuple",
})  # fmt: skip
# With an argument, these methods of built-in types compare it with what their object holds.
_QUERIES = frozenset({
    "count", "difference", "endswith", "find", "get", "index", "intersection", "isdisjoint", "issubset", "issuperset",
    "removeprefix", "removesuffix", "rfind", "rindex", "startswith", "strip", "symmetric_difference", "union",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Names:
    """What the names stand for that the test code binds; all others are builtins or the program's.

    Attributes:
        imported: modules and their contents.
        constants: values in which the program has no part.
        answers: values of the program, and variables of a comprehension.
        instances: those of `answers` that a class of the program made.
        other: anything else, such as helpers, which may contain an expectation.
        mixed: whether constants may stand beside answers in a list.
    """

    imported: frozenset[str] = frozenset()
    constants: frozenset[str] = frozenset()
    answers: frozenset[str] = frozenset()
    instances: frozenset[str] = frozenset()
    other: frozenset[str] = frozenset()
    mixed: bool = True

    @classmethod
    def of(cls, setup: Sequence[ast.stmt]) -> "Names":
        """The names after the statements before an assertion."""
        names = cls()
        for statement in setup:
            names = names._after(statement)
        return names

    def _after(self, statement: ast.stmt) -> "Names":
        match statement:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                return self._with("imported", {(each.asname or each.name).partition(".")[0] for each in aliases})
            case ast.Assign(targets=[(ast.Name() | ast.Tuple()) as target], value=value) if kind := _kind(value, self):
                made = self._with(kind, _stored(target))
                return replace(made, instances=made.instances | _stored(target)) if _constructs(value) else made
            case ast.Expr(value=value) if is_answer(value, self) and not _stores(value, self):
                return self if _is_constant(value, self) else self._with("answers", _mentioned(value) & self.constants)
            case ast.For(target=target, iter=values, body=body, orelse=[]) if kind := _kind(values, self):
                names = self._with(kind, _stored(target))
                for each in body:
                    names = names._after(each)
                return names
        return self._with("other", _mentioned(statement) & (self.answers | self.constants) | _stored(statement))

    def _with(self, kind: str, names: set[str] | frozenset[str]) -> "Names":
        """These names, and no longer what they were before; what was ``other`` once stays so."""
        kept = {each: getattr(self, each) - names for each in ("imported", "constants", "answers", "instances")}
        if kind != "other":
            kept[kind] |= names - self.other
            return replace(self, **kept)
        return replace(self, **kept, other=self.other | names)


def is_answer(node: ast.expr, names: Names) -> bool:
    """Whether the value is the program's own answer, or a constant, with no expectation combined with it inside."""
    match node:
        case ast.Name(id=name):
            return name not in names.other
        case ast.Attribute(value=base, attr=attribute):
            return not _special(attribute) and is_answer(base, names)
        case ast.Subscript(value=base, slice=key):
            return is_answer(base, names) and is_answer(key, names)
        case ast.Slice():
            parts = (node.lower, node.upper, node.step)
            return all(part is None or is_answer(part, names) for part in parts)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return is_answer(operand, names)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            mixture = len({_is_constant(each, names) for each in elements}) > 1
            return (names.mixed or not mixture) and all(is_answer(each, names) for each in elements)
        case ast.ListComp(elt=element, generators=loops) | ast.GeneratorExp(elt=element, generators=loops):
            inside = _in_comprehension(loops, names)
            return inside is not None and is_answer(element, inside)
        case ast.Call():
            return _is_answering_call(node, names)
    return _is_constant(node, names)


def _is_answering_call(node: ast.Call, names: Names) -> bool:
    function = node.func
    if isinstance(function, ast.Name):
        name = function.id
        if name in names.other:
            return False
        if name in names.imported:
            return _given_one_answer(node, names)
        if name in names.answers or not hasattr(builtins, name):
            return True  # the program's own function, which may see any argument
        if name == "range":
            return not node.keywords and all(is_answer(each, names) for each in node.args)
        if name == "round" and len(node.args) == 2 and _is_constant(node.args[1], names):
            return not node.keywords and _own(node.args[0], names)
        return name in _CONVERTERS and _given_one_answer(node, names)
    return isinstance(function, ast.Attribute) and _is_answering_method(node, function, names)


def _is_answering_method(node: ast.Call, method: ast.Attribute, names: Names) -> bool:
    base, name = method.value, method.attr
    if _special(name):
        return False
    if isinstance(base, ast.Constant):
        return name in ("format", "join") and _given_one_answer(node, names)
    if _root(base) in names.imported:
        return _given_one_answer(node, names)
    if not is_answer(base, names):
        return False
    return name not in _QUERIES or not (node.args or node.keywords) or _is_instance(base, names)


def _given_one_answer(node: ast.Call, names: Names) -> bool:
    """Whether the only argument is of the program, beside keywords such as ``reverse=True`` and ``key=len``."""
    return len(node.args) == 1 and _own(node.args[0], names) and all(_kind(each.value, names) for each in node.keywords)


def _stores(node: ast.expr, names: Names) -> bool:
    """Whether a method, such as a list's ``append``, may keep what is not the program's answer."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    given = [*node.args, *(each.value for each in node.keywords)]
    return not all(_kind(each, names) for each in given) and not _is_instance(node.func.value, names)


def _kind(value: ast.expr, names: Names) -> str:
    """The attribute of `Names` that a variable with this value belongs to; "" for ``other``."""
    if _is_constant(value, names):
        return "constants"
    return "answers" if _own(value, names) else ""


def _own(node: ast.expr, names: Names) -> bool:
    return not _is_constant(node, names) and is_answer(node, replace(names, mixed=False))


def _in_comprehension(loops: list[ast.comprehension], names: Names) -> Names | None:
    """The names inside a comprehension, or None if it filters or runs over anything but answers."""
    for loop in loops:
        kind = _kind(loop.iter, names)
        if loop.ifs or loop.is_async or not kind:
            return None
        names = replace(names, other=names.other - _stored(loop.target))._with(kind, _stored(loop.target))
    return names


def _is_instance(node: ast.expr, names: Names) -> bool:
    return _constructs(node) or (isinstance(node, ast.Name) and node.id in names.instances)


def _constructs(node: ast.expr) -> bool:
    """Whether the expression calls what is named as a class is."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper()


def _is_constant(node: ast.expr, names: Names) -> bool:
    """Whether the program has no part in the value."""
    return _mentioned(node) <= names.constants


def _mentioned(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _stored(node: ast.AST) -> set[str]:
    """The names that a statement or a target binds."""
    nodes = list(ast.walk(node))
    defined = {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    assigned = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    imported = {(each.asname or each.name).partition(".")[0] for each in nodes if isinstance(each, ast.alias)}
    return defined | assigned | imported


def _root(node: ast.expr) -> str:
    """The name that a dotted name begins with; "" for any other expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _special(name: str) -> bool:
    return name.startswith("__")
