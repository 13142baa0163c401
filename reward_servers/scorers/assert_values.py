"""Tells which expressions of a test have the program's answer as their value, and nothing else.

Such an expression is evaluated in the sandbox, and its value is compared outside. In ``(f(2) == 4) == True`` or
``f(2) - 4 == 0`` the expectation would meet an object of the program inside, and that object would decide the result.
"""

import ast
import builtins
from collections import ChainMap
from dataclasses import dataclass, field, replace

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
# These methods of built-in types put their arguments into their object.
_STORING = frozenset({"add", "append", "appendleft", "extend", "insert", "setdefault", "update"})
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, slots=True)
class Names:
    """What the names stand for that the test code binds; all others are builtins or the program's.

    Attributes:
        kinds: the kind of each name: ``imported`` (modules and their contents), ``constants`` (values in which the
            program has no part), ``answers`` (values of the program, and variables of a comprehension), ``instances``
            (answers that a class of the program made) or ``other``, such as helpers, which may contain an expectation.
        mixed: whether constants may stand beside answers in a list.
    """

    kinds: ChainMap[str, str] = field(default_factory=ChainMap)
    mixed: bool = True

    def add(self, statement: ast.stmt) -> None:
        """Take up what a statement binds, in time linear in its size."""
        match statement:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                self._bind("imported", {(each.asname or each.name).partition(".")[0] for each in aliases})
            case ast.Assign(targets=[(ast.Name() | ast.Tuple()) as target], value=value) if kind := _kind(value, self):
                self._bind("instances" if _constructs(value) else kind, _stored(target))
            case ast.Expr(value=value) if is_answer(value, self) and not (_stores(value, self) or _mixes(value, self)):
                if not _is_constant(value, self):
                    self._bind("answers", {name for name in _mentioned(value) if self.kinds.get(name) == "constants"})
            case ast.For(target=target, iter=values, body=body, orelse=[]) if kind := _kind(values, self):
                self._bind(kind, _stored(target))
                for each in body:
                    self.add(each)
            case _:
                kept = (None, "imported")
                used = {name for name in _mentioned(statement) if self.kinds.get(name) not in kept}
                self._bind("other", used | _stored(statement))

    def inside(self, kind: str, variables: set[str]) -> "Names":
        """These names, with the variables of a comprehension."""
        return replace(self, kinds=self.kinds.new_child(dict.fromkeys(variables, kind)))

    def _bind(self, kind: str, names: set[str]) -> None:
        """Let the names stand for values of this kind; what was ``other`` once stays so."""
        self.kinds.update({name: kind for name in names if self.kinds.get(name) != "other"})


def is_answer(node: ast.expr, names: Names) -> bool:
    """Whether the value is the program's own answer, or a constant, with no expectation combined with it inside."""
    match node:
        case ast.Name(id=name):
            return names.kinds.get(name) != "other"
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
            if not names.mixed and len({_is_constant(each, names) for each in elements}) > 1:
                return False
            return all(is_answer(each, names) for each in elements)
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
        kind = names.kinds.get(name)
        if kind == "other":
            return False
        if kind == "imported":
            return _given_one_answer(node, names)
        if kind in ("answers", "instances") or not hasattr(builtins, name):
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
    if names.kinds.get(_root(base)) == "imported":
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


def _mixes(node: ast.expr, names: Names) -> bool:
    """Whether a method of built-in collections puts constants beside answers."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _STORING):
        return False
    base, given = node.func.value, [*node.args, *(each.value for each in node.keywords)]
    return not _is_instance(base, names) and len({_is_constant(each, names) for each in (base, *given)}) > 1


def _kind(value: ast.expr, names: Names) -> str:
    """The kind of a variable with this value; "" for ``other``."""
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
        names = names.inside(kind, _stored(loop.target))
    return names


def _is_instance(node: ast.expr, names: Names) -> bool:
    return _constructs(node) or (isinstance(node, ast.Name) and names.kinds.get(node.id) == "instances")


def _constructs(node: ast.expr) -> bool:
    """Whether the expression calls what is named as a class is."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper()


def _is_constant(node: ast.expr, names: Names) -> bool:
    """Whether the program has no part in the value."""
    return all(names.kinds.get(name, "constants" if name == "range" else "") == "constants" for name in _free(node))


def _free(node: ast.AST) -> set[str]:
    """The names that an expression takes from outside, which the variables of its comprehensions are not."""
    if not any(isinstance(each, _COMPREHENSIONS) for each in ast.walk(node)):
        return _mentioned(node)
    if not isinstance(node, _COMPREHENSIONS):
        return set().union(*map(_free, ast.iter_child_nodes(node)))
    loops, values = node.generators, node.generators[0].iter
    elements = [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.comprehension)]
    inside = [*elements, *(part for loop in loops for part in ast.iter_child_nodes(loop) if part is not values)]
    bound = set().union(*(_stored(loop.target) for loop in loops))
    # What it runs over is evaluated outside, where the same name may stand for something else.
    return _free(values) | set().union(*map(_free, inside)) - bound


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
