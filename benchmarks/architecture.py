"""Size up the source tree: `python -m benchmarks.architecture`.

Prints the rooms of ``services/`` and the arrows between them (an arrow: at least one module of the first room imports
from the second), how many parameters and attributes are annotated with a bare ``Any``, the longest files and
functions, and the words of the documentation. Needs nothing installed; runs in seconds.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("volley", "actors", "environments", "learner", "reward_servers", "services")
LONGEST = 5  # files and functions printed
GENERATED = frozenset({"configuration.md", "metrics.md"})

Arrow = tuple[str, str]


def sources(folders: Iterable[str], root: Path = ROOT) -> Iterator[Path]:
    """Every Python file below ``folders``, in order."""
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


def arrows(package: str = "services", root: Path = ROOT) -> Counter[Arrow]:
    """How many imports lead from each room of ``package`` to each other one; a room is a direct child."""
    counts: Counter[Arrow] = Counter()
    for file in sources((package,), root):
        room = _room(".".join(file.relative_to(root).with_suffix("").parts), package)
        for name in _imported(ast.parse(file.read_text())):
            target = _room(name, package)
            if room and target and target != room:
                counts[room, target] += 1
    return counts


def rooms(package: str = "services", root: Path = ROOT) -> list[str]:
    """The direct children of ``package`` that hold Python code."""
    children = (root / package).iterdir()
    return sorted(each.stem for each in children if any(each.rglob("*.py")) or _is_module(each))


def circle(found: Iterable[Arrow]) -> list[str]:
    """Rooms that import each other in a circle, first and last the same; empty where there is no circle."""
    graph: dict[str, set[str]] = {}
    for source, target in found:
        graph.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def bare_any(root: Path = ROOT) -> list[str]:
    """``file:line name`` of every parameter, attribute or variable of the packages whose whole annotation is `Any`."""
    found = []
    for file in sources(PACKAGES, root):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.arg | ast.AnnAssign) and ast.unparse(node.annotation or node) == "Any":
                name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
                found.append(f"{file.relative_to(root)}:{node.lineno} {name}")
    return found


def functions(root: Path = ROOT) -> list[tuple[int, str]]:
    """Lines of every function of the packages and where it is, longest first."""
    found = []
    for file in sources(PACKAGES, root):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append((lines, f"{file.relative_to(root)}:{node.lineno} {node.name}"))
    return sorted(found, reverse=True)


def words(root: Path = ROOT) -> dict[str, int]:
    """Words of README and of each page of the documentation."""
    return {page.name: len(page.read_text().split()) for page in (root / "README.md", *sorted(root.glob("docs/*.md")))}


def main() -> None:
    found = arrows()
    print(f"services/: {len(rooms())} rooms, {len(found)} arrows, circle: {' -> '.join(circle(found)) or 'none'}")
    for room in rooms():
        below = sorted(target for source, target in found if source == room)
        print(f"  {room:12} imports {', '.join(below) or 'no other room'}")
    unsure = bare_any()
    print(f"bare Any: {len(unsure)}")
    for where in unsure:
        print(f"  {where}")
    lengths = sorted(((len(file.read_text().splitlines()), file) for file in sources(PACKAGES)), reverse=True)
    print(f"files: {len(lengths)}, median {lengths[len(lengths) // 2][0]} lines; the longest:")
    for lines, file in lengths[:LONGEST]:
        print(f"  {lines:4} {file.relative_to(ROOT)}")
    print("functions, the longest:")
    for lines, where in functions()[:LONGEST]:
        print(f"  {lines:4} {where}")
    pages = words()
    generated = sum(pages[name] for name in GENERATED)
    written = sum(pages.values()) - generated
    print(f"documentation: {written} words on {len(pages) - len(GENERATED)} pages; {generated} more are generated")


def _room(module: str, package: str) -> str:
    """The room that ``module`` belongs to; empty for the package itself and for other packages."""
    first, *rest = module.removesuffix(".__init__").split(".")
    return rest[0] if first == package and rest else ""


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" and path.stem != "__init__"


def _imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


if __name__ == "__main__":
    main()
