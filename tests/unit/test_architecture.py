"""The shape of the source tree: rooms that import in one direction, seams with types."""

from collections import Counter
from pathlib import Path

from benchmarks.architecture import GENERATED, arrows, bare_any, circle, functions, rooms, words

MOST_BARE_ANY = 30
MOST_LINES = 400
MOST_WORDS = 28_000
ONE_FILE = "reward_servers/sandbox/zygote.py"  # the sandbox holds this file and nothing beside it


def test_the_rooms_of_services_import_in_one_direction() -> None:
    assert circle(arrows()) == []
    assert len(arrows()) <= 60


def test_reading_order_names_every_room() -> None:
    import services

    for room in rooms():
        assert room in (services.__doc__ or ""), f"services/__init__.py does not list {room}"


def test_seams_have_types() -> None:
    found = bare_any()
    assert len(found) < MOST_BARE_ANY, "\n".join(found)


def test_files_and_functions_stay_short() -> None:
    root = Path(__file__).parents[2]
    packages = ("volley", "actors", "environments", "learner", "reward_servers", "services")
    long = [file for folder in packages for file in (root / folder).rglob("*.py") if _lines(file) > MOST_LINES]
    assert [str(file.relative_to(root)) for file in long] in ([], [ONE_FILE])
    assert functions()[0][0] <= 70


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports test files by name alone, so two of one suite can't share one."""
    for suite in ("unit", "integration"):
        names = Counter(file.name for file in (Path(__file__).parents[1] / suite).rglob("test_*.py"))
        assert [name for name, count in names.items() if count > 1] == []


def test_a_circle_and_an_arrow_are_seen(tmp_path: Path) -> None:
    _write(tmp_path, "a", "from services.b import x")
    _write(tmp_path, "b", "def f():\n    import services.c.d")
    _write(tmp_path, "c", "import json\nfrom services.c import d")
    found = arrows(root=tmp_path)
    assert dict(found) == {("a", "b"): 1, ("b", "c"): 1}
    assert circle(found) == []
    _write(tmp_path, "c", "from services import a")
    assert sorted(set(circle(arrows(root=tmp_path)))) == ["a", "b", "c"]
    assert rooms(root=tmp_path) == ["a", "b", "c"]


def test_a_bare_any_is_seen(tmp_path: Path) -> None:
    code = "def f(a: Any, b: dict[str, Any], *c: Any, d: int) -> Any:\n    e: Any = 1\n    g: int\n"
    _write(tmp_path, "a", code)
    assert sorted(each.rsplit(" ", 1)[1] for each in bare_any(tmp_path)) == ["a", "c", "e"]
    assert functions(tmp_path) == [(3, "services/a/code.py:1 f")]


def test_the_pages_are_short() -> None:
    """A page that grows can lose what another says, or what only the record of benchmarks needs."""
    pages = words()
    assert pages.keys() >= GENERATED
    assert sum(count for name, count in pages.items() if name not in GENERATED) <= MOST_WORDS


def test_words_are_those_of_the_pages(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("one two\nthree")
    (tmp_path / "docs" / "page.md").write_text("# four five")
    assert words(tmp_path) == {"README.md": 3, "page.md": 3}


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def _write(root: Path, room: str, code: str) -> None:
    folder = root / "services" / room
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "code.py").write_text(code)
