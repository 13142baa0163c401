"""Which small faults in a module do its tests not notice: `python -m benchmarks.mutants MODULE... -- TEST...`.

    python -m benchmarks.mutants volley/objectives/estimators.py -- tests/unit/objectives
    python -m benchmarks.mutants learner/loss.py -- tests/unit/learner/test_loss.py tests/unit/learner/test_reinforce.py

Each fault changes one operator, comparison, number, condition or call, or drops one statement. The tests run on it in a
process of their own, until the first of them fails. Faults that survive are printed with their line: some are
equivalent to the code, others are a missing test. `--every 3` tries a third of them, `--json` resumes where it ended.
"""

import argparse
import ast
import contextlib
import copy
import hashlib
import importlib.abc
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
from hypothesis import Phase

OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
CALLS = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "any": "all",
    "all": "any",
    "floor": "ceil",
    "ceil": "floor",
    "clip": "abs",
    "clamp": "abs",
    "sum": "mean",
    "mean": "sum",
    "cumsum": "cumprod",
    "exp": "expm1",
    "log": "log1p",
    "detach": "clone",
    "argsort": "argmax",
}
SECONDS = 240.0  # a fault that makes the tests run longer counts as noticed


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of a module."""

    line: int
    change: str


class _Planter(ast.NodeTransformer):
    """Walks a tree and changes the place numbered ``wanted``; -1 changes none and counts them."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.places, self.fault = wanted, 0, Fault(0, "")

    def _here(self, node: Any, change: str) -> bool:
        self.places += 1
        if self.places - 1 != self.wanted:
            return False
        self.fault = Fault(node.lineno, change)
        return True

    def _visit_body(self, node: Any) -> Any:
        """Leave out docstrings; drop statements that only change something."""
        self.generic_visit(node)
        body = []
        for statement in node.body:
            drops = isinstance(statement, ast.AugAssign) or (
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            )
            dropped = drops and self._here(statement, f"without {ast.unparse(statement)[:60]!r}")
            body.append(ast.copy_location(ast.Pass(), statement) if dropped else statement)
        node.body = body
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        decorators, node.decorator_list = node.decorator_list, []  # whether a dataclass is frozen is no behaviour
        self.generic_visit(node)
        node.decorator_list = decorators
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.returns, kept = None, node.args  # annotations are no code
        for argument in (*kept.args, *kept.kwonlyargs):
            argument.annotation = None
        return self._visit_body(node)

    def visit_If(self, node: ast.If) -> Any:
        return self._visit_body(node)

    def visit_For(self, node: ast.For) -> Any:
        return self._visit_body(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Raise(self, node: ast.Raise) -> Any:
        return node  # messages

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        other = OPERATORS.get(type(node.op))
        if other is not None and self._here(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        other = OPERATORS.get(type(node.op))
        if other is not None and self._here(node, f"{type(node.op).__name__} -> {other.__name__} in place"):
            node.op = other()
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        for index, operator in enumerate(node.ops):
            other = COMPARISONS[type(operator)]
            if self._here(node, f"{type(operator).__name__} -> {other.__name__}"):
                node.ops[index] = other()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        if self._here(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if self._here(node, f"without {type(node.op).__name__}"):
            return node.operand
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        if self._here(node, "branches swapped"):
            node.body, node.orelse = node.orelse, node.body
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        value = node.value
        if isinstance(value, bool):
            if self._here(node, f"{value} -> {not value}"):
                node.value = not value
        elif isinstance(value, int | float):
            other = value + 1 if isinstance(value, int) else (2 * value or 1.0)
            if self._here(node, f"{value} -> {other}"):
                node.value = other
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in CALLS and self._here(node, f"{name} -> {CALLS[name]}"):
            if isinstance(called, ast.Attribute):
                called.attr = CALLS[name]
            elif isinstance(called, ast.Name):
                called.id = CALLS[name]
        return node


def planted(tree: ast.Module, place: int) -> tuple[ast.Module, Fault]:
    """The tree with its fault numbered ``place``."""
    planter = _Planter(place)
    changed = planter.visit(copy.deepcopy(tree))
    return ast.fix_missing_locations(changed), planter.fault


def count(tree: ast.Module) -> int:
    """How many faults the tree can have."""
    planter = _Planter(-1)
    planter.visit(copy.deepcopy(tree))
    return planter.places


class _Faulty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a changed tree."""

    def __init__(self, name: str, file: Path, tree: ast.Module) -> None:
        self.name, self.file, self.tree = name, file, tree

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self.name:
            return None
        return ModuleSpec(fullname, self, origin=str(self.file))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self.file)
        exec(compile(self.tree, str(self.file), "exec"), vars(module))  # noqa: S102 - our own module, changed


def noticed(file: Path, tree: ast.Module, tests: Sequence[str]) -> str:
    """How the tests react to ``file`` with this tree: "failed", "slow", or "" if they pass."""
    process = multiprocessing.get_context("fork").Process(target=_judge, args=(file, tree, tuple(tests)))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return "slow"
    return "failed" if process.exitcode else ""


def _judge(file: Path, tree: ast.Module, tests: tuple[str, ...]) -> None:
    import pytest

    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    hypothesis.settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
    hypothesis.settings.load_profile("mutants")  # that a test fails is enough: no shrinking
    sys.meta_path.insert(0, _Faulty(".".join(file.with_suffix("").parts), file, tree))
    quiet = ("-q", "-x", "-p", "no:cacheprovider", "--assert=plain", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    os._exit(int(pytest.main([*tests, *quiet])))


def survivors(file: Path, tests: Sequence[str], every: int, done: dict[str, str], keep: Path | None) -> Iterator[Fault]:
    """Yield the faults that the tests do not notice.

    Args:
        done: outcomes by source and place, so that a changed source is tried anew.
        keep: file for ``done``, written after each fault.
    """
    tree = ast.parse(file.read_text())
    source = f"{file}:{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    places = range(0, count(tree), every)
    begun = time.perf_counter()
    for number, place in enumerate(places):
        changed, fault = planted(tree, place)
        key = f"{source}:{place}"
        if key not in done:
            done[key] = noticed(file, changed, tests)
            if keep is not None:
                keep.write_text(json.dumps(done, indent=1) + "\n")
        if not done[key]:
            print(f"{file}:{fault.line}: {fault.change}", flush=True)
            yield fault
        if number % 20 == 19:
            print(f"  {number + 1} of {len(places)}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", type=Path, metavar="MODULE")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try one fault in N")
    parser.add_argument("--json", type=Path, help="remember outcomes in this file")
    options, tests = parser.parse_args(given[:split]), given[split + 1 :]
    if not tests:
        parser.error("name the tests after --")
    for heavy in ("pytest", "numpy", "torch", "hypothesis", "transformers", "pydantic", "deepspeed"):
        with contextlib.suppress(ImportError):
            importlib.import_module(heavy)
    done: dict[str, str] = {}
    if options.json is not None and options.json.exists():
        done = json.loads(options.json.read_text())
    for file in options.modules:
        if problem := noticed(file, ast.parse(file.read_text()), tests):
            parser.error(f"the tests {problem} without any fault in {file}")
        left = list(survivors(file, tests, options.every, done, options.json))
        tried = len(range(0, count(ast.parse(file.read_text())), options.every))
        print(f"{file}: {tried} faults tried, {len(left)} survived")


if __name__ == "__main__":
    main()
