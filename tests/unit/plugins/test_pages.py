"""The settings shown in docs/extending.md and docs/integrations.md are valid."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import TypeAdapter

from volley.runtime_env import RuntimeEnvSpec
from volley.sinks import SinkSpec


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", Path("docs", page).read_text(), re.DOTALL)


def test_the_plugins_on_the_page_are_valid() -> None:
    found: dict[str, Any] = {}
    for block in blocks("extending.md", "python"):
        exec(compile(block, "docs/extending.md", "exec"), found)  # noqa: S102 - a page of this repository
    assert found["PALINDROME"].spec(shortest=5).kind == "palindrome"
    plugin = found["CENTRED"]
    np.testing.assert_allclose(plugin.advantages(np.array([[1.0, 3.0]]), None, plugin.spec()), [[-1.0, 1.0]])


def test_the_entry_points_on_the_page_are_those_of_the_example() -> None:
    (shown,) = blocks("extending.md", "toml")
    assert shown.strip() in Path("examples/plugin/pyproject.toml").read_text()


def test_the_settings_on_the_pages_are_valid() -> None:
    (shown,) = [each for each in blocks("extending.md", "yaml") if "runtime_env" in each]
    assert RuntimeEnvSpec.model_validate(yaml.safe_load(shown)["runtime_env"]).comes_later
    adapter: TypeAdapter[Any] = TypeAdapter(list[SinkSpec])
    (sinks,) = [each for each in blocks("integrations.md", "yaml") if each.startswith("sinks:")]
    assert [sink.kind for sink in adapter.validate_python(yaml.safe_load(sinks)["sinks"])] == [
        "tensorboard",
        "wandb",
        "mlflow",
    ]
    with pytest.raises(ValueError, match="kind"):
        adapter.validate_python([{"kind": "jsonl"}])
