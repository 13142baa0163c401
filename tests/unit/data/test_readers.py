"""Every file format, valid and broken; errors name file and line."""

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from services.data.prompts import read_prompts, stream
from services.data.readers import read_file
from volley.data import DataSpec
from volley.errors import DataError, JobError

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "bé", "n": 2}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def fields(path: Path, **options: Any) -> list[dict[str, Any]]:
    prompts = read_prompts(DataSpec.model_validate({"path": path, **options}))
    return [{"prompt": prompt.text, **prompt.reference} for prompt in prompts]


def written(path: Path) -> Path:
    """Write ``ROWS`` in the format that the extension of ``path`` names."""
    match "".join(path.suffixes):
        case ".json":
            path.write_text(json.dumps(ROWS, indent=1))
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(LINES.encode()))
        case ".jsonl.zst":
            with pyarrow.output_stream(str(path), compression="zstd") as stream:
                stream.write(LINES.encode())
        case ".jsonl.zip":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("inside.jsonl", LINES)
        case _:
            path.write_text(LINES)
    return path


@pytest.mark.parametrize(
    "name", ["x.jsonl", "x.ndjson", "x.json", "x.parquet", "x.jsonl.gz", "x.jsonl.zst", "x.jsonl.zip"]
)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name)
    assert fields(path) == ROWS
    assert [prompt.id for prompt in read_prompts(DataSpec(path=path))] == ["x:1", "x:2"]


def test_csv_cells_are_text_and_may_contain_line_breaks_and_tabs(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b'\xef\xbb\xbfprompt,n\r\n"a, ""b""\nc",1\r\nd,2\r\n')
    assert fields(tmp_path / "x.csv") == [{"prompt": 'a, "b"\nc', "n": "1"}, {"prompt": "d", "n": "2"}]
    (tmp_path / "x.tsv").write_text("prompt\tn\na\t1\n")
    assert fields(tmp_path / "x.tsv") == [{"prompt": "a", "n": "1"}]


def test_byte_order_mark_carriage_returns_and_a_huge_line(tmp_path: Path) -> None:
    huge = "x" * 5_000_000
    text = b"\xef\xbb\xbf" + json.dumps({"prompt": "a"}).encode() + b"\r\n\r\n" + json.dumps({"prompt": huge}).encode()
    (tmp_path / "x.jsonl").write_bytes(text)
    assert [row["prompt"] for row in fields(tmp_path / "x.jsonl")] == ["a", huge]


def test_nan_of_a_data_frame_is_a_missing_value(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a", "b"], "score": [1.5, float("nan")], "day": [None, None]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert fields(tmp_path / "x.parquet")[1] == {"prompt": "b", "score": None, "day": None}


@pytest.mark.parametrize(
    ("name", "content", "where", "problem"),
    [
        ("x.jsonl", '{"prompt": "a", "n": NaN}', 1, "NaN is not a JSON value; write null"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": "b", "n": 1, "prompt": "c"}', 2, "key 'prompt' appears twice"),
        ("x.jsonl", '{"prompt": "a", "tests": [{"stdin": "", "stdin": "1"}]}', 1, "key 'stdin' appears twice"),
        ("x.json", '[{"prompt": "a", "n": 1, "n": 1}]', 1, "key 'n' appears twice"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": ["a"]}', 2, "is a list, not a string"),
        ("x.json", '[{"prompt": "a"}, 3]', 2, "a number, not an object"),
        ("x.json", '"text"', 1, "not a list of objects"),
        ("x.json", "[1,\n2", 1, "line 2"),
        ("x.csv", "prompt,n\na,1\nb\n", 3, "1 cells under 2 headings"),
        ("x.csv", "my secret,42\na,1\n", 2, "the row has 2 columns: check that the first line names them"),
        ("x.csv", "prompt,prompt\na,1\n", 1, "name every column, without duplicates"),
        ("x.csv", 'prompt\n"a\n', 2, "not CSV"),
        ("x.parquet", "plainly not", 1, "not Parquet"),
    ],
)
def test_malformed_rows_are_reported_with_file_and_row(
    tmp_path: Path, name: str, content: str, where: int, problem: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        read_prompts(DataSpec(path=tmp_path / name))
    assert (caught.value.line, Path(caught.value.path).name) == (where, name)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-9], "truncated"),
        ("x.jsonl.gz", b"plain", "not a .gz file"),
        ("x.jsonl.zst", b"plain", "x.jsonl.zst"),
        ("x.jsonl.zip", b"plain", "not a .zip file"),
        ("x.txt", b"plain", "unknown extension"),
        ("x.jsonl", b"", "has no rows"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(JobError, match=problem):
        read_prompts(DataSpec(path=tmp_path / name))


def test_reading_continues_after_a_bad_row_if_errors_are_collected(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\nno\n{"prompt": 3}\n{"prompt": "b"}\n')
    bad: list[DataError] = []
    found = list(stream(DataSpec(path=tmp_path / "x.jsonl"), bad=bad.append))
    assert [each.prompt.id for each in found] == ["x:1", "x:4"]
    assert [error.line for error in bad] == [2, 3]


def test_folders_saved_by_the_datasets_library(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert fields(tmp_path / "one") == ROWS
    assert fields(tmp_path / "two", split="test") == ROWS[1:]
    with pytest.raises(JobError, match=r"has the splits train, test: choose one, such as split: train"):
        fields(tmp_path / "two")
    with pytest.raises(JobError, match=r"no split 'dev'; it has train, test"):
        fields(tmp_path / "two", split="dev")


def test_a_local_copy_of_a_hub_repository_with_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    repository = tmp_path / "repository"
    (repository / "main").mkdir(parents=True)
    written(repository / "main" / "train.parquet")
    (repository / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.parquet\n---\n"
    )
    assert fields(repository, config="main", split="train") == ROWS
    with pytest.raises(JobError, match="does not load"):
        fields(repository, config="other")


def test_a_hundred_thousand_lines_are_streamed(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(LINES * 50_000)
    assert sum(row.fields["n"] for row in read_file(tmp_path / "x.jsonl")) == 150_000
