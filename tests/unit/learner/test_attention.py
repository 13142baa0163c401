"""Flash attention is the default only where all that it needs is there. The package itself is not installed here."""

from pathlib import Path
from typing import Any

import pytest
import transformers.utils

from learner.attention import FLASH, implementation
from learner.config import LearnerConfig
from tests.models import tiny_llama
from volley.model import ModelSpec
from volley.update import LearnerSpec, Optimizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: True)


def config(model: Path, *, dtype: str = "bfloat16", **learner: Any) -> LearnerConfig:
    spec = ModelSpec.model_validate({"path": model, "dtype": dtype})
    return LearnerConfig(spec, LearnerSpec(**{"gpus_per_rank": 1, **learner}), Optimizer(), 1, 0, model)


def test_it_is_the_default_on_a_gpu_in_bfloat16(model: Path, installed: None) -> None:
    assert implementation(config(model)) == FLASH


def test_it_is_not_chosen_where_it_is_not_installed(model: Path) -> None:
    assert implementation(config(model)) is None


@pytest.mark.parametrize(
    "changes",
    [{"gpus_per_rank": 0}, {"dtype": "float32"}, {"shared_rows": True}],
    ids=["CPU", "float32", "rows with masks"],
)
def test_what_it_cannot_do_is_left_to_transformers(model: Path, installed: None, changes: dict[str, Any]) -> None:
    assert implementation(config(model, **changes)) is None


@pytest.mark.parametrize("asked", ["sdpa", "eager", FLASH])
def test_what_the_job_asks_for_goes_first(model: Path, installed: None, asked: str) -> None:
    assert implementation(config(model, attention=asked)) == asked


def test_models_that_cannot_use_it_do_not(model: Path, installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.LlamaForCausalLM._supports_flash_attn", False)
    assert implementation(config(model)) is None


def test_a_folder_without_a_model_is_for_loading_to_report(tmp_path: Path, installed: None) -> None:
    assert implementation(config(tmp_path)) is None
