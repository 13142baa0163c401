"""The names of vLLM's parsers, read from its source, so that a check of a job need not import vLLM."""

import ast
import contextlib
import difflib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from volley.errors import JobError
from volley.gateway import GatewaySpec
from volley.syntax import syntax_tree

_TABLES = {  # key of `gateway` -> module of vLLM and the table in it whose keys are the names
    "tool_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
_OWN_PLUGINS = ("vllm", "actors")  # plugins of vLLM and Volley, which register no parsers


def check_parsers(spec: GatewaySpec) -> None:
    """Raise `JobError` if vLLM has no parser of a name in ``spec``. Unreadable names are left to the engine."""
    for key in _TABLES:
        name: str | None = getattr(spec, key)
        known = parser_names(key)
        if name is not None and known and name not in known:
            raise unknown_parser(key, name, known)


def unknown_parser(key: str, name: str, known: Sequence[str]) -> JobError:
    """The error about a parser that vLLM does not have."""
    near = difflib.get_close_matches(name, known, n=3)
    which = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
    return JobError(f"gateway.{key}: vLLM has no parser {name!r:.60}; {which}")


def parser_names(key: str) -> tuple[str, ...]:
    """The names that ``gateway.<key>`` may have; none if they cannot be read, or if a plugin may add others."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations or _plugins():
        return ()
    module, table = _TABLES[key]
    try:
        tree = syntax_tree((Path(found.submodule_search_locations[0]) / module / "__init__.py").read_text())
    except (OSError, SyntaxError):
        return ()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == table for to in node.targets):
            with contextlib.suppress(ValueError):  # the table is computed
                return tuple(sorted(ast.literal_eval(node.value)))
    return ()


def _plugins() -> list[str]:
    """Installed plugins of vLLM that may register parsers of their own."""
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    return [each.name for each in plugins if each.value.partition(".")[0] not in _OWN_PLUGINS]
