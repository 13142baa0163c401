"""Names of vLLM's parsers, which are read from its source without importing it."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from actors.parser_names import check_parsers, parser_names, unknown_parser
from volley.errors import JobError
from volley.gateway import GatewaySpec

PROGRAM = """
import sys
from actors.parser_names import check_parsers
from volley.gateway import GatewaySpec
check_parsers(GatewaySpec(tool_parser="hermes", reasoning_parser="qwen3"))
assert not {"vllm", "torch"} & set(sys.modules)
"""


def test_the_installed_names_are_known_without_an_import() -> None:
    assert {"hermes", "llama3_json", "pythonic"} <= set(parser_names("tool_parser"))
    assert {"qwen3", "deepseek_r1"} <= set(parser_names("reasoning_parser"))
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_a_name_far_from_all_others_is_answered_with_all() -> None:
    assert str(unknown_parser("tool_parser", "zzz", ("a", "b"))).endswith("'zzz'; it has a, b")
    check_parsers(GatewaySpec())


@pytest.mark.parametrize("source", [None, "", "_TOOL_PARSERS_TO_REGISTER = made()", "def broken(:"])
def test_a_vllm_whose_names_cannot_be_read_decides_itself(
    source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vllm" / "tool_parsers"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    if source is not None:
        (folder / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert parser_names("tool_parser") == ()
    check_parsers(GatewaySpec(tool_parser="mine"))


def test_a_plugin_of_vllm_may_add_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="no parser 'mine'"):
        check_parsers(GatewaySpec(tool_parser="mine"))
    plugin = importlib.metadata.EntryPoint("mine", "my_parsers:register", "vllm.general_plugins")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: (plugin,))
    check_parsers(GatewaySpec(tool_parser="mine"))
