"""What ``volley data check`` reports about a data set: counts, lengths, tags, duplicate prompts, bad rows by line."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from services.data.prompts import stream, why_unusable
from services.data.report import DropReport
from volley.data import DataSpec
from volley.errors import DataError, JobError
from volley.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_BAD = 50
SHOWN_VALUES = 12
SHOWN_TEXT = 240  # characters
CHUNK = 1000  # texts per call of the tokenizer


@dataclass(frozen=True, slots=True)
class Findings:
    """The content of a data set, and what is wrong with it.

    Attributes:
        bad: the first `MAX_BAD` errors; reading stops there.
        complete: whether the whole set was read.
        obstacle: why a job cannot use the set even though no row is bad; "" if it can.
    """

    prompts: list[Prompt]
    drops: DropReport
    bad: list[DataError | JobError]
    complete: bool
    obstacle: str


class _TooManyErrors(Exception):
    """`MAX_BAD` rows are bad; more would not help the user."""


def examine(spec: DataSpec, tokenizer: "PreTrainedTokenizerBase | None" = None) -> Findings:
    """Read all rows of ``spec``, collecting errors instead of stopping at the first."""
    report, bad, prompts = DropReport(), list[DataError | JobError](), list[Prompt]()
    complete = False

    def note(error: DataError) -> None:
        bad.append(error)
        if len(bad) == MAX_BAD:
            raise _TooManyErrors

    try:
        prompts.extend(each.prompt for each in stream(spec, tokenizer, report, note))
        complete = True
    except _TooManyErrors:
        pass
    except JobError as error:  # the rest of the file cannot be read
        bad.append(error)
    return Findings(prompts, report, bad, complete, why_unusable(spec, prompts, report) if not bad else "")


def as_object(findings: Findings, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, object]:
    """The findings as a JSON object; lengths are null without prompts, or without a tokenizer."""
    prompts = findings.prompts
    return {
        "prompts": len(prompts),
        "rows": _rows(findings),
        "complete": findings.complete,
        "first": prompts[0].text if prompts else None,
        "characters": spread([len(prompt.text) for prompt in prompts]) if prompts else None,
        "tokens": spread(token_lengths(tokenizer, prompts)) if prompts and tokenizer is not None else None,
        "duplicates": len(prompts) - len({prompt.text for prompt in prompts}),
        "fields": _fields(prompts),
        "tags": {name: dict(sorted(counter.items())) for name, counter in sorted(_tag_counts(prompts).items())},
        "dropped": findings.drops.as_json()["dropped"],
        "bad": [str(error) for error in findings.bad],
        "obstacle": findings.obstacle,
    }


def lines(findings: Findings, tokenizer: "PreTrainedTokenizerBase | None") -> list[str]:
    """Format the findings for the terminal."""
    prompts = findings.prompts
    output = [
        f"{len(prompts)} prompts of {_rows(findings)} rows{'' if findings.complete else '; reading stopped early'}"
    ]
    if prompts:
        output += _prompt_lines(prompts, tokenizer)
    if findings.drops.dropped:
        output += [f"dropped: {findings.drops.dropped}", *findings.drops.lines()]
    if findings.bad:
        output += [f"bad rows: {len(findings.bad)}{' or more' if len(findings.bad) >= MAX_BAD else ''}"]
        output += [f"  {error}" for error in findings.bad]
    if findings.obstacle:
        output.append(f"a job cannot use this data: {findings.obstacle}")
    return output


def _rows(findings: Findings) -> int:
    """The rows that were read, those that could not be parsed included."""
    return max(findings.drops.read, len(findings.prompts) + findings.drops.dropped + len(findings.bad))


def _prompt_lines(prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase | None") -> list[str]:
    output = [
        f"  first       {shortened(prompts[0].text)}",
        f"  characters  {_words([len(prompt.text) for prompt in prompts])}",
    ]
    if tokenizer is not None:
        output.append(f"  tokens      {_words(token_lengths(tokenizer, prompts))}")
    duplicates = len(prompts) - len({prompt.text for prompt in prompts})
    if duplicates:
        output.append(f"  {duplicates} prompts are identical to an earlier one")
    output.append(f"  fields      {', '.join(_fields(prompts))}")
    return output + _tags(prompts)


def shortened(text: str) -> str:
    """A prompt as the model gets it, quoted, in a line; of a long one, beginning and end."""
    if len(text) > SHOWN_TEXT:
        text = f"{text[: SHOWN_TEXT // 2]} [...] {text[-SHOWN_TEXT // 2 :]}"
    return json.dumps(text, ensure_ascii=False)


def token_lengths(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Prompt]) -> list[int]:
    """Return the number of tokens of each prompt."""
    return [
        len(ids)
        for start in range(0, len(prompts), CHUNK)
        for ids in tokenizer([prompt.text for prompt in prompts[start : start + CHUNK]]).input_ids
    ]


def load_spec(file: Path, recipe: str | None) -> list[tuple[str, DataSpec, Path | None]]:
    """Return (name, data, model) of a data file, or of each data set that a job file names."""
    if file.suffix.lower() not in (".yaml", ".yml"):
        return [(str(file), DataSpec.model_validate({"path": file, "recipe": recipe}), None)]
    from services.jobs.job_file import load_job

    job = load_job(file)
    evaluation = getattr(job, "evaluation", None)
    found = [("data", job.data, job.model.folder)]
    return found + ([("evaluation.data", evaluation.data, job.model.folder)] if evaluation is not None else [])


def spread(lengths: Sequence[int]) -> dict[str, int]:
    low, median, high, top = np.percentile(lengths, [0, 50, 99, 100]).astype(int).tolist()
    return {"min": low, "median": median, "p99": high, "max": top, "total": sum(lengths)}


def _words(lengths: Sequence[int]) -> str:
    return ", ".join(f"{'99%' if name == 'p99' else name} {value}" for name, value in spread(lengths).items())


def _fields(prompts: Sequence[Prompt]) -> list[str]:
    return sorted({name for prompt in prompts for name in prompt.reference})


def _tag_counts(prompts: Sequence[Prompt]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for prompt in prompts:
        for name, value in prompt.tags.items():
            counts.setdefault(name, Counter())[value] += 1
    return counts


def _tags(prompts: Sequence[Prompt]) -> list[str]:
    return [
        f"  tag {name}: "
        + ", ".join(f"{value} {count}" for value, count in sorted(counter.items())[:SHOWN_VALUES])
        + (f" and {len(counter) - SHOWN_VALUES} more" if len(counter) > SHOWN_VALUES else "")
        for name, counter in sorted(_tag_counts(prompts).items())
    ]
