"""Job files: parses YAML to a checked job, with errors that say where the mistake is and what to write instead."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from services.jobs.suggestions import MAPPINGS, OBJECTIVES, known_key
from volley.errors import JobError
from volley.job import JOB, EvalJob, RFTJob, RLJob, SFTJob
from volley.job_paths import absolute_paths
from volley.patterns import pattern_words

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Job = RLJob | SFTJob | RFTJob | EvalJob
_UNION_TAGS = frozenset({"rl", "sft", "rft", "eval"})


class _DuplicateKey(yaml.YAMLError):
    """A mapping has the same key twice."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """Rejects duplicate keys, which YAML forbids; PyYAML itself silently uses the last one."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise _DuplicateKey(f"line {line}: key {name!r} is already in line {lines[name]}; remove one")
            lines[name] = line
        return node


def read_mapping(path: Path, what: str, advice: str) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Args:
        what: what the file is, such as ``job file``, and ``advice``: what the mapping should be, for errors.

    Raises:
        JobError: the file is missing, is not YAML, or holds something else.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except OSError as error:
        raise JobError(f"{what} {path}: {error.strerror or error}") from error
    except RecursionError as error:
        raise JobError(f"{what} {path} is nested too deeply") from error
    except _DuplicateKey as error:
        raise JobError(f"{what} {path}, {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise JobError(f"{what} {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise JobError(f"{what} {path} must be a mapping {advice}")
    return tree


def load_job(path: Path, overrides: Mapping[str, Any] | None = None) -> Job:
    """Read, check and resolve a job file.

    Relative paths in it are relative to the file's folder. ``overrides`` maps dotted keys to values, such as
    ``{"learner.ranks": 2}``.

    Raises:
        JobError: the file is missing, is not YAML, or does not describe a job.
    """
    tree = read_mapping(path, "job file", "that starts with 'kind: rl', 'sft', 'rft' or 'eval'")
    for key, value in (overrides or {}).items():
        assign(tree, key.split("."), value)
    try:
        job = JOB.validate_python(absolute_paths(tree, path.parent))
    except ValidationError as error:
        raise JobError(explain(path, error)) from error
    return job


@contextmanager
def quoting_header(path: Path, job: Job) -> Iterator[None]:
    """If the block raises `JobError` and a file of ``job`` is missing, append the comment at the top of ``path``.

    Example jobs say there how to create their files.
    """
    try:
        yield
    except JobError as error:
        head = "".join(takewhile(lambda line: line.startswith("#"), path.read_text().splitlines(keepends=True)))
        if head and not all(each.exists() for each in _paths(job.model_dump())):
            raise JobError(f"{error}\n{path} begins:\n{head}".rstrip()) from error
        raise


def _paths(tree: object) -> Iterator[Path]:
    if isinstance(tree, Path):
        yield tree
    elif isinstance(tree, dict):
        yield from (path for value in tree.values() for path in _paths(value))
    elif isinstance(tree, list | tuple):
        yield from (path for value in tree for path in _paths(value))


def importable_from(folder: Path) -> None:
    """Let this process and those it starts import the modules in ``folder``, such as a job's own scorer."""
    where = str(folder.resolve())
    sys.path.insert(0, where)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (where, os.environ.get("PYTHONPATH"))))


def parse_overrides(pairs: list[str], *, option: str = "--set ", example: str = "learner.ranks=2") -> dict[str, Any]:
    """Parse ``["learner.ranks=2"]`` to ``{"learner.ranks": 2}``; values are YAML. Errors name ``option``."""
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key:
            raise JobError(f"{option}{pair!r}: write key=value, such as {example}")
        try:
            overrides[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise JobError(f"{option}{pair!r}: the value is not YAML") from error
    return overrides


def dump_job(job: Job) -> str:
    """Return the resolved job as YAML with every default written out."""
    return yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False)


def explain(path: Path | str, error: ValidationError) -> str:
    """Describe a validation error with one line per mistake."""
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"] if part not in _UNION_TAGS)
        kind = str(problem["loc"][0]) if problem["loc"] else ""
        lines.append(f"{path}: {where + ': ' if where else ''}{_mistake(kind, where, problem)}")
    return "\n".join(lines)


def _mistake(kind: str, where: str, problem: "ErrorDetails") -> str:
    """What is wrong at the key ``where`` of a job of this kind, and if known, what to write instead."""
    last, given = where.rpartition(".")[2], problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            meant = known_key(kind, where)
            return (
                f"unknown key; did you mean {meant}?" if meant else "unknown key; `volley schema` lists the known ones"
            )
        case "missing":
            return "required, but missing"
        case "tuple_type" | "list_type":
            return f"must be a list, not {given!r:.60}"
        case "model_type" | "model_attributes_type" if last in MAPPINGS:
            return f"must be a mapping, not {given!r:.60}: write {MAPPINGS[last]}"
        case "union_tag_invalid" if not where:
            return f"kind: {given.get('kind')!r:.60} is not a kind of job: write rl, sft, rft or eval"
        case "string_pattern_mismatch":
            return pattern_words(problem)
        case "value_error":
            named = given.get("kind") if isinstance(given, dict) else None
            if last == "objective" and named in OBJECTIVES:
                return f"{named!r} has another name here: write objective: {OBJECTIVES[named]}"
            return problem["msg"].removeprefix("Value error, ")
    return f"{problem['msg']}, got {given!r:.60}"


def assign(tree: dict[str, Any], keys: list[str], value: object) -> None:
    """Set the value at a path of keys. Raises `JobError` if something on the path is not a mapping."""
    for key in keys[:-1]:
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise JobError(f"--set {'.'.join(keys)}: '{key}' holds a value, not a mapping")
        tree = child
    tree[keys[-1]] = value
