"""The tree drawn at the top of volley/errors.py matches the classes."""

import inspect
import re
from dataclasses import dataclass

import pytest

from volley import errors

LINE = re.compile(r"^(?P<indent>[│ ├└─]*)(?P<name>\w+)(?: \((?P<standard>\w+)\))?(?: {2,}(?P<meaning>\S.*))?$")
INDENT = 4  # characters per level


@dataclass(frozen=True)
class Drawn:
    """One line of the tree: the parent, and the standard exception that the class also inherits from."""

    parent: str
    standard: str | None
    meaning: str | None


def drawn(text: str) -> dict[str, Drawn]:
    """The tree in ``text`` by class name; a class without a parent derives from `Exception`."""
    classes: dict[str, Drawn] = {}
    path: list[str] = []
    for line in filter(None, text.splitlines()):
        if match := LINE.match(line):
            depth = len(match["indent"]) // INDENT
            path = [*path[:depth], match["name"]]
            parent = path[depth - 1] if depth else "Exception"
            assert match["name"] not in classes, f"{match['name']} is drawn twice"
            classes[match["name"]] = Drawn(parent, match["standard"], match["meaning"])
    return classes


def defined() -> dict[str, type]:
    """The classes that the module defines."""
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: each for name, each in members if each.__module__ == errors.__name__}


TREE = drawn(inspect.getdoc(errors) or "")


def test_every_class_is_drawn_and_every_drawn_class_exists() -> None:
    assert TREE.keys() == defined().keys()


@pytest.mark.parametrize("name", sorted(defined()))
def test_every_class_has_the_bases_in_the_tree(name: str) -> None:
    parent, *standard = [base.__name__ for base in defined()[name].__bases__]
    assert (parent, standard) == (TREE[name].parent, [TREE[name].standard] if TREE[name].standard else [])


@pytest.mark.parametrize("name", sorted(defined().keys() - {"VolleyError"}))
def test_every_class_has_a_description_in_the_tree(name: str) -> None:
    assert TREE[name].meaning


def test_the_tree_is_parsed_by_indentation() -> None:
    assert drawn(
        "Some errors.\n\nRoot\n├── A (ValueError)    bad\n│   └── B    worse\n└── C    other\nAlone    apart"
    ) == {
        "Root": Drawn("Exception", None, None),
        "A": Drawn("Root", "ValueError", "bad"),
        "B": Drawn("A", None, "worse"),
        "C": Drawn("Root", None, "other"),
        "Alone": Drawn("Exception", None, "apart"),
    }
