"""``volley data``: check data, convert published data sets, remove an evaluation set from a training set."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from services.cli.options import Json, print_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from volley.data import DataSpec

app = typer.Typer(help="Check, convert and decontaminate data.", no_args_is_help=True)
T = TypeVar("T")

Recipe = Annotated[str | None, typer.Option(help="published layout of the rows: math, taco, arc_agi ...")]
Split = Annotated[str | None, typer.Option(help="split of a Hugging Face data set")]
Config = Annotated[str | None, typer.Option(help="configuration of a Hugging Face data set")]


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="data file, folder, or job file (YAML)")],
    model: Annotated[Path | None, typer.Option(help="model folder, for lengths in tokens")] = None,
    recipe: Recipe = None,
    as_json: Json = False,
) -> None:
    """Print counts, lengths, tags, dropped rows and every bad row with its line; exit code 1 if there is a bad row."""
    from services.data.check import as_object, examine, lines, load_spec

    bad, objects = False, []
    for name, spec, of_job in _valid(lambda: load_spec(file, recipe)):
        tokenizer = _tokenizer(model or of_job)
        findings = examine(spec, tokenizer)
        if as_json:
            objects.append({"data": name, **as_object(findings, tokenizer)})
        else:
            typer.echo("\n".join([f"{name}:", *lines(findings, tokenizer)]))
        bad |= bool(findings.bad or findings.obstacle)
    if as_json:
        print_json(objects)
    if bad:
        raise typer.Exit(1)


@app.command()
def convert(
    recipe: Annotated[str, typer.Argument(help="math, math500, harp, gsm8k, aime, codecontests, taco, ...")],
    source: Annotated[str, typer.Argument(help="file or folder as published, or hub:OWNER/NAME")],
    out: Annotated[Path, typer.Argument(help="JSON lines file to write; must not exist")],
    config: Config = None,
    split: Split = None,
    revision: Annotated[str | None, typer.Option(help="revision of a hub data set")] = None,
    min_tests: Annotated[int | None, typer.Option(min=1, help="code: drop problems with fewer tests")] = None,
    language: Annotated[
        str | None, typer.Option(help="code: drop problems without a correct solution in this language")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="write the number of dropped rows by reason, JSON")] = None,
    as_json: Json = False,
) -> None:
    """Convert a published data set to JSON lines that a job can read directly."""
    from services.data.files import write_prompts, write_report
    from services.data.prompts import read_prompts
    from services.data.report import DropReport

    location: dict[str, Any] = {"hub": source[4:]} if source.startswith("hub:") else {"path": source}
    options = {"min_tests": min_tests, "language": language}
    fields = {**location, "recipe": recipe, "config": config, "split": split, "revision": revision}
    spec = _spec({**fields, "recipe_options": options})
    drops = DropReport()
    prompts = read_prompts(spec, report=drops)
    write_prompts(out, prompts)
    tags = list(prompts[0].tags)
    if as_json:
        data = {"path": str(out), "id_field": "id", **({"tags": tags} if tags else {})}
        print_json({"data": data, "prompts": len(prompts), **drops.as_json()})
    else:
        typer.echo("\n".join([f"{out}: {len(prompts)} prompts of {drops.read} rows", *drops.lines()]))
        used = f"path: {out}, id_field: id{', tags: [' + ', '.join(tags) + ']' if tags else ''}"
        typer.echo(f"in a job: data: {{{used}}}")
    if report is not None:
        write_report(report, drops.as_json())


@app.command()
def decontaminate(
    train: Annotated[Path, typer.Argument(help="training set")],
    against: Annotated[list[Path], typer.Option(help="evaluation set; repeat for more")],
    out: Annotated[Path | None, typer.Option(help="write the training set without the overlapping prompts")] = None,
    ngram: Annotated[int, typer.Option(min=1, help="words per n-gram")] = 8,
    threshold: Annotated[
        float, typer.Option(help="share of an evaluation prompt's n-grams that counts as overlap, above 0 and up to 1")
    ] = 0.5,
    report: Annotated[Path | None, typer.Option(help="write every overlap, JSON")] = None,
    recipe: Recipe = None,
    prompt_field: Annotated[str, typer.Option(help="field with the prompt, in all sets")] = "prompt",
    against_recipe: Annotated[str | None, typer.Option(help="published layout of the evaluation sets")] = None,
    as_json: Json = False,
) -> None:
    """Find training prompts that overlap with an evaluation set, and write the training set without them."""
    from services.data.decontaminate import find_contaminated, problem_text
    from services.data.files import write_prompts, write_report
    from services.data.prompts import read_prompts

    training = read_prompts(_spec({"path": train, "recipe": recipe, "prompt_field": prompt_field}))
    fields = {"recipe": against_recipe, "prompt_field": prompt_field}
    evaluation = [prompt for path in against for prompt in read_prompts(_spec({"path": path, **fields}))]
    found = _valid(
        lambda: find_contaminated(
            (problem_text(prompt) for prompt in training),
            [problem_text(prompt) for prompt in evaluation],
            [prompt.id for prompt in evaluation],
            ngram=ngram,
            threshold=threshold,
        )
    )
    dropped = {each.index for each in found}
    if out is not None:
        write_prompts(out, [prompt for index, prompt in enumerate(training) if index not in dropped])
    rows = [
        {
            "id": str(training[each.index].reference.get("id", training[each.index].id)),
            "against": each.against,
            "overlap": each.overlap,
            "exact": each.exact,
        }
        for each in found
    ]
    overlaps = {"ngram": ngram, "threshold": threshold, "overlaps": rows}
    if report is not None:
        write_report(report, overlaps)
    if as_json:
        print_json({"prompts": len(training), **overlaps})
        return
    exact = sum(each.exact for each in found)
    typer.echo(f"{len(found)} of {len(training)} prompts overlap: {exact} exactly, {len(found) - exact} by n-grams")
    for row in rows[:20]:
        typer.echo(f"  {row['id']}  {row['overlap']:.2f} of {row['against']}")


def _spec(fields: dict[str, Any]) -> "DataSpec":
    from volley.data import DataSpec

    return _valid(lambda: DataSpec.model_validate(fields))


def _valid(make: Callable[[], T]) -> T:
    """Return what ``make`` returns; a value that is invalid becomes a one-line `JobError`."""
    from pydantic import ValidationError

    from volley.errors import JobError

    try:
        return make()
    except ValidationError as error:
        first = error.errors()[0]
        raise JobError(f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}") from error
    except JobError:
        raise
    except ValueError as error:
        raise JobError(str(error)) from error


def _tokenizer(model: Path | None) -> "PreTrainedTokenizerBase | None":
    if model is None:
        return None
    from services.data.tokens import load_tokenizer

    return load_tokenizer(model)
