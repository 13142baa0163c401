"""Every recipe on a hand-made file in its published layout; the real scorers accept the resulting rows."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from reward_servers.scorers import build_scorer, check_scorer
from services.data.prompts import read_prompts
from services.data.readers import Row
from services.data.recipes import NAMES
from services.data.recipes.livecodebench import decode_private
from services.data.report import DropReport
from volley.data import DataSpec
from volley.errors import DataError
from volley.records import Prompt, VerdictStatus
from volley.scoring import ArcScorer, CodeScorer, MathScorer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "data"
SCORERS = {"math": MathScorer(), "code": CodeScorer(), "arc": ArcScorer()}
LAYOUTS = [  # recipe, file, scorer, ids, dropped
    ("math", "math/train", "math", ["algebra/1", "algebra/2", "geometry/1"], 1),
    ("math500", "math500.jsonl", "math", ["test/algebra/9001", "test/precalculus/9002"], 0),
    ("harp", "HARP.jsonl.zip", "math", ["1999/AHSME/3", "2001/AIME_I/15"], 1),
    ("gsm8k", "gsm8k.jsonl", "math", ["gsm8k:1", "gsm8k:2"], 0),
    ("aime", "aime.parquet", "math", ["60", "61"], 0),
    ("codecontests", "codecontests.parquet", "code", ["1_A. Sum", "5_A. No Python"], 3),
    ("taco", "taco.jsonl", "code", ["taco:1", "taco:2"], 2),
    ("livecodebench", "livecodebench.jsonl", "code", ["abc000_a", "9001"], 0),
    ("humaneval", "humaneval.jsonl.gz", "code", ["HumanEval/9000"], 0),
    ("mbpp", "mbpp.jsonl", "code", ["mbpp/9001"], 0),
    ("mbpp", "mbpp_sanitized.jsonl", "code", ["mbpp/9002"], 0),
    ("arc_agi", "arc", "arc", ["00000001:0", "00000001:1"], 1),
]


def read(recipe: str, file: str, report: DropReport | None = None, **options: Any) -> list[Prompt]:
    spec = DataSpec.model_validate({"path": FIXTURES / file, "recipe": recipe, "recipe_options": options})
    return read_prompts(spec, report=report)


def test_every_recipe_has_a_fixture() -> None:
    assert {layout[0] for layout in LAYOUTS} == set(NAMES)


@pytest.mark.parametrize(("recipe", "file", "scorer", "ids", "dropped"), LAYOUTS)
def test_published_rows_become_prompts_that_their_scorer_accepts(
    recipe: str, file: str, scorer: str, ids: list[str], dropped: int
) -> None:
    report = DropReport()
    prompts = read(recipe, file, report)
    assert [prompt.id for prompt in prompts] == ids
    assert report.dropped == dropped
    check_scorer(SCORERS[scorer], prompts)  # type: ignore[arg-type]
    for prompt in prompts:
        json.dumps(dict(prompt.reference), allow_nan=False)
        if recipe != "arc_agi":
            assert prompt.reference["problem"].strip() in prompt.text


@pytest.mark.parametrize(
    ("recipe", "file", "answers"),
    [
        ("math", "math/train", ["5", "\\frac{3}{8}", "7"]),
        ("math500", "math500.jsonl", ["210", "\\frac{1}{2}"]),
        ("harp", "HARP.jsonl.zip", ["13", "1024"]),
        ("gsm8k", "gsm8k.jsonl", ["1234", "-2"]),
        ("aime", "aime.parquet", ["9", "32"]),
    ],
)
def test_recipes_extract_the_reference_answers(recipe: str, file: str, answers: list[str]) -> None:
    assert [prompt.reference["answer"] for prompt in read(recipe, file)] == answers


def test_tags_are_text() -> None:
    assert read("math", "math/train")[2].tags == {"level": "3", "subject": "Geometry"}
    assert read("aime", "aime.parquet")[0].tags == {"year": "2024"}
    assert read("codecontests", "codecontests.parquet")[0].tags == {"rating": "800+", "source": "codeforces"}
    assert read("livecodebench", "livecodebench.jsonl")[1].tags["platform"] == "leetcode"
    assert read("arc_agi", "arc")[0].tags == {"split": "training"}


def test_the_arc_scorer_accepts_the_right_grid_only() -> None:
    first, second = read("arc_agi", "arc")
    scorer = build_scorer(ArcScorer())
    right, wrong = scorer.score(first, ["0 7", "7 0"])
    assert (right.status, wrong.status) == (VerdictStatus.PASSED, VerdictStatus.WRONG_ANSWER)
    assert scorer.score(second, ["So:\n2 1 0\n5 4 3"])[0].status is VerdictStatus.PASSED
    assert "Input 1:\n1 0\n2 3\n\nOutput 1:\n0 1\n3 2\n" in first.text
    assert first.text.endswith("digits between blanks.\n")


def test_code_tests_keep_order_drop_duplicates_and_unwrap_returned_values() -> None:
    contest = read("codecontests", "codecontests.parquet")[0].reference["tests"]
    assert [test["stdin"] for test in contest] == ["1 2\n", "3 4\n", "5 6\n", "-1 1\n", "10 20\n"]
    program, call = read("taco", "taco.jsonl")
    assert program.reference["tests"][3] == {"stdin": "3\n", "expected": "6\n"}
    assert call.reference["tests"][0] == {"function": "largest", "args": [[1, 5, 2]], "expected": 5}
    assert "def largest(items):" in call.text
    assert "standard input" in program.text
    stdin, functional = read("livecodebench", "livecodebench.jsonl")
    assert stdin.reference["tests"][2] == {"stdin": "-5\n", "expected": "25\n"}
    assert functional.reference["tests"][0] == {"function": "holds", "args": [[1, 2, 3], 2], "expected": True}
    mbpp = read("mbpp", "mbpp.jsonl")[0]
    assert len(mbpp.reference["tests"]) == 4
    assert '"aa"' not in mbpp.text  # the challenge test is not in the prompt


def test_language_and_number_of_tests_are_options_and_drops_are_reported() -> None:
    report = DropReport()
    assert [p.id for p in read("codecontests", "codecontests.parquet", report, language="python")] == ["1_A. Sum"]
    assert report.counts["no correct solution in python"] == 1
    assert len(read("taco", "taco.jsonl", min_tests=1)) == 3
    assert len(read("taco", "taco.jsonl", max_tests=5)[0].reference["tests"]) == 5
    last = report.as_json()["dropped"][-1]
    assert (report.read, last["count"], last["first"][0].rsplit(":", 1)[1]) == (5, 1, "4")


def test_another_layout_is_rejected_with_file_and_line() -> None:
    with pytest.raises(DataError, match=r"gsm8k\.jsonl:1: no field 'solution', so this is another layout; the row has"):
        read("math", "gsm8k.jsonl")


def pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", ["[]", "ä" * 300, "x" * 70_000])
def test_pickled_text_is_read_without_unpickling(protocol: int, text: str) -> None:
    assert decode_private(Row(Path("x"), 1, {}), pack(pickle.dumps(text, protocol))) == text


@pytest.mark.parametrize(
    ("packed", "problem"),
    [
        (pack(b"cos\nsystem\n(S'true'\ntR."), "a pickle with GLOBAL"),
        (pack(pickle.dumps(["a"])), "a pickle with EMPTY_LIST"),
        (pack(pickle.dumps(Path)), "it must be a single string"),
        (pack(pickle.dumps(3)), "it must be a single string"),
        (pack(pickle.dumps("abc")[:-1]), "a broken pickle"),
        (pack(b""), "a broken pickle"),
        (base64.b64encode(zlib.compress(b"abc" * 99)[:-9]).decode(), "truncated"),
        ("!!!", "neither JSON nor base64 of zlib"),
        (base64.b64encode(b"plain").decode(), "neither JSON nor base64 of zlib"),
    ],
)
def test_other_pickled_content_is_rejected(packed: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        decode_private(Row(Path("x"), 1, {}), packed)
