"""DataSpec: where a job's prompts come from, and how a row becomes a prompt. docs/data.md has examples of each part."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from volley.base import Spec
from volley.patterns import NAME
from volley.plugins import OpenName, ReaderPlugin, RecipePlugin

MAX_GENERATED, MAX_GENERATOR_SEEDS = 1 << 20, 1 << 12  # tasks of one seed, and seeds: their product fits in 32 bits
DATASET_TAG = "dataset"  # the tag that names a prompt's source in a mixture

RecipeName = Literal[
    "aime",
    "arc_agi",
    "codecontests",
    "gsm8k",
    "harp",
    "humaneval",
    "livecodebench",
    "math",
    "math500",
    "mbpp",
    "taco",
]

FormatName = Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "datasets"]

_LISTS = ("in", "not in")
_COUNTS = ("length >=", "length <=")


class FilterSpec(Spec):
    """Keeps the rows for which ``field op value`` holds. A row without the field passes only ``!=`` and ``not in``."""

    field: str = Field(min_length=1, description="a field, or a path into one: meta.level")
    op: Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in", "contains", "length >=", "length <=", "present"]
    value: JsonValue = Field(
        None, description="what to compare with; a string that spells a number counts as that number"
    )

    @model_validator(mode="after")
    def _value_fits(self) -> Self:
        if self.op in _LISTS and not isinstance(self.value, list):
            raise ValueError(f"value of '{self.op}' must be a list: value: [easy, hard]")
        if self.op in _COUNTS and (not isinstance(self.value, int) or isinstance(self.value, bool)):
            raise ValueError(f"value of '{self.op}' must be an integer: a number of characters or items")
        if self.op == "present" and self.value not in (None, True, False):
            raise ValueError("value of 'present' must be true or false")
        if self.op in ("<", "<=", ">", ">=") and not isinstance(self.value, int | float | str):
            raise ValueError(f"value of '{self.op}' must be a number or a string")
        return self


class ChatSpec(Spec):
    """Renders prompts with the model's chat template, as one user turn or as the turns a row lists."""

    system: str | None = Field(None, description="system turn placed before the row's turns")
    options: dict[str, Any] = Field(default_factory=dict, description="further template variables")


class RecipeOptions(Spec):
    """What a recipe for a published dataset keeps."""

    min_tests: int | None = Field(
        None, ge=1, description="code: drop problems with fewer tests; null: recipe's default"
    )
    max_tests: int = Field(1000, ge=1, le=1000, description="code: limit on tests per problem; the first are kept")
    language: str | None = Field(
        None, description="code: keep only problems with a known correct solution in this language, such as python"
    )


class TaskSet(Spec):
    """One set of tasks that a generator makes."""

    name: str = Field(min_length=1, description="name of the set in reasoning-gym, such as chain_sum")
    weight: float = Field(1.0, gt=0, description="share of the tasks, relative to the other weights")
    config: dict[str, JsonValue] = Field(
        default_factory=dict, description="settings of the set, as reasoning-gym has them"
    )
    levels: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="difficulties from the set's own curriculum, in equal parts; each task has its own as tag level"
    )

    @field_validator("config")
    @classmethod
    def _no_seed(cls, config: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if own := sorted({"seed", "size"} & config.keys()):
            raise ValueError(f"{', '.join(own)}: set this beside sets, for all of them")
        return config


class SourceSpec(Spec):
    """Rows of one file, folder, hub dataset or generator, and how each becomes a prompt.

    Fields that the job does not name are passed to the scorer.
    """

    path: Path | None = Field(None, description="file or folder: jsonl, json, csv, tsv, parquet, arrow; .gz .zst .zip")
    hub: str | None = Field(None, description="name of a Hugging Face dataset, such as openai/gsm8k")
    config: str | None = Field(None, description="its configuration")
    split: str | None = Field(None, description="its split; required if it has several")
    revision: str | None = Field(None, description="branch, tag or commit of the hub dataset")
    format: Annotated[FormatName, OpenName(ReaderPlugin)] = Field("auto", description="auto: by the file's extension")
    recipe: Annotated[RecipeName, OpenName(RecipePlugin)] | None = Field(
        None, description="published layout of the rows"
    )
    recipe_options: RecipeOptions = RecipeOptions()
    generator: Literal["reasoning_gym"] | None = Field(None, description="generate tasks in place of reading them")
    sets: tuple[TaskSet, ...] = Field((), description="generator: which tasks")
    size: int | None = Field(None, ge=1, le=MAX_GENERATED, description="generator: how many tasks")
    seed: int = Field(0, ge=0, lt=MAX_GENERATOR_SEEDS, description="generator: another seed gives other tasks")
    prompt_field: str = "prompt"
    id_field: str | None = Field(None, description="null: a recipe's 'id', otherwise <file stem>:<line>")
    fields: dict[str, str] = Field(
        default_factory=dict, description="name that the scorer reads: the row's field, or a path into one"
    )
    json_fields: tuple[str, ...] = Field((), description="fields that hold JSON as text, such as a CSV's tests column")
    template: str | None = Field(None, description="Jinja over the row's fields; null: prompt_field is the prompt")
    chat: ChatSpec | None = Field(None, description="render the prompt with the model's chat template")
    filters: tuple[FilterSpec, ...] = Field((), description="rows must pass all of them")
    tags: tuple[str, ...] = Field((), description="fields to break evaluations down by; recipes define their own")
    take: int | None = Field(None, ge=1, description="limit on rows; the first that pass the filters are used")

    @model_validator(mode="after")
    def _place_fits(self) -> Self:
        if sum(place is not None for place in (self.path, self.hub, self.generator)) > 1:
            raise ValueError("set only one of path, hub and generator")
        if self.generator is None and (self.sets or self.size is not None or self.seed):
            raise ValueError("sets, size and seed belong to a generator: write generator: reasoning_gym")
        if self.generator is not None and not (self.sets and self.size):
            raise ValueError("a generator needs sets and size: sets: [{name: chain_sum}], size: 1000")
        if self.generator is not None and (self.recipe is not None or self.format != "auto"):
            raise ValueError("recipe and format are for files: remove them, generated tasks need neither")
        if self.hub is None and self.revision is not None:
            raise ValueError("revision needs hub: a local folder has no revisions")
        if DATASET_TAG in self.tags:
            raise ValueError(f"tag {DATASET_TAG!r} is reserved for the source's name: rename the field under fields")
        return self

    @property
    def place(self) -> str:
        """Where the rows are, for error messages."""
        return str(next((place for place in (self.path, self.hub, self.generator) if place is not None), None))


class MixtureSource(SourceSpec):
    """One source of a mixture."""

    name: str = Field(pattern=NAME, description="value of the tag 'dataset'")
    weight: float = Field(gt=0, description="share of the prompts, relative to the other weights")

    @model_validator(mode="after")
    def _has_place(self) -> Self:
        if self.path is None and self.hub is None and self.generator is None:
            raise ValueError(f"source {self.name}: set path, hub or generator")
        return self


class CurriculumSpec(Spec):
    """Easy prompts first. During the first ``over`` prompts the pool gains one difficulty at a time."""

    tag: str = Field(description="one of tags; its values are the difficulties")
    order: tuple[str, ...] = Field((), description="values from easy to hard; empty: by the number in each value")
    over: int = Field(ge=1, description="prompts admitted before the pool has all difficulties")


class DataSpec(SourceSpec):
    """Prompts of a job: one source, or a mixture of ``sources``."""

    shuffle: bool = Field(True, description="a new seeded order per pass; false keeps the file's order")
    sources: tuple[MixtureSource, ...] = Field((), description="mix these sources in proportion to their weights")
    curriculum: CurriculumSpec | None = None

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, sources: tuple[MixtureSource, ...]) -> tuple[MixtureSource, ...]:
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources are called {twice[0]}: names must be unique")
        return sources

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.path is None and self.hub is None and self.generator is None) == (not self.sources):
            raise ValueError("set exactly one of path, hub, generator and sources")
        if self.sources:
            own = sorted(_set_fields(self) - {"sources", "shuffle"})
            if own:
                raise ValueError(f"{', '.join(own)}: with sources, set this in each source")
        if self.curriculum is not None and not self.shuffle:
            raise ValueError("a curriculum shuffles within each difficulty: write shuffle: true")
        return self


def check_held_out(train: DataSpec, heldout: DataSpec) -> None:
    """Raise ValueError if both generate tasks of one set from one seed, which makes them the same tasks."""
    generated = [source for source in (train, *train.sources) if source.generator is not None]
    for source in (heldout, *heldout.sources):
        for other in generated:
            names = {each.name for each in source.sets} & {each.name for each in other.sets}
            if source.generator == other.generator and source.seed == other.seed and names:
                raise ValueError(
                    f"evaluation.data: seed {source.seed} is also that of data, so {min(names)} has the same tasks in "
                    f"both: write another seed, such as seed: {source.seed + 1}"
                )


def _set_fields(spec: SourceSpec) -> set[str]:
    """Fields that differ from their default. `model_fields_set` cannot tell: resolved jobs set all."""
    fields = type(spec).model_fields
    return {
        name for name, field in fields.items() if getattr(spec, name) != field.get_default(call_default_factory=True)
    }
