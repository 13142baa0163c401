"""Functions that runs of the tests use as tools."""

from volley.errors import ToolUnavailable

COLOURS = {"apple": "red", "plum": "blue"}


def colour(thing: str) -> str:
    """Look up the colour of a thing."""
    if thing == "ghost":
        raise ToolUnavailable("the catalogue is down")
    return COLOURS[thing]
