"""The paths in a job."""

from pathlib import Path

PATH_KEYS = ("path", "working_dir", "py_modules")
FIELDS = "fields"  # of rows, under names that the user chooses


def absolute_paths(tree: object, base: Path, key: str = "") -> object:
    """Return a job's ``tree`` with every relative path made absolute from ``base``; URIs stay.

    ``python`` stays a link, if it is one: a virtual environment is known by the path of its interpreter.
    """
    if key == "python" and isinstance(tree, str) and not tree.startswith("~"):
        return str(base.absolute() / tree)
    if isinstance(tree, dict):
        return {name: value if name == FIELDS else absolute_paths(value, base, name) for name, value in tree.items()}
    if isinstance(tree, list):
        return [absolute_paths(item, base, key) for item in tree]
    return str((base / tree).resolve()) if key in PATH_KEYS and isinstance(tree, str) and "://" not in tree else tree
