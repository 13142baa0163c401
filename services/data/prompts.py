"""Reads the prompts of a `DataSpec`.

rows -> recipe (one published row to problems) -> fields -> filters -> prompt text -> id, tags -> Prompt
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.data.generated import TAGS
from services.data.hub import read_source
from services.data.mapping import describe, failed_filter, mapped, tags_of
from services.data.readers import Bad, Row, refuse
from services.data.recipes import recipe_of
from services.data.recipes.base import problems_of
from services.data.render import checked_text, field_value, renderer
from services.data.report import DropReport
from volley.data import DATASET_TAG, DataSpec, MixtureSource, SourceSpec
from volley.errors import DataError, JobError
from volley.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Located:
    """A prompt and the row it was made from."""

    prompt: Prompt
    row: Row

    def text(self, field: str) -> str:
        """Return the row's non-empty string in ``field``, such as an answer to train on; raises `DataError`."""
        return checked_text(self.row, f"field '{field}'", field_value(self.row, self.prompt.reference, field))


def read_prompts(spec: DataSpec, model: Path | None = None, report: DropReport | None = None) -> list[Prompt]:
    """Return all prompts of the job's data, source after source.

    Args:
        model: folder of the model whose chat template ``chat`` uses.
        report: counts the dropped rows by reason.

    Raises:
        DataError: a row is malformed; the error names its file and line.
        JobError: the data cannot be read, or no prompt remains.
    """
    return [each.prompt for each in read_located(spec, model, report)]


def read_located(spec: DataSpec, model: Path | None = None, report: DropReport | None = None) -> list[Located]:
    """Like `read_prompts`, but return each prompt with its row."""
    tokenizer = chat_tokenizer(spec, model)
    found = list(stream(spec, tokenizer, report))
    if reason := why_unusable(spec, [each.prompt for each in found], report):
        raise JobError(reason)
    return found


def why_unusable(spec: DataSpec, prompts: Sequence[Prompt], report: DropReport | None) -> str:
    """Return why a job cannot use the data, because it or one of its sources has no prompt; "" if it can."""
    if not prompts:
        dropped = f": all {report.read} were dropped" if report and report.read else ""
        return f"data file {spec.place} has no rows{dropped}" if not spec.sources else "the data has no rows"
    present = {prompt.tags.get(DATASET_TAG) for prompt in prompts}
    for source in spec.sources:
        if source.name not in present:
            return f"source {source.name} ({source.place}) has no rows; drop it or its filters"
    return ""


def chat_tokenizer(spec: DataSpec, model: Path | None) -> "PreTrainedTokenizerBase | None":
    """Return the model's tokenizer if some source needs its chat template."""
    if model is None or all(source.chat is None for source in (spec, *spec.sources)):
        return None
    from services.data.tokens import load_tokenizer

    return load_tokenizer(model)


def stream(
    spec: DataSpec,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    report: DropReport | None = None,
    bad: Bad = refuse,
) -> Iterator[Located]:
    """Yield prompts one by one; malformed rows are passed to ``bad`` and skipped if it returns."""
    report = report if report is not None else DropReport()
    seen: dict[str, Row] = {}
    for source in spec.sources or (spec,):
        for each in _of_source(source, tokenizer, report, bad):
            name = each.prompt.id
            if name in seen:
                first = seen[name]
                where = f"line {first.number}" if first.path == each.row.path else f"{first.path}:{first.number}"
                bad(each.row.error(f"id {name!r} is already used by {where}"))
                continue
            seen[name] = each.row
            yield each


def _of_source(
    source: SourceSpec, tokenizer: "PreTrainedTokenizerBase | None", report: DropReport, bad: Bad
) -> Iterator[Located]:
    recipe = recipe_of(source.recipe) if source.recipe else None
    make = _Maker(source, renderer(source, recipe.TEMPLATE if recipe else None, tokenizer))
    kept = 0
    for row in read_source(source, bad):
        report.read += 1
        rows = problems_of(recipe, row, source.recipe_options, report, bad) if recipe else (row,)
        for each in rows:
            try:
                located = make(each, report)
            except DataError as error:
                bad(error)
                continue
            if located is not None:
                yield located
                kept += 1
                if kept == source.take:
                    return


class _Maker:
    """Makes prompts from the rows of one source."""

    def __init__(self, source: SourceSpec, render: Callable[[Row, Any], str]) -> None:
        self.source, self.render = source, render
        recipe = recipe_of(source.recipe) if source.recipe else None
        known = recipe.TAGS if recipe else TAGS if source.generator else ()
        self.tags = tuple(dict.fromkeys((*known, *source.tags)))
        self.id_field = source.id_field or ("id" if recipe else None)
        self.hidden = {source.prompt_field} if source.template is None and recipe is None else set()
        self.fixed = {DATASET_TAG: source.name} if isinstance(source, MixtureSource) else {}
        self.prefix = f"{source.name}/" if isinstance(source, MixtureSource) else ""

    def __call__(self, row: Row, report: DropReport) -> Located | None:
        """Make the prompt of a row, or return None if a filter drops it. Raises `DataError`."""
        fields = mapped(self.source, row)
        failed = failed_filter(self.source.filters, fields)
        if failed is not None:
            report.drop(describe(failed), row)
            return None
        text = self.render(row, fields)
        tags = {**self.fixed, **tags_of(self.tags, row, fields)}
        reference = {key: value for key, value in fields.items() if key not in self.hidden}
        return Located(Prompt(self.prefix + self._name(row, fields), text, reference, tags), row)

    def _name(self, row: Row, fields: dict[str, Any]) -> str:
        if self.id_field is None:
            return f"{row.path.name.split('.')[0] if self.source.path else row.path}:{row.number}"
        value = fields.get(self.id_field)
        if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
            raise row.error(f"field '{self.id_field}' must be an id: a string or an integer")
        return str(value)
