"""The public API equals tests/fixtures/public_api.txt: names, parameters, defaults and annotations.

A change here breaks users' code. If that is intended, update the file and say so in CHANGELOG.md:

    python -m tests.unit.test_public_api > tests/fixtures/public_api.txt
"""

import ast
import difflib
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import volley.objectives

FIXTURE = Path(__file__).parents[1] / "fixtures" / "public_api.txt"
REGENERATE = "python -m tests.unit.test_public_api > tests/fixtures/public_api.txt"
WORDING = {"description", "title", "examples"}  # arguments of `Field` that do not affect its type

# What users import, by module; () stands for the module's `__all__` or, without one, all its public names.
PUBLIC: dict[str, tuple[str, ...]] = {
    "volley.objectives": (),
    "volley.client": (),
    "volley.integrations.trl": (),
    "volley.integrations.verl": ("register",),
    "volley.integrations.skyrl": ("register",),
    "volley.integrations.rllm": ("register",),
    "volley.integrations.openrlhf": ("install", "KSampleExperienceMaker"),
    "volley.integrations.groups": ("mean_advantages",),
    "reward_servers.client": (),
    "volley.plugins": ("ScorerPlugin", "ObjectivePlugin", "RecipePlugin", "ReaderPlugin"),
    # What plug-ins subclass, implement and call; see docs/extending.md and examples/plugin.
    "volley.base": ("Spec",),
    "volley.records": ("Prompt", "Verdict", "VerdictStatus"),
    "volley.scoring": ("RewardValues",),
    "volley.data": ("RecipeOptions",),
    "reward_servers.scorers.base": ("Scorer", "passed_or", "row_error"),
    "services.data.readers": ("Row",),
    "services.data.recipes.base": ("Recipe", "Dropped", "place", "text"),
}


def test_the_public_api_is_unchanged() -> None:
    changes = difflib.unified_diff(
        FIXTURE.read_text().splitlines(), page().splitlines(), "tests/fixtures/public_api.txt", "the code", lineterm=""
    )
    report = "\n".join(changes)
    assert not report, f"the public API has changed; if that is intended, run: {REGENERATE}\n{report}"


def test_the_table_of_objectives_is_complete() -> None:
    section = FIXTURE.read_text().split("# volley.client")[0]
    found = set(re.findall(r"^(?:@\w+ )?(?:class |def )?(\w+)", section, flags=re.MULTILINE))
    assert set(volley.objectives.__all__) <= found


def page() -> str:
    return "\n".join(line for module, names in PUBLIC.items() for line in _section(module, names)) + "\n"


def _section(module: str, names: tuple[str, ...]) -> Iterator[str]:
    yield f"# {module}"
    for name in names or _public_names(module):
        yield from _definition(module, name)
    yield ""


def _public_names(module: str) -> list[str]:
    """The module's ``__all__`` or, without one, the classes and functions defined in it."""
    body = _tree(module).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    defined = (node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return [name for name in defined if not name.startswith("_")]


def _definition(module: str, name: str) -> Iterator[str]:
    lines = [line for node in _tree(module).body for line in _lines(module, node, name)]
    if not lines:
        raise LookupError(f"{module} does not define {name}")
    yield from lines


def _lines(module: str, node: ast.stmt, name: str) -> Iterator[str]:
    """The statements of ``module`` that define ``name``; a function with overloads has several."""
    match node:
        case ast.ImportFrom(module=str(source)) if name in {each.asname or each.name for each in node.names}:
            yield from _definition(source, name)
        case ast.ClassDef(name=found) if found == name:
            yield f"class {name}({', '.join(map(ast.unparse, node.bases))})"
            yield from (f"    {line}" for line in _members(module, node).values())
        case ast.FunctionDef(name=found) if found == name:
            yield _signature(node)
        case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if found == name:
            yield ast.unparse(_Unworded().visit(node))


def _members(module: str, node: ast.ClassDef) -> dict[str, str]:
    """Public members by name, including those of private bases in the same module."""
    members: dict[str, str] = {}
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    private_bases = [ast.unparse(base) for base in bases if ast.unparse(base).startswith("_")]
    for other in _tree(module).body:
        if isinstance(other, ast.ClassDef) and other.name in private_bases:
            members |= _members(module, other)
    for item in node.body:
        match item:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                members[name] = ast.unparse(_Unworded().visit(item))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                members[name] = _signature(item)
    return {name: text for name, text in members.items() if name == "__init__" or not name.startswith("_")}


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    marks = "".join(f"@{ast.unparse(each)} " for each in node.decorator_list)
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{marks}{word} {node.name}({ast.unparse(node.args)}){returns}"


class _Unworded(ast.NodeTransformer):
    """Removes the arguments of ``Field`` that only people read."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) == "Field":
            node.keywords = [each for each in node.keywords if each.arg not in WORDING]
        return node


@cache
def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.stdout.write(page())
