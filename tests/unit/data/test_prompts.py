from pathlib import Path

import pytest

from services.data.mixture import Order
from services.data.prompts import read_prompts
from volley.data import DataSpec
from volley.errors import DataError, JobError


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_rows_become_prompts_and_other_fields_reach_the_scorer(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a", "answer": 1}', "", '{"prompt": "b"}')
    first, second = read_prompts(DataSpec(path=path))
    assert (first.id, first.text, first.reference) == ("rows:1", "a", {"answer": 1})
    assert (second.id, second.reference) == ("rows:3", {})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', "not JSON"),
        ("[1, 2]", "a list, not an object"),
        ('{"text": "a"}', "no field 'prompt'; the row has 'text'"),
        ('{"prompt": 3}', "is a number, not a string"),
        ('{"prompt": ["a"]}', "is a list, not a string"),
        (
            '{"prompt": [{"role": "user", "content": "a"}]}',
            "list, not a string: a job with rollout takes the prompt as",
        ),
        ('{"prompt": ""}', "is empty"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "a", "n": ' + "9" * 5000 + "}", "not usable JSON"),
        ('{"prompt": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_a_malformed_row_is_reported_with_file_and_line(tmp_path: Path, line: str | bytes, problem: str) -> None:
    path = write(tmp_path, '{"prompt": "fine"}', line)
    with pytest.raises(DataError) as caught:
        read_prompts(DataSpec(path=path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert problem in str(caught.value)


def test_ids_must_exist_and_be_unique(tmp_path: Path) -> None:
    twice = write(tmp_path, '{"prompt": "a", "id": "x"}', '{"prompt": "b", "id": "x"}')
    with pytest.raises(DataError, match=r":2: id 'x' is already used by line 1"):
        read_prompts(DataSpec(path=twice, id_field="id"))
    without = write(tmp_path, '{"prompt": "a"}')
    with pytest.raises(DataError, match=r":1: field 'id' must be an id"):
        read_prompts(DataSpec(path=without, id_field="id"))


def test_missing_and_empty_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file"):
        read_prompts(DataSpec(path=tmp_path / "no.jsonl"))
    with pytest.raises(JobError, match="has no rows"):
        read_prompts(DataSpec(path=write(tmp_path, "")))


def test_each_pass_is_a_new_permutation_and_a_cursor_resumes_it() -> None:
    order = Order(10, seed=3, shuffle=True)
    drawn = [order[position] for position in range(30)]
    passes = [drawn[0:10], drawn[10:20], drawn[20:30]]
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert passes[0] != passes[1]
    for position in (29, 4, 10, 17, 0):
        assert Order(10, seed=3, shuffle=True)[position] == order[position] == drawn[position]
    plain = Order(3, seed=0, shuffle=False)
    assert [plain[position] for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]
