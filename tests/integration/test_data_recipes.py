"""Problems of the code and mathematics recipes, scored with a correct and a wrong sample in the real sandbox."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from reward_servers.sandbox.health import Sandbox
from reward_servers.scorers.code import Code
from reward_servers.scorers.math import Math
from services.data.prompts import read_prompts
from volley.data import DataSpec
from volley.records import VerdictStatus
from volley.scoring import CodeScorer, MathScorer, SandboxLimits, SandboxSpec

pytestmark = pytest.mark.integration

FIXTURES = Path(__file__).parents[1] / "fixtures" / "data"
SPEC = SandboxSpec(limits=SandboxLimits(cpu_s=2.0))
PROGRAMS = [  # recipe, file, problem, right program, wrong program
    ("codecontests", "codecontests.parquet", 0, "print(sum(map(int, input().split())))", "print(3)"),
    ("taco", "taco.jsonl", 0, "print(2 * int(input()))", "print(int(input()) ** 2)"),
    (
        "taco",
        "taco.jsonl",
        1,
        "def largest(items):\n    return max(items)",
        "def largest(items):\n    return [max(items)]",
    ),
    ("livecodebench", "livecodebench.jsonl", 0, "print(int(input()) ** 2)", "print(int(input()) * 3)"),
    (
        "livecodebench",
        "livecodebench.jsonl",
        1,
        "class Solution:\n    def holds(self, items, wanted):\n        return wanted in items",
        "class Solution:\n    def holds(self, items, wanted):\n        return bool(items)",
    ),
    ("humaneval", "humaneval.jsonl.gz", 0, "def triple(n):\n    return 3 * n", "def triple(n):\n    return n + 4"),
    ("mbpp", "mbpp.jsonl", 0, "def reverse(t):\n    return t[::-1]", "def reverse(t):\n    return t"),
    (
        "mbpp",
        "mbpp_sanitized.jsonl",
        0,
        "import math\n\ndef hypotenuse(a, b):\n    return math.hypot(a, b)",
        "def hypotenuse(a, b):\n    return a + 2",
    ),
]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    one = Sandbox(SPEC, index=37)
    yield one
    one.close()


@pytest.mark.parametrize(("recipe", "file", "number", "right", "wrong"), PROGRAMS)
def test_a_correct_program_passes_and_a_wrong_one_does_not(
    sandbox: Sandbox, recipe: str, file: str, number: int, right: str, wrong: str
) -> None:
    prompt = read_prompts(DataSpec.model_validate({"path": FIXTURES / file, "recipe": recipe}))[number]
    verdicts = Code(CodeScorer(sandbox=SPEC), sandbox).score(
        prompt, [f"So:\n```python\n{program}\n```\n" for program in (right, wrong)]
    )
    assert [verdict.status for verdict in verdicts] == [VerdictStatus.PASSED, VerdictStatus.WRONG_ANSWER]


@pytest.mark.parametrize(
    ("recipe", "file", "number", "right", "wrong"),
    [
        ("math", "math/train", 1, "0.375", "\\frac{3}{4}"),
        ("math500", "math500.jsonl", 1, "0.5", "2"),
        ("harp", "HARP.jsonl.zip", 1, "1024", "512"),
        ("gsm8k", "gsm8k.jsonl", 0, "1,234", "1200"),
        ("aime", "aime.parquet", 0, "009", "90"),
    ],
)
def test_a_correct_answer_passes_and_a_wrong_one_does_not(
    sandbox: Sandbox, recipe: str, file: str, number: int, right: str, wrong: str
) -> None:
    prompt = read_prompts(DataSpec.model_validate({"path": FIXTURES / file, "recipe": recipe}))[number]
    verdicts = Math(MathScorer(), sandbox).score(prompt, [f"Hence \\boxed{{{answer}}}." for answer in (right, wrong)])
    assert [verdict.status for verdict in verdicts] == [VerdictStatus.PASSED, VerdictStatus.WRONG_ANSWER]
