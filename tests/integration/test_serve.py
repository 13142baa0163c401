"""``volley serve`` with a real engine and the real client of OpenAI."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.chat_models import chat_tokenizer
from tests.models import tiny_llama
from tests.pages import ROOT, blocks

pytestmark = pytest.mark.integration

VOLLEY = str(Path(sys.executable).parent / "volley")
SETTINGS = ["--set", "actors.kv_cache_gb=0.1", "--set", "actors.max_num_seqs=8"]
Process = tuple[subprocess.Popen[str], str, Path]  # the server, its URL, and what it prints on standard error
USER: Any = {"role": "user", "content": "count to ten"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server, with the command of agents.md on a model of the test's own."""
    folder = tmp_path_factory.mktemp("served")
    tiny_llama(folder / "tiny", tokenizer=chat_tokenizer())
    (folder / "token").write_text("secret\n")
    command = next(each for each in blocks(ROOT / "docs" / "agents.md") if each.text.startswith("volley serve"))
    _, serve, _, *options = command.text.split()
    given = [VOLLEY, serve, str(folder / "tiny"), *options, "--port", "0", "--token-file", str(folder / "token")]
    served_log = folder / "log"
    with served_log.open("w") as log:
        process = subprocess.Popen([*given, *SETTINGS], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving tiny (up to 512 tokens) at http://127.0.0.1:"), served_log.read_text()
        yield process, line.split(" at ")[1].partition(";")[0], served_log
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def client(served: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served[1], api_key="secret", max_retries=0, timeout=120) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    one, same, other = (
        client.chat.completions.create(model="tiny", messages=[USER], max_tokens=12, temperature=heat, seed=3)
        for heat in (0, 0, 2)
    )
    assert one.choices[0].message.content == same.choices[0].message.content
    assert one.choices[0].message.content != other.choices[0].message.content
    assert one.usage is not None
    assert one.usage.completion_tokens <= 12


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="the", max_tokens=12, temperature=0)
    pieces = client.completions.create(model="tiny", prompt="the", max_tokens=12, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text


def test_a_text_ends_the_answer(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="the", max_tokens=12, temperature=0).choices[0].text
    stop = whole[len(whole) // 2 :][:2]
    cut = client.completions.create(model="tiny", prompt="the", max_tokens=12, temperature=0, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_many_requests_at_once_and_bad_ones(client: openai.OpenAI, served: Process) -> None:
    with pytest.raises(openai.BadRequestError, match="n is not supported"):
        client.chat.completions.create(model="tiny", messages=[USER], n=3)
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(model="tiny", messages=[USER], top_p=3)
    with (
        openai.OpenAI(base_url=served[1], api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_it_ends_with_its_engine(served: Process) -> None:
    process, _, log = served
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert log.read_text() == "volley: stopping\n", "libraries print to a file"


def test_a_parser_that_vllm_does_not_have_is_all_that_is_said(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "tiny", tokenizer=chat_tokenizer())
    given = [VOLLEY, "serve", str(tmp_path / "tiny"), "--tool-parser", "no-such", "--port", "0"]
    ended = subprocess.run(given, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("volley: gateway.tool_parser: vLLM has no parser 'no-such'; ")
    assert ended.stderr.count("\n") == 1
