"""What a process that only prepares a job imports: no torch, and the tokens are the same."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from reward_servers.scorers import brings_code
from services.run import prepare
from services.tokens import import_tokenizers_alone
from tests.models import tiny_llama
from volley.job import JOB, RLJob
from volley.scoring import ExactScorer, PythonScorer, SumScorer

PREPARE = """
import json, sys
from services.run import prepare_alone
from volley.job import JOB
prepared = prepare_alone(JOB.validate_json(sys.argv[1]))
print(json.dumps({"tokens": [each.tokens_p.tolist() for each in prepared.prompts], "torch": "torch" in sys.modules}))
import torch
print(torch.ones(1).item())
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("prepare")
    rows = [{"id": str(i), "prompt": text, "answer": "1"} for i, text in enumerate(("1+2=", "7*(3-1)="))]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "kind": "rl",
        "name": "prepared",
        "model": {"path": str(tiny_llama(folder / "model"))},
        "data": {"path": str(folder / "rows.jsonl")},
        "scorer": {"kind": "exact"},
        "objective": {"kind": "mean"},
        "sampling": {"n": 2, "max_tokens": 4},
        "steps": 1,
    }


def test_a_process_that_only_prepares_spares_itself_torch_and_may_import_it_later(tree: dict[str, Any]) -> None:
    told, later = subprocess.run(
        [sys.executable, "-c", PREPARE, json.dumps(tree)], capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()
    job = JOB.validate_python(tree)
    assert isinstance(job, RLJob)
    assert json.loads(told) == {"tokens": [each.tokens_p.tolist() for each in prepare(job).prompts], "torch": False}
    assert float(later) == 1.0


def test_where_torch_is_imported_already_nothing_is_hidden() -> None:
    import_tokenizers_alone()
    assert sys.modules["torch"] is torch


def test_a_scorer_with_code_of_the_users_own_is_told_from_the_built_in_ones() -> None:
    python = PythonScorer(target="package.module:function")
    assert brings_code(python)
    assert not brings_code(ExactScorer())
    total = {"kind": "sum", "terms": [{"scorer": {"kind": "exact"}}, {"scorer": python.model_dump()}]}
    assert brings_code(SumScorer.model_validate(total))
