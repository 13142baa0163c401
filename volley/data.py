"""DataSpec: where a job's prompts come from and what is made of a row. docs/data.md shows each part at work."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from volley.base import Spec
from volley.plugins import OpenName, ReaderPlugin, RecipePlugin

DATASET_TAG = "dataset"  # the tag that says which source of a mixture a prompt is from

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
    """A row is kept where ``field op value`` holds. Without the field, only ``!=`` and ``not in`` hold."""

    field: str = Field(min_length=1, description="a field, or a path into one: meta.level")
    op: Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in", "contains", "length >=", "length <=", "present"]
    value: JsonValue = Field(
        None, description="what to compare with; a text that spells a number counts as that number"
    )

    @model_validator(mode="after")
    def _value_fits(self) -> Self:
        if self.op in _LISTS and not isinstance(self.value, list):
            raise ValueError(f"value of '{self.op}' must be a list: value: [easy, hard]")
        if self.op in _COUNTS and (not isinstance(self.value, int) or isinstance(self.value, bool)):
            raise ValueError(f"value of '{self.op}' must be a whole number of characters or items")
        if self.op == "present" and self.value not in (None, True, False):
            raise ValueError("value of 'present' is true or false")
        if self.op in ("<", "<=", ">", ">=") and not isinstance(self.value, int | float | str):
            raise ValueError(f"value of '{self.op}' must be a number or a text")
        return self


class ChatSpec(Spec):
    """Prompts go through the model's own chat template, as one user turn, or as the turns a row lists."""

    system: str | None = Field(None, description="system turn put before the row's own")
    options: dict[str, Any] = Field(default_factory=dict, description="further variables of the template")


class RecipeOptions(Spec):
    """What a recipe for a published data set drops."""

    min_tests: int | None = Field(None, ge=1, description="code: fewest tests of a problem; null: the recipe's own")
    max_tests: int = Field(1000, ge=1, le=1000, description="code: tests kept of a problem, the first")
    language: str | None = Field(None, description="code: a correct solution in it must be known, such as python")


class SourceSpec(Spec):
    """Rows of one file, folder or hub data set, and how each becomes a prompt.

    Fields the job does not name travel to the scorer.
    """

    path: Path | None = Field(None, description="file or folder: jsonl, json, csv, tsv, parquet, arrow; .gz .zst .zip")
    hub: str | None = Field(None, description="name of a Hugging Face data set, such as openai/gsm8k")
    config: str | None = Field(None, description="its configuration")
    split: str | None = Field(None, description="its split; needed where it has more than one")
    revision: str | None = Field(None, description="branch, tag or commit of a hub data set")
    format: Annotated[FormatName, OpenName(ReaderPlugin)] = Field("auto", description="auto: by the file's extension")
    recipe: Annotated[RecipeName, OpenName(RecipePlugin)] | None = Field(
        None, description="the rows are in this published layout"
    )
    recipe_options: RecipeOptions = RecipeOptions()
    prompt_field: str = "prompt"
    id_field: str | None = Field(None, description="null: 'id' of a recipe, else rows are named <file stem>:<line>")
    fields: dict[str, str] = Field(
        default_factory=dict, description="name the scorer reads: field of the row, or a path"
    )
    json_fields: tuple[str, ...] = Field((), description="texts that hold JSON, such as a tests column of a CSV")
    template: str | None = Field(None, description="Jinja text over the row's fields; null: prompt_field is the prompt")
    chat: ChatSpec | None = Field(None, description="put the prompt through the model's chat template")
    filters: tuple[FilterSpec, ...] = Field((), description="rows must pass all of them")
    tags: tuple[str, ...] = Field((), description="fields that evaluations are broken down by; a recipe has its own")
    take: int | None = Field(None, ge=1, description="only the first so many rows that pass the filters")

    @model_validator(mode="after")
    def _place_fits(self) -> Self:
        if self.path is not None and self.hub is not None:
            raise ValueError("give path or hub, not both")
        if self.hub is None and self.revision is not None:
            raise ValueError("revision belongs to hub; a local folder has none")
        if DATASET_TAG in self.tags:
            raise ValueError(f"tag {DATASET_TAG!r} is the source's name; rename the field under fields")
        return self

    @property
    def place(self) -> str:
        """Where the rows are, for messages."""
        return str(self.path) if self.path is not None else str(self.hub)


class MixtureSource(SourceSpec):
    """One source of a mixture."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="tag 'dataset' of its prompts")
    weight: float = Field(gt=0, description="share of the prompts met, relative to the other weights")

    @model_validator(mode="after")
    def _has_place(self) -> Self:
        if self.path is None and self.hub is None:
            raise ValueError(f"source {self.name}: give path or hub")
        return self


class CurriculumSpec(Spec):
    """Easy prompts first: the pool grows one difficulty at a time over the first ``over`` prompts, then holds all."""

    tag: str = Field(description="one of tags; its values are the difficulties")
    order: tuple[str, ...] = Field((), description="values from easy to hard; empty: by the number in them")
    over: int = Field(ge=1, description="prompts admitted before all difficulties are in the pool")


class DataSpec(SourceSpec):
    """Prompts of a job: one source, or a mixture of ``sources``."""

    shuffle: bool = Field(True, description="a new seeded order each pass; false keeps the file's order")
    sources: tuple[MixtureSource, ...] = Field((), description="a mixture; each row of weight w comes w times as often")
    curriculum: CurriculumSpec | None = None

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, sources: tuple[MixtureSource, ...]) -> tuple[MixtureSource, ...]:
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources are called {twice[0]}: a name is used once")
        return sources

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.path is None and self.hub is None) == (not self.sources):
            raise ValueError("give one of path, hub and sources")
        if self.sources:
            own = sorted(_set_fields(self) - {"sources", "shuffle"})
            if own:
                raise ValueError(f"{', '.join(own)}: with sources, say it of each source")
        if self.curriculum is not None and not self.shuffle:
            raise ValueError("a curriculum shuffles within its difficulties; leave shuffle at true")
        return self


def _set_fields(spec: SourceSpec) -> set[str]:
    """Fields that do not hold their default: a resolved job file writes defaults out too."""
    fields = type(spec).model_fields
    return {
        name for name, field in fields.items() if getattr(spec, name) != field.get_default(call_default_factory=True)
    }
