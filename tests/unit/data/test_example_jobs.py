"""The jobs in examples/jobs, with small hand-made files instead of the published data sets they name."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from reward_servers.scorers import check_scorer
from services.cli import app
from services.data.mixture import order_of
from services.data.prompts import read_prompts
from services.data.tokens import encode_prompts, load_tokenizer
from tests.models import character_tokenizer, tiny_llama
from volley.data import DataSpec
from volley.job import JOB, RLJob
from volley.records import Prompt

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "data"
JOBS = sorted((ROOT / "examples" / "jobs").glob("*.yaml"))
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}assistant:"
FILES = {  # by recipe; a data set that was converted beforehand has none
    "math": "math/train",
    "math500": "math500.jsonl",
    "gsm8k": "gsm8k.jsonl",
    "mbpp": "mbpp.jsonl",
    "humaneval": "humaneval.jsonl.gz",
    "arc_agi": "arc",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a chat model's tokenizer, and CodeContests converted as the comment in the job says."""
    folder = tmp_path_factory.mktemp("place")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tiny_llama(folder / "model"))
    source, out = FIXTURES / "codecontests.parquet", folder / "contests.jsonl"
    result = CliRunner().invoke(
        app, ["data", "convert", "codecontests", str(source), str(out), "--language", "python"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return folder


def local(source: dict[str, Any], place: Path) -> dict[str, Any]:
    """``source`` with a file of this repository instead of the one it names."""
    if "sources" in source:
        return {**source, "sources": [local(each, place) for each in source["sources"]]}
    kept = {key: value for key, value in source.items() if key not in ("hub", "config", "split", "revision")}
    path = FIXTURES / FILES[source["recipe"]] if "recipe" in source else place / Path(source["path"]).name
    return {**kept, "path": str(path)}


def usable(prompts: list[Prompt], job: RLJob, place: Path) -> None:
    assert job.scorer is not None
    check_scorer(job.scorer, prompts)
    assert prompts
    assert all(prompt.text.endswith("assistant:") for prompt in prompts)
    encode_prompts(load_tokenizer(place / "model"), prompts, room=job.sampling.max_tokens, length=100_000)


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.stem)
def test_a_job_reads_its_data_and_its_scorer_accepts_it(file: Path, place: Path) -> None:
    tree = yaml.safe_load(file.read_text())
    job = JOB.validate_python(tree)
    assert isinstance(job, RLJob)
    prompts = read_prompts(DataSpec.model_validate(local(tree["data"], place)), place / "model")
    usable(prompts, job, place)
    order_of(DataSpec.model_validate(local(tree["data"], place)), prompts, seed=job.seed)
    if "evaluation" in tree:
        held = DataSpec.model_validate(local(tree["evaluation"]["data"], place))
        usable(read_prompts(held, place / "model"), job, place)


def test_every_kind_of_problem_has_an_example() -> None:
    assert {file.stem for file in JOBS} >= {"math", "gsm8k", "code-stdin", "code-functions", "arc"}
    page = (ROOT / "docs" / "data.md").read_text()
    assert all(f"examples/jobs/{file.name}" in page for file in JOBS)
