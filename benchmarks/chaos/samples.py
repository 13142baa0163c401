"""What the chaos run's model writes: programs that attack their sandbox, each a single token of its vocabulary.

Drawn at random by an untrained model, samples are one to several of these programs end to end, now and then with a line
of an honest one.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.versus_trl.workloads import Workload, write_model
from tests.integration.sandbox.attacks import ATTACKS, EXPECTED, STDIN
from tests.integration.sandbox.evasions import EVASIONS

HONEST = ("print(sum(map(int, input().split())))\n", "print(7)\n", "x = 1\n", "pass\n")
_SOURCES = (*(each.source for each in ATTACKS if "passed" not in each.accepted), *(each.source for each in EVASIONS))
HOSTILE = tuple(dict.fromkeys(f"{source.rstrip()}\n" for source in _SOURCES))
TOKENS = 3  # programs in a sample at most
LIMITS = {"cpu_s": 1.0, "wall_limit_s": 2.0}  # programs that never end are common here


def job_of(common: Mapping[str, Any]) -> dict[str, Any]:
    """The chaos job with these programs as samples."""
    return {
        **common,
        "scorer": {"kind": "code", "extract": "raw", "sandbox": {"limits": LIMITS}},
        "sampling": {"n": 4, "max_tokens": TOKENS},
        "reward_workers": {"count": 2, "max_replacements": 10_000, "group_deadline_s": 20},
    }


def write_inputs(folder: Path) -> None:
    """Write the untrained model and its prompts to ``folder``, unless they exist."""
    if (folder / "prompts.jsonl").exists():
        return
    workload = Workload("attacks", (*HONEST, *HOSTILE), TOKENS, 0, "code")
    write_model(workload, folder / "model", layers=2, width=128)
    test = {"stdin": STDIN.decode(), "expected": EXPECTED.decode()}
    rows = [{"prompt": HONEST[number % 4] + HONEST[number // 4 % 4], "tests": [test]} for number in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def verdicts(samples: Path) -> Counter[tuple[str, str]]:
    """Logged samples by what they hold ("attacks only" or "with an honest line") and by their verdict."""
    return Counter((kind, status) for kind, status, _ in _judged(samples))


def unearned(samples: Path) -> list[str]:
    """The attacks that printed the right answer, which they can only if they got somewhere."""
    return [text for kind, status, text in _judged(samples) if (kind, status) == ("attacks only", "passed")]


def _judged(samples: Path) -> Iterator[tuple[str, str, str]]:
    for logged in samples.read_text().splitlines():
        row = json.loads(logged)
        text = row["sample"]
        honest = any(text.startswith(line) or f"\n{line}" in text for line in HONEST[:2])
        yield "with an honest line" if honest else "attacks only", row["status"], text
