"""Writes prompts as JSON lines that a job can read directly, and reports as JSON."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from volley.errors import JobError
from volley.records import Prompt


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write one object per line: ``id``, ``prompt`` and the scorer's fields. Raises `JobError` if ``path`` exists."""
    try:
        with path.open("x", encoding="utf-8") as file:
            for prompt in prompts:
                row = {"id": prompt.id, **prompt.reference, "prompt": prompt.text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    except FileExistsError:
        raise JobError(f"{path} already exists: name another file, or remove it") from None
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror or error}") from error


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON, replacing an existing file. Raises `JobError` if that fails."""
    try:
        path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror or error}") from error
