"""Errors of ``volley serve`` before anything is started, and the settings that it takes from a run."""

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli import app
from services.cli.serve import serve_spec
from services.runs.serve import check_model
from services.store.folder import RunFolder
from tests.chat_models import chat_tokenizer
from tests.models import tiny_llama
from volley.errors import HostError, JobError
from volley.job import JOB


def serve(*arguments: str) -> None:
    CliRunner().invoke(app, ["serve", *arguments], catch_exceptions=False)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    tree = {
        "kind": "eval",
        "name": "served",
        "model": {"path": str(tmp_path / "base"), "dtype": "bfloat16"},
        "data": {"path": str(tmp_path / "d.jsonl")},
        "scorer": {"kind": "exact"},
        "sampling": {"n": 1},
        "ks": [1],
        "actors": {"kv_cache_gb": 0.5, "count": 3},
        "gateway": {"tool_parser": "hermes"},
    }
    return RunFolder.create(tmp_path / "runs", JOB.validate_python(tree))


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(HostError, match=f"port {port} of 127.0.0.1: .*choose another --port"):
            serve("model", "--port", str(port))


def test_other_machines_need_a_token(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"other machines can reach --host 0\.0\.0\.0: pass --token-file"):
        serve("model", "--host", "0.0.0.0")
    (tmp_path / "token").write_text("\n")
    with pytest.raises(HostError, match=r"the token file .* is empty"):
        serve("model", "--token-file", str(tmp_path / "token"))


def test_models_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match=r"neither a model folder \(no config.json\) nor a run folder"):
        serve(str(tmp_path / "empty"), "--port", "0")
    with pytest.raises(JobError, match=r"there is no folder runs/nosuch: name one that exists"):
        serve("runs/nosuch", "--port", "0")
    model = tiny_llama(tmp_path / "model")
    with pytest.raises(JobError, match=r"gateway.tool_parser: vLLM has no parser 'hermess'; did you mean hermes\?"):
        serve(str(model), "--port", "0", "--tool-parser", "hermess")
    (model / "model.safetensors").unlink()
    with pytest.raises(JobError, match=r"no \*\.safetensors there"):
        serve(str(model), "--port", "0")
    (model / "adapter_config.json").write_text(json.dumps({}))
    (model / "config.json").unlink()
    with pytest.raises(JobError, match="is only an adapter"):
        serve(str(model), "--port", "0")


@pytest.mark.parametrize("parser", ["hermes", None])
def test_a_parser_whose_tools_the_template_leaves_out_is_noted(tmp_path: Path, parser: str | None) -> None:
    tokenizer = chat_tokenizer("{% for m in messages %}{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}")
    model = tiny_llama(tmp_path / "model", tokenizer=tokenizer, max_position_embeddings=64)
    length, notice = check_model(serve_spec(model, None, {"gateway.tool_parser": parser}))
    assert length == 64
    assert notice.startswith("gateway.tool_parser: the model's chat template leaves out the tools") is bool(parser)


def test_settings_are_the_runs_unless_given(folder: RunFolder, tmp_path: Path) -> None:
    spec = serve_spec(tmp_path / "m", folder, {"actors.max_num_seqs": 4, "model.path": "elsewhere"})
    assert (spec.model.path, spec.model.dtype, spec.model.lora) == (tmp_path / "m", "bfloat16", None)
    assert (spec.actors.kv_cache_gb, spec.actors.max_num_seqs, spec.gateway.tool_parser) == (0.5, 4, "hermes")
    assert serve_spec(tmp_path / "m", None, {}).model.dtype == "float32"


@pytest.mark.parametrize(("key", "problem"), [("actors.gpu", "actors.gpu: unknown key"), ("sampling.n", "unknown key")])
def test_unknown_settings(key: str, problem: str) -> None:
    with pytest.raises(JobError, match=problem):
        serve_spec(Path("m"), None, {key: 1})
