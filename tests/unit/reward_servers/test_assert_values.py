"""No expectation meets a value of the program in what is evaluated in the sandbox."""

import ast
import builtins
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reward_servers.scorers.asserts import split_asserts

EXPECTED = 7919


class Spy:
    """A value that has every operation and method, and records what it is given.

    Args:
        own: the program's own function or object, whose arguments are the test's input.
    """

    def __init__(self, seen: list[Any], *, own: bool) -> None:
        self.seen, self.own = seen, own

    def __getattr__(self, name: str) -> "Spy":
        return Spy(self.seen, own=False) if name in ("count", "items") else self

    def __call__(self, *given: Any, **more: Any) -> "Spy":
        if not self.own:
            self.seen.append((given, more))
        return Spy(self.seen, own=True)

    def __getitem__(self, key: Any) -> "Spy":
        return self

    def __hash__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter([self, self])

    def __bool__(self) -> bool:
        return True


def _operation(spy: Spy, *others: Any) -> Spy:
    spy.seen.append(others)
    return spy


for operation in ("eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod"):
    setattr(Spy, f"__{operation}__", _operation)
for operation in ("contains", "neg", "pos", "abs", "round", "and", "rand", "or", "ror"):
    setattr(Spy, f"__{operation}__", _operation)


class OwnCalls(ast.NodeTransformer):
    """Calls the program's own functions, which may see whatever a test gives them, with 3."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node.func) in ("f", "s.m"):
            return ast.Call(node.func, [ast.Constant(3)], [])
        return self.generic_visit(node)


def spied(expression: str, setup: str) -> list[Any]:
    """What a program sees that has replaced every builtin, library and function of the test."""
    seen: list[Any] = []
    spy = Spy(seen, own=False)
    names: dict[str, Any] = {name: spy for name in dir(builtins) if name.islower() and not name.startswith("_")}
    names |= {"range": range, "slice": slice, "__import__": lambda *_: SimpleNamespace(isclose=spy, floor=spy)}
    space = {"__builtins__": names, "f": Spy(seen, own=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these programs ask if NotImplemented is true
        exec(setup, space)  # noqa: S102 - made of the strategies below
        seen.clear()
        eval(ast.unparse(OwnCalls().visit(ast.parse(expression, mode="eval"))), space)  # noqa: S307
    return seen


def shown(values: Any) -> bool:
    """Whether the expectation is anywhere in what was seen."""
    if isinstance(values, list | tuple | set | frozenset):
        return any(shown(each) for each in values)
    if isinstance(values, dict):
        return shown([*values, *values.values()])
    return isinstance(values, int | str) and str(EXPECTED) in str(values)


LEAVES = st.sampled_from(["f(2)", "r", "v", "f(r)", "s.m(3)", str(EXPECTED), "3"])
ONE = ["-{}", "not {}", "({},)", "[{}]", "{{{}}}", "abs({})", "len({})", "str({})", "sorted({})", "set({})", "bool({})"]
ONE += ["round({}, 2)", "math.floor({})", "{}[0]", "{}.items()", "[x for x in {}]", "[{} for _ in range(2)]", "s.m({})"]
ONE += ["','.join({})", "s.count({})", "isinstance({}, int)", "same({})", "f'{{{}}}'", "all(x for x in {})", "next({})"]
TWO = ["({} == {})", "({} - {})", "({} < {})", "({} in {})", "({}, {})", "[{}, {}]", "max({}, {})", "{}.count({})"]
TWO += ["{}.__eq__({})", "math.isclose({}, {})", "all(x == y for x, y in zip({}, {}))", "same({}, {})", "{}[{}]"]
TWO += ["({} if {} else 0)", "({} and {})", "[x for x in {} if x == {}]", "(lambda a: a == {})({})"]
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(str.format, st.sampled_from(ONE), inner) | st.builds(str.format, st.sampled_from(TWO), inner, inner)
    ),
    max_leaves=5,
)
LINES = ["r = f(2)", f"r = f(2) == {EXPECTED}", f"r = [f(1), {EXPECTED}]", "s.m(r)", "r = 3", "r, t = f(4)"]
LINES += ["v = []", "v.append(r)", f"v.append({EXPECTED})", "for r in [1, 2]:\n s.m(r)"]
SETUPS = st.lists(
    st.sampled_from(LINES) | st.builds("r = {}".format, EXPRESSIONS) | st.builds("s.m({})".format, EXPRESSIONS),
    max_size=3,
)
HEAD = "import math\nv = [3]\ndef same(a, b=0):\n    return a == b\ns = f(1)\nr = f(3)\n"


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@settings(deadline=None, max_examples=400)
@example(["r = (7919,)"], "abs([x for x in r])", "True")
@example([], f"s.m(abs({EXPECTED}))", "True")
@example(["v.append(r)", f"v.append({EXPECTED})"], "abs(v)", "True")
@example([], f"abs([{EXPECTED} for _ in range(2)])", "True")
@example(["r = [f for f in f(2)]"], f"r + [{EXPECTED}]", "True")
@given(SETUPS, EXPRESSIONS, st.sampled_from(["True", "0", "[True]", "'x'"]))
def test_what_is_evaluated_alone_never_shows_an_expectation(setup: list[str], left: str, right: str) -> None:
    """Except as an argument of the program's own functions, which no test can keep from them."""
    try:
        (split,) = split_asserts(f"{HEAD}{chr(10).join(setup)}\nassert {left} == {right}")
    except ValueError:
        return  # such as `f(2) = 3`, or a number that is called
    if split.weak:
        return
    try:
        seen = spied(split.expression, split.setup)
    except (TypeError, AttributeError, LookupError):
        return  # such as `3[0]`
    assert not shown(seen)


@pytest.mark.parametrize(
    "code",
    [
        "assert sorted(f(2)) == [1, 2]",
        "assert sorted(f(2), key=len, reverse=True) == ['ab', 'c']",
        "assert len(set(f(2))) == 2",
        "assert round(f(2), 3) == 3.142",
        "assert f(2)[0] == 1 and f(2)[-1] == 4",
        "assert f(2).x == 1",
        "assert f(2).lower() == 'a'",
        "assert ','.join(f(2)) == 'a,b'",
        "assert (f(2), f(3)) == (4, 9)",
        "assert [f(i) for i in range(3)] == [0, 1, 4]",
        "assert f([0] * 5, n=2 ** 10) == 4",
        "assert decode(encode('a'), 3) == 'a'",
        "n = 5\nassert f(n - 1) == 3",
        "cache = Cache(2)\ncache.put(1, 1)\nfor i in range(3):\n    cache.put(i, i)\nassert cache.get(1) == -1",
        "import math\nassert math.floor(f(2)) == 4",
        "got = f(2)\nassert got == {'a': 1}",
        "a, b = f(2)\nassert a == 1",
        "assert abs(f(2)[0] - 4) < 0.1",
    ],
)
def test_the_program_alone_answers_for_usual_assertions(code: str) -> None:
    assert not any(split.weak for split in split_asserts(code))


@pytest.mark.parametrize(
    "assertion",
    [
        "(f(2) == 4) == True",
        "(4 == f(2)) is True",
        "f(2) - 4 == 0",
        "f(2) % 4 == 0",
        "round(f(2) - 4, 3) == 0",
        "abs(f(2) - 4 - 0) < 0.1",
        "abs(f(2) - 4) == 0",
        "math.isclose(f(2), 4) == True",
        "all(x == y for x, y in zip(f(2), [1, 2])) == True",
        "(f(2) in [1, 2]) == True",
        "f(2).__eq__(4) == True",
        "f(2).count(4) == 1",
        "isinstance(f(2), int) == True",
        "[f(2) == 4] == [True]",
        "len({f(2), 4}) == 1",
        "len(set([f(2), 4])) == 1",
        "max(f(2), 4) == 4",
        "max(f(2), key=lambda each: each == 4) == 4",
        "max(f(2), key=same) == 4",
        "str(f(2) == 4) == 'True'",
        "sum(1 for x in f(2) if x == 4) == 1",
        "right == True",
        "len(pair) == 1",
        "same(f(2), 4) == True",
        "results == [True]",
        "math.isclose(f(2) - 4, 0)",
        "f(2) - 4 in [0]",
    ],
)
def test_an_expectation_that_meets_the_program_inside_makes_an_assertion_weak(assertion: str) -> None:
    setup = "right = f(2) == 4\npair = {f(2), 4}\nresults = []\nresults.append(f(2) == 4)\n"
    helper = "def same(a, b):\n    return a == b\n"
    (split,) = split_asserts(f"import math\n{setup}{helper}assert {assertion}")
    assert split.weak
