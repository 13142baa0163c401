"""A process that only prepares a job does not import torch, and gets the same tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from reward_servers.scorers import names_plugin
from services.data.tokens import import_tokenizers_alone
from services.runs.rl import RLRun
from services.runs.run import prepare
from tests.models import tiny_llama
from volley.base import Spec
from volley.job import JOB
from volley.scoring import ExactScorer, PythonScorer, SumScorer, WeightedTerm

PREPARE = """
import json, sys
from services.runs.run import prepare_alone
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


def test_preparing_does_not_import_torch_and_does_not_prevent_importing_it_later(tree: dict[str, Any]) -> None:
    printed, later = subprocess.run(
        [sys.executable, "-c", PREPARE, json.dumps(tree)], capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()
    run = prepare(JOB.validate_python(tree))
    assert isinstance(run, RLRun)
    assert json.loads(printed) == {"tokens": [each.tokens_p.tolist() for each in run.prompts], "torch": False}
    assert float(later) == 1.0


def test_a_torch_that_is_already_imported_stays_visible() -> None:
    import_tokenizers_alone()
    assert sys.modules["torch"] is torch


def test_a_users_reward_function_can_import_torch(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text("def score(sample, row):\n    return 1.0\n")
    (tmp_path / "heavy.py").write_text(
        "from transformers import AutoModel\n\nassert AutoModel.from_pretrained\n" + (tmp_path / "light.py").read_text()
    )
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{tmp_path}"}
    for module, torch_too in (("light", False), ("heavy", True)):
        job = {**tree, "scorer": {"kind": "python", "target": f"{module}:score"}}
        done = subprocess.run(
            [sys.executable, "-c", PREPARE, json.dumps(job)],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env=environment,
        )
        assert json.loads(done.stdout.splitlines()[0])["torch"] is torch_too


class OfAPlugin(Spec):
    kind: str = "of-a-plug-in"


def test_plugin_scorers_are_told_apart_from_built_in_ones() -> None:
    python, exact = PythonScorer(target="package.module:function"), ExactScorer()
    total = SumScorer(terms=(WeightedTerm(scorer=exact), WeightedTerm(scorer=python)))
    assert not any(names_plugin(each) for each in (python, exact, total))
    plugin: Any = OfAPlugin()
    mixed = SumScorer.model_construct(terms=(WeightedTerm(scorer=exact), WeightedTerm.model_construct(scorer=plugin)))
    assert names_plugin(plugin)
    assert names_plugin(mixed)
