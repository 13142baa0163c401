"""What ``volley data check`` finds in a data set: counts, lengths, tags, repeated prompts, bad rows by line."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.data.prompts import stream, what_lacks
from services.data.report import DropReport
from volley.data import DataSpec
from volley.errors import DataError, JobError
from volley.records import Prompt

MAX_BAD = 50
SHOWN_VALUES = 12
CHUNK = 1000  # texts tokenised at once


@dataclass(frozen=True, slots=True)
class Findings:
    """What a data set holds.

    Attributes:
        bad: the first `MAX_BAD` problems; reading stops there.
        complete: the whole set was read.
        lack: why a job could not use the set though no row is bad; empty where it could.
    """

    prompts: list[Prompt]
    drops: DropReport
    bad: list[DataError | JobError]
    complete: bool
    lack: str


class _Enough(Exception):
    """Fifty bad rows are told; more would not help."""


def examine(spec: DataSpec, tokenizer: Any | None = None) -> Findings:
    """Read all of ``spec``, collecting what is wrong in place of stopping at the first."""
    report, bad, prompts = DropReport(), list[DataError | JobError](), list[Prompt]()
    complete = False

    def note(error: DataError) -> None:
        bad.append(error)
        if len(bad) == MAX_BAD:
            raise _Enough

    try:
        prompts.extend(each.prompt for each in stream(spec, tokenizer, report, note))
        complete = True
    except _Enough:
        pass
    except JobError as error:  # the rest of the file can not be read
        bad.append(error)
    return Findings(prompts, report, bad, complete, what_lacks(spec, prompts, report) if not bad else "")


def lines(findings: Findings, tokenizer: Any | None) -> list[str]:
    """The findings for people."""
    prompts = findings.prompts
    rows = max(findings.drops.read, len(prompts) + findings.drops.dropped + len(findings.bad))  # some can not be parsed
    said = [f"{len(prompts)} prompts of {rows} rows{'' if findings.complete else ', and not all was read'}"]
    if prompts:
        said.append(f"  characters  {_spread([len(prompt.text) for prompt in prompts])}")
        if tokenizer is not None:
            said.append(f"  tokens      {_spread(token_lengths(tokenizer, prompts))}")
        repeated = len(prompts) - len({prompt.text for prompt in prompts})
        if repeated:
            said.append(f"  {repeated} prompts repeat an earlier one word for word")
        said.append(f"  fields      {', '.join(sorted({name for prompt in prompts for name in prompt.reference}))}")
        said += _tags(prompts)
    if findings.drops.dropped:
        said += [f"dropped: {findings.drops.dropped}", *findings.drops.lines()]
    if findings.bad:
        said += [f"bad rows: {len(findings.bad)}{' or more' if len(findings.bad) >= MAX_BAD else ''}"]
        said += [f"  {error}" for error in findings.bad]
    if findings.lack:
        said.append(f"of no use to a job: {findings.lack}")
    return said


def token_lengths(tokenizer: Any, prompts: Sequence[Prompt]) -> list[int]:
    """Tokens of each prompt under the model's tokenizer."""
    return [
        len(ids)
        for start in range(0, len(prompts), CHUNK)
        for ids in tokenizer([prompt.text for prompt in prompts[start : start + CHUNK]]).input_ids
    ]


def load_spec(file: Path, recipe: str | None) -> list[tuple[str, DataSpec, Path | None]]:
    """(name, data, model) of a data file, or of each data set that a job file names."""
    if file.suffix.lower() not in (".yaml", ".yml"):
        return [(str(file), DataSpec.model_validate({"path": file, "recipe": recipe}), None)]
    from services.job_file import load_job

    job = load_job(file)
    evaluation = getattr(job, "evaluation", None)
    found = [("data", job.data, job.model.path)]
    return found + ([("evaluation.data", evaluation.data, job.model.path)] if evaluation is not None else [])


def _spread(lengths: Sequence[int]) -> str:
    low, median, high, top = np.percentile(lengths, [0, 50, 99, 100]).astype(int)
    return f"least {low}, median {median}, 99% {high}, most {top}, in all {sum(lengths)}"


def _tags(prompts: Sequence[Prompt]) -> list[str]:
    counts: dict[str, Counter[str]] = {}
    for prompt in prompts:
        for name, value in prompt.tags.items():
            counts.setdefault(name, Counter())[value] += 1
    return [
        f"  tag {name}: "
        + ", ".join(f"{value} {count}" for value, count in sorted(counter.items())[:SHOWN_VALUES])
        + (f" and {len(counter) - SHOWN_VALUES} more" if len(counter) > SHOWN_VALUES else "")
        for name, counter in sorted(counts.items())
    ]
