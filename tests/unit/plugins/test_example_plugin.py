"""examples/plugin, built, installed into a folder, and used by a process with that folder on its path."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from volley.objectives import advantages

EXAMPLE = Path("examples/plugin").resolve()

USE = """
import json, sys
from pathlib import Path
import numpy as np
from reward_servers.scorers import build_scorer, check_scorer
from services.data.prompts import read_prompts
from services.jobs.job_file import dump_job, load_job
from volley.job import JOB
from volley.objectives import advantages
import yaml

job = load_job(Path(sys.argv[1]))
assert JOB.validate_python(yaml.safe_load(dump_job(job))) == job
prompts = read_prompts(job.data)
check_scorer(job.scorer, prompts)
scorer = build_scorer(job.scorer)
verdicts = scorer.score(prompts[0], ["Kayak!", "kook", "canoe", "kayaks", "..."])
rewards = np.array([[0.0, 2.0, 5.0, 9.0], [1.0, 1.0, 4.0, 0.0]])
valid = np.array([[True] * 4, [True, True, False, True]])
schema = JOB.json_schema()
print(json.dumps({
    "prompts": [[p.id, p.text, dict(p.reference), dict(p.tags)] for p in prompts],
    "verdicts": [[v.status, v.reward] for v in verdicts],
    "advantages": advantages(rewards, job.objective, valid=valid).tolist(),
    "scorer": schema["$defs"]["RLJob"]["properties"]["scorer"]["anyOf"][0]["oneOf"][-1],
    "objective": schema["$defs"]["RLJob"]["properties"]["objective"]["oneOf"][-1],
    "formats": schema["$defs"]["DataSpec"]["properties"]["format"]["enum"],
    "dumped": job.model_dump(mode="json")["scorer"],
}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(EXAMPLE, folder / "source")  # copied, so that no build folder appears in the repository
    uv = Path(sys.executable).parent / "uv"
    install = [str(uv), "pip", "install", "--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
    subprocess.run([*install, "--python", sys.executable, str(folder / "source")], capture_output=True, check=True)
    return folder / "site"


def run(site: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), str(Path.cwd())))}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def used(site: Path) -> dict[str, Any]:
    done = run(site, "-c", USE, str(EXAMPLE / "job.yaml"))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_reader_and_the_recipe_make_prompts(used: dict[str, Any]) -> None:
    first, second = used["prompts"]
    assert first[0] == "riddles:1"
    assert first[1] == "What floats on rivers and needs a paddle?\n\nAnswer with one palindrome.\n"
    assert (first[2]["letter"], first[3]) == ("k", {"letter": "k"})
    assert second[3] == {"letter": "r"}


def test_the_scorer_scores(used: dict[str, Any]) -> None:
    assert used["verdicts"] == [
        ["passed", 1.0],
        ["wrong_answer", 0.0],  # four letters, but the job requires five
        ["wrong_answer", 0.0],
        ["wrong_answer", 0.0],
        ["no_answer", 0.0],
    ]


def test_the_objective_equals_max_at_k_with_k_equal_n(used: dict[str, Any]) -> None:
    rewards = np.array([[0.0, 2.0, 5.0, 9.0], [1.0, 1.0, 4.0, 0.0]])
    valid = np.array([[True] * 4, [True, True, False, True]])
    same = {"kind": "max_at_k", "k": 4, "baseline": "loo_minus_one"}
    np.testing.assert_allclose(used["advantages"], 0.5 * advantages(rewards, same, valid=valid))
    assert used["advantages"][0] == [0.0, 0.0, 0.0, 2.0]


def test_schema_and_dump_show_the_plugins(used: dict[str, Any]) -> None:
    assert used["scorer"]["properties"]["kind"]["const"] == "palindrome"
    assert used["scorer"]["properties"]["shortest"]["default"] == 3
    assert used["objective"]["title"] == "TopGap"
    assert used["formats"][-1] == "blocks"
    assert used["dumped"] == {"kind": "palindrome", "values": {"passed": 1.0, "failed": 0.0}, "shortest": 5}


def test_a_wrong_key_of_a_plugin_is_named(site: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text((EXAMPLE / "job.yaml").read_text().replace("shortest: 5", "longest: 5"))
    code = (
        "import sys; from pathlib import Path; from services.jobs.job_file import load_job; load_job(Path(sys.argv[1]))"
    )
    done = run(site, "-c", code, str(tmp_path / "job.yaml"))
    assert "scorer.longest: unknown key" in done.stderr


def test_importing_the_job_tree_loads_no_plugin(site: Path) -> None:
    done = run(site, "-c", "import sys, volley.job, services.cli; print('volley_example_plugin' in sys.modules)")
    assert done.stdout.strip() == "False"
