"""Rows of an sft job that do not fit its model."""

from pathlib import Path

import pytest

from services.runs.sft import SFTRun
from tests.models import tiny_llama
from volley.errors import JobError
from volley.job import JOB, SFTJob


@pytest.mark.parametrize(("answer", "fits"), [("1 " * 4, True), ("1 " * 60, False)])
def test_a_row_longer_than_the_model_is_named(tmp_path: Path, answer: str, fits: bool) -> None:
    model = tiny_llama(tmp_path / "model", max_position_embeddings=32)
    rows = ['{"prompt": "1+2=", "answer": "3"}', f'{{"prompt": "1+3=", "answer": "{answer}"}}']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    tree = {"kind": "sft", "name": "x", "model": {"path": str(model)}, "data": {"path": str(tmp_path / "rows.jsonl")}}
    job = JOB.validate_python({**tree, "steps": 1, "rows_per_step": 2})
    assert isinstance(job, SFTJob)
    if fits:
        assert len(SFTRun.prepare(job).rows) == 2
        return
    with pytest.raises(JobError, match=r"rows.jsonl:2: .*over the model's length 32: shorten or remove the row"):
        SFTRun.prepare(job)
