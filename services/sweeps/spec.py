"""Sweep files: parses YAML to the runs it means, each with a checked job."""

import copy
import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from services.jobs.job_file import Job, load_job, read_mapping
from services.jobs.suggestions import known_keys
from volley.base import Spec
from volley.errors import JobError
from volley.job import RLJob

OWN_KEYS = {"seed": "seeds: [0, 1, 2]", "name": "name: beside base, or a name for each entry of list"}
MOST_MEMBERS = 10_000
MOST_NAME = 200  # characters, as in the tag of a run
SLUG = 30  # characters; with the sweep's name and the seed, a job's name has at most 64
ERRORS_SHOWN = 5

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,23}$")]
MOST_SEED = 999_999
Seed = Annotated[int, Field(strict=True, ge=0, le=MOST_SEED)]
Axis = Literal["steps", "samples", "divergence"]


class Setting(Spec):
    """One entry of ``list``: keys of the job with their values."""

    name: str = Field(min_length=1, max_length=MOST_NAME)
    set: dict[str, Any] = Field({}, description="keys of the job with their values")


class ReportSpec(Spec):
    """What the table and the figure show."""

    ks: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(None, description="k of held-out pass@k; null: all")
    metrics: tuple[str, ...] = Field(("reward_mean",), description="of training steps, as in docs/metrics.md")
    x: Axis = Field("steps", description="what the figure's curves are drawn against")
    last: int = Field(20, ge=1, description="the table's metrics are means over this number of last steps")


class SweepSpec(Spec):
    """A sweep file."""

    name: Name
    base: Path = Field(description="job file, relative to the sweep file")
    seeds: tuple[Seed, ...] = Field((0, 1, 2), min_length=1)
    set: dict[str, Any] = Field({}, description="keys of the job with their values, for all settings")
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] | None = Field(None, min_length=1)
    settings: tuple[Setting, ...] | None = Field(None, alias="list", min_length=1)
    at_once: int = Field(1, ge=1, le=1000, description="runs at the same time")
    keep_checkpoints: bool = Field(True, description="of runs on this machine that are done; their models stay")
    start_once: bool = Field(False, description="only the first run evaluates the model before training")
    report: ReportSpec = ReportSpec()

    @model_validator(mode="after")
    def _grid_or_list(self) -> Self:
        if (self.grid is None) == (self.settings is None):
            raise ValueError(
                "write either grid: {optimizer.lr: [1.0e-5, 1.0e-4]} or list: [{name: small, set: {optimizer.lr: "
                "1.0e-5}}]"
            )
        if len({*self.seeds}) < len(self.seeds):
            raise ValueError("seeds: a seed is there twice; remove one")
        return self

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        combinations = math.prod(len(values) for values in (self.grid or {}).values())
        if (total := len(self.seeds) * combinations * len(self.settings or (0,))) > MOST_MEMBERS:
            raise ValueError(f"{total} runs are more than {MOST_MEMBERS}: remove values or seeds")
        taken: dict[str, str] = {}
        for setting in self.all_settings():
            for key in OWN_KEYS.keys() & {*self.set, *setting.set}:
                raise ValueError(f"{key} cannot be a key of a setting: write {OWN_KEYS[key]}")
            if (other := taken.get(slug(setting))) is not None:
                raise ValueError(f"the settings {other!r} and {setting.name!r} would share a folder: change one")
            taken[slug(setting)] = setting.name
        return self

    def all_settings(self) -> Iterator[Setting]:
        """Every setting: the entries of the list, or every combination of the grid's values."""
        if self.settings is not None:
            yield from self.settings
            return
        grid = self.grid or {}
        shown = _short_keys(tuple(grid))
        for values in product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            name = " ".join(_words(shown[key], value) for key, value in chosen.items())
            if len(name) > MOST_NAME:
                raise ValueError(f"grid: {name[:60]}... is too long a name: write list:, with names of your own")
            yield Setting(name=name, set=chosen)


@dataclass(frozen=True, slots=True)
class Member:
    """One run of a sweep.

    Attributes:
        name: follows from setting and seed alone, so that a repeated sweep finds the run again.
        group: the name of its setting.
        changes: the setting's keys and values.
    """

    name: str
    group: str
    seed: int
    changes: Mapping[str, Any]
    job: Job


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep file with its runs: with the first seed first, in the order of the file."""

    file: Path
    spec: SweepSpec
    members: tuple[Member, ...]

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def base(self) -> Path:
        """The job file."""
        return self.file.parent / self.spec.base

    @property
    def groups(self) -> dict[str, list[Member]]:
        """The runs by setting."""
        found: dict[str, list[Member]] = {}
        for member in self.members:
            found.setdefault(member.group, []).append(member)
        return found

    def tags(self, member: Member) -> dict[str, str]:
        """The tags of a run of the service."""
        return {"sweep": self.name, "group": member.group[:200], "seed": str(member.seed), "member": member.name}


def load_sweep(file: Path, overrides: Mapping[str, Any] | None = None, seeds: tuple[int, ...] | None = None) -> Sweep:
    """Read a sweep file and check the job of each of its runs.

    Args:
        overrides: as the file's ``set``, over which they win; a setting's own keys win over both.
        seeds: in place of the file's.

    Raises:
        JobError: the file is missing or is no sweep, or some of its jobs are not valid; says what to write instead.
    """
    tree = {"name": file.stem, **read_mapping(file, "sweep file", "with 'base: job.yaml'")}
    if seeds is not None:
        tree["seeds"] = list(seeds)
    try:
        spec = SweepSpec.model_validate(tree)
    except ValidationError as error:
        raise JobError(_explain(file, error)) from error
    return Sweep(file, spec, _members(file, spec, overrides or {}))


def _members(file: Path, spec: SweepSpec, overrides: Mapping[str, Any]) -> tuple[Member, ...]:
    found: list[Member] = []
    errors: dict[str, str] = {}  # the first setting with each
    for seed, setting in product(spec.seeds, spec.all_settings()):
        name = f"{slug(setting)}-s{seed}"
        changes = {**spec.set, **overrides, **setting.set, "seed": seed, "name": f"{spec.name}-{name}"}
        if spec.start_once:
            changes["evaluation.at_start"] = not found and not errors
        try:
            job = load_job(file.parent / spec.base, _outermost_first(changes))
            _check_axis(job, spec.report)
        except JobError as error:
            errors.setdefault(str(error), setting.name)
            continue
        found.append(Member(name, setting.name, seed, setting.set, job))
    if errors:
        lines = [f"{file}: {setting}: {error}" for error, setting in errors.items()]
        more = [f"and {len(lines) - ERRORS_SHOWN} more"] if len(lines) > ERRORS_SHOWN else []
        raise JobError("\n".join([*lines[:ERRORS_SHOWN], *more]))
    return tuple(found)


def _outermost_first(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes in an order in which no mapping replaces a key that was set within it; values are copies."""
    return {key: copy.deepcopy(changes[key]) for key in sorted(changes, key=lambda key: key.count("."))}


def _check_axis(job: Job, report: ReportSpec) -> None:
    if report.x == "steps":
        return
    if not isinstance(job, RLJob):
        raise JobError(f"report.x: {report.x} needs a job of kind rl: write report: {{x: steps}}")
    if report.x == "divergence" and not job.update.kl.wanted:
        raise JobError("report.x: divergence needs the divergence to be logged: write update.kl.logged: true")


def _short_keys(keys: tuple[str, ...]) -> dict[str, str]:
    """The last part of each key, or all of it where two keys end the same."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)}


def _words(key: str, value: object) -> str:
    """A value as in ``lr=0.0001``, or a mapping as in ``objective=(kind=max_at_k k=8)``."""
    if isinstance(value, dict):
        return f"{key}=({' '.join(_words(str(inner), each) for inner, each in value.items())})"
    return f"{key}={json.dumps(value)}" if isinstance(value, list | bool | None) else f"{key}={value}"


def slug(setting: Setting) -> str:
    """The name of a setting's folders, from its name alone: no other entry of the file changes it."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", setting.name).strip("-._") or "setting"
    if len(plain) <= SLUG:
        return plain
    return f"{plain[: SLUG - 7]}-{hashlib.sha256(setting.name.encode()).hexdigest()[:6]}"


def _explain(file: Path, error: ValidationError) -> str:
    """Describe a validation error with one line per mistake."""
    problems = error.errors(include_url=False)
    lines = []
    if wrong := [each for each in problems if each["loc"][:1] == ("seeds",)]:
        # A wrong seed makes an error of the list too: of several, one says it.
        given = f"{wrong[0]['input']!r:.60}"
        lines.append(f"{file}: seeds: write whole numbers from 0 to {MOST_SEED}, as in [0, 1, 2], not {given}")
    for problem in (each for each in problems if each not in wrong):
        where = ".".join(str(part) for part in problem["loc"])
        match problem["type"]:
            case "extra_forbidden":
                words = _unknown(str(problem["loc"][-1]), where)
            case "missing":
                words = "required, but missing" + (": write base: job.yaml" if where == "base" else "")
            case "string_pattern_mismatch":
                words = f"{problem['input']!r:.60} must be at most 24 letters, digits, dots, hyphens and underscores"
            case "value_error":
                words = problem["msg"].removeprefix("Value error, ")
            case _:
                words = f"{problem['msg']}, got {problem['input']!r:.60}"
        lines.append(f"{file}: {where + ': ' if where else ''}{words}")
    return "\n".join(lines)


def _unknown(key: str, where: str) -> str:
    if any(key in known_keys(kind) for kind in ("rl", "sft", "rft", "eval")):
        return "is a key of the job: write it into the base job, set:, grid:, or set: of an entry of list:"
    model = ReportSpec if where.startswith("report.") else Setting if where.startswith("list.") else SweepSpec
    names = [field.alias or name for name, field in model.model_fields.items()]
    near = difflib.get_close_matches(key, names, n=1)
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; there are {', '.join(names)}"
