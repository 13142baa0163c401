"""`volley check` and the start of `volley run`: a scorer function is called once, and something is said at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from services.cli import local
from services.recording.display import Display
from services.runs.run import prepare
from tests.chat_models import chat_tokenizer
from tests.models import tiny_llama
from tests.unit.cli.commands import Volley
from volley.job import JOB

VOLLEY = (sys.executable, "-c", "from services.cli import entry; entry()")
SCORER = """
import os

def reward(sample, row):
    if sample == "pid": return os.getpid()
    if sample == "first": return ord(sample[99])
    return float(sample == row["anser"])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("check") / "model")


@pytest.fixture
def job(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_checked_scores.py").write_text(SCORER)
    monkeypatch.delitem(sys.modules, "my_checked_scores", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    tree = {
        **{"kind": "rl", "name": "x", "steps": 1, "model": {"path": str(model)}, "data": {"path": "rows.jsonl"}},
        "scorer": {"kind": "python", "target": "my_checked_scores:reward"},
        **{"objective": {"kind": "mean"}, "sampling": {"n": 2, "max_tokens": 4}},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "job.yaml"


def test_a_function_that_raises_is_reported_with_its_traceback(volley: Volley, job: Path) -> None:
    code, out, errors = volley("check", str(job))
    assert code == 1
    assert out == ""
    assert "with prompt rows:1 and an empty answer: my_checked_scores:reward raised KeyError: 'anser' (line 7" in errors
    assert """return float(sample == row["anser"])""" in errors


def test_the_call_is_described_and_made_in_another_process(volley: Volley, job: Path) -> None:
    (job.parent / "my_checked_scores.py").write_text(SCORER.replace("anser", "answer"))
    code, out, errors = volley("check", str(job))
    assert code == 0
    assert errors.splitlines()[0] == f"{job}: checking the job, its data, tokenizer and scorer"
    assert out.splitlines()[0].endswith("was called once: an empty answer to prompt rows:1 gets reward 0")
    (call,) = json.loads(volley("check", str(job), "--answer", "3", "--json")[1])["calls"]
    assert (call["reward"], call["answer"], call["prompt"]) == (1.0, "3", "rows:1")
    (call,) = json.loads(volley("check", str(job), "--answer", "pid", "--json")[1])["calls"]
    assert call["reward"] != os.getpid()


def test_a_run_warns_of_a_function_that_raises(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = yaml.safe_load(job.read_text())
    run = prepare(JOB.validate_python({**tree, "data": {"path": str(job.parent / "rows.jsonl")}}))
    local.warn_of_scorer(run, Display())
    told = capsys.readouterr().out
    assert "warning: scorer: called with prompt rows:1 and an empty answer" in told
    assert "Traceback" in told


PROGRAM = """
import asyncio, json, os, subprocess, time, urllib.request

def ask(base_url, api_key, *messages, **more):
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]

USER = {"role": "user", "content": "one"}

def two_calls(row, base_url, api_key):
    print("as noise")
    first = ask(base_url, api_key, USER)
    second = ask(base_url, api_key, USER, first, {"role": "user", "content": "more"})
    return {"reward": float(second["content"] == "right"), "answer": second["content"], "detail": str(os.getpid())}

def raises(row, base_url, api_key):
    return int(ask(base_url, api_key, USER)["content"])

def hangs(row, base_url, api_key):
    time.sleep(600)

async def no_call(row, base_url, api_key):
    return 1.0

def rewrites(row, base_url, api_key):
    ask(base_url, api_key, USER)
    ask(base_url, api_key, {"role": "user", "content": "two"})

def ends(row, base_url, api_key):
    os._exit(7)

def leaves(row, base_url, api_key):
    subprocess.Popen(["sleep", "130"])
    return len(ask(base_url, api_key, USER))

def endless(row, base_url, api_key):
    messages = [USER]
    while True:
        messages += [ask(base_url, api_key, *messages), USER]

def nothing(row, base_url, api_key):
    ask(base_url, api_key, USER)

def nan(row, base_url, api_key):
    ask(base_url, api_key, USER)
    return float("nan")

def elsewhere(row, base_url, api_key):
    ask("http://127.0.0.1:9/v1", api_key, USER)

def with_tools(row, base_url, api_key):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    ask(base_url, api_key, USER, tools=[tool])
    return 1.0

def spell(word: str) -> str:
    '''Spell a word.'''
    return "-".join(word)

class Held:
    async def setup(self):
        self.said = {"role": "user", "content": "held"}

    async def run(self, row, base_url, api_key):
        return float(len(await asyncio.to_thread(ask, base_url, api_key, self.said)))

    async def close(self):
        print("closed in order")
        await asyncio.sleep(0)

class Broken:
    def __init__(self):
        raise OSError("no server there")

    async def run(self, row, base_url, api_key):
        return 0.0
"""


@pytest.fixture
def program_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = tiny_llama(tmp_path / "model", tokenizer=chat_tokenizer())
    (tmp_path / "my_checked_agent.py").write_text(PROGRAM)
    monkeypatch.delitem(sys.modules, "my_checked_agent", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    tree = {
        **{"kind": "eval", "name": "x", "model": {"path": str(model)}, "data": {"path": "rows.jsonl"}, "ks": [1]},
        "rollout": {"kind": "program", "target": "my_checked_agent:two_calls", "timeout_s": 5, "max_calls": 3},
        "sampling": {"n": 1, "max_tokens": 200},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "job.yaml"


def test_one_episode_of_a_program_is_run_against_a_stub(volley: Volley, program_job: Path) -> None:
    code, out, _ = volley("check", str(program_job))
    assert code == 0
    assert out.endswith("eval job x: the job, its data, tokenizer and program are valid\n")
    assert "my_checked_agent:two_calls ran one episode with prompt rows:1 and a stub as model" in out
    assert "2 calls of the model" in out
    assert "reward 0 (wrong_answer), answer 'This is the answer of a stub.'" in out
    assert "\n    -> 'This is the answer of a stub.'" in out
    episode = json.loads(volley("check", str(program_job), "--answer", "right", "--json")[1])["episode"]
    assert (episode["status"], episode["reward"], episode["answer"]) == ("passed", 1.0, "right")
    assert int(episode["detail"]) != os.getpid()
    first, second = episode["calls"]
    assert first["context"].endswith("<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n")
    assert second["context"] == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert episode["sampled"] == first["tokens"] + second["tokens"]
    assert episode["observed"] == second["observed"]


def test_a_program_of_an_rl_job_is_run_too(volley: Volley, program_job: Path) -> None:
    tree = yaml.safe_load(program_job.read_text())
    del tree["ks"]
    training = {"kind": "rl", "steps": 1, "objective": {"kind": "mean"}, "sampling": {"n": 2, "max_tokens": 200}}
    program_job.write_text(yaml.safe_dump({**tree, **training}))
    code, out, errors = volley("check", str(program_job))
    assert code == 0, errors
    assert "2 calls of the model" in out


@pytest.mark.parametrize(
    ("target", "code", "told"),
    [
        ("raises", 1, ("raised ValueError", "--answer TEXT", "return int(")),
        ("hangs", 1, ("rollout.timeout_s, 5 s, though the stub answers at once", "No call of the model was answered")),
        ("no_call", 1, ("without a call of the model", "base_url and api_key")),
        ("rewrites", 1, ("history was rewritten: message 0",)),
        ("ends", 1, ("ended its process (7)",)),
        ("nothing", 1, ("returned no reward, and the job has no scorer",)),
        ("Broken", 1, ("raised OSError: no server there",)),
        ("elsewhere", 1, ("raised URLError", "No call of the model was answered until then: make the calls with the")),
        ("nan", 1, ("returned the reward nan; return a finite number",)),
        ("sepll", 1, ("has no function 'sepll'; did you mean my_checked_agent:spell?",)),
        ("endless", 0, ("3 calls of the model", "reward 0 (no_answer)", "ran out of calls")),
        ("leaves", 0, ("1 call of the model", "reward 2 (passed)")),
        ("Held", 0, ("1 call of the model", "reward 2 (passed)")),
    ],
)
def test_what_an_episode_shows(
    volley: Volley, program_job: Path, target: str, code: int, told: tuple[str, ...]
) -> None:
    found, out, errors = volley("check", str(program_job), "--set", f"rollout.target=my_checked_agent:{target}")
    assert found == code, errors
    for each in told:
        assert each in (errors if code else out)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_an_error(volley: Volley, program_job: Path) -> None:
    code, _, errors = volley("check", str(program_job), "--set", "rollout.max_context=10")
    assert code == 1
    assert "leaves no room for an answer in 10 tokens of context: raise rollout.max_context" in errors


@pytest.mark.parametrize(
    ("target", "parser", "advised"),
    [("with_tools", "null", True), ("two_calls", "null", False), ("with_tools", "hermes", False)],
)
def test_tools_whose_calls_nothing_parses_are_noted(
    volley: Volley, program_job: Path, target: str, parser: str, advised: bool
) -> None:
    changes = ("--set", f"rollout.target=my_checked_agent:{target}", "--set", f"gateway.tool_parser={parser}")
    code, _, errors = volley("check", str(program_job), *changes)
    assert code == 0, errors
    assert ("note: the program sends tools, but no gateway.tool_parser is set" in errors) is advised
    notes = json.loads(volley("check", str(program_job), *changes, "--json")[1])["notes"]
    assert any("write gateway: {tool_parser: hermes}" in each for each in notes) is advised


@pytest.mark.parametrize(("target", "noted"), [("with_tools", True), ("two_calls", False)])
def test_tools_that_the_template_leaves_out_are_noted(
    volley: Volley, program_job: Path, target: str, noted: bool
) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    (program_job.parent / "model" / "chat_template.jinja").write_text(template)
    changes = ("--set", f"rollout.target=my_checked_agent:{target}", "--set", "gateway.tool_parser=hermes")
    code, _, errors = volley("check", str(program_job), *changes)
    assert code == 0, errors
    told = "note: the tools that the program sends: the model's chat template leaves out the tools and"
    assert (told in errors) is noted


@pytest.mark.parametrize(
    ("key", "name", "told"),
    [
        ("tool_parser", "hermess", "gateway.tool_parser: vLLM has no parser 'hermess'; did you mean hermes?"),
        ("tool_parser", "mine", "gateway.tool_parser: vLLM has no parser 'mine'; "),
        ("reasoning_parser", "qwen33", "gateway.reasoning_parser: vLLM has no parser 'qwen33'; did you mean qwen3?"),
    ],
)
def test_a_parser_that_vllm_does_not_have(volley: Volley, program_job: Path, key: str, name: str, told: str) -> None:
    code, _, errors = volley("check", str(program_job), "--set", f"gateway.{key}={name}")
    assert code == 1
    assert told in errors


def test_counts_of_one_are_singular(volley: Volley, program_job: Path) -> None:
    _, out, _ = volley(
        *(
            "check",
            str(program_job),
            "--set",
            "rollout.target=my_checked_agent:endless",
            "--set",
            "sampling.max_tokens=1",
        )
    )
    assert "1 call of the model, 1 token sampled" in out


def test_an_episode_with_tools_is_run_too(volley: Volley, program_job: Path) -> None:
    tree = yaml.safe_load(program_job.read_text())
    tools = {"kind": "tools", "tools": [{"kind": "function", "target": "my_checked_agent:spell"}]}
    more = {"rollout": tools, "scorer": {"kind": "exact"}, "gateway": {"tool_parser": "hermes"}}
    program_job.write_text(yaml.safe_dump({**tree, **more}))
    code, out, errors = volley("check", str(program_job))
    assert code == 0, errors
    assert "tools ran one episode with prompt rows:1 and a stub as model" in out
    assert "1 call of the model" in out
    assert "the scorer judges the answer" in out
    assert out.endswith("the job, its data, tokenizer, tools and scorer are valid\n")


LOUD = """
import os
print("loading a model")
os.system("echo from a child")
os.write(1, b"from a library")

def reward(sample, row):
    return 1.0
"""


def test_what_a_users_module_prints_does_not_spoil_the_json(job: Path) -> None:
    (job.parent / "my_checked_scores.py").write_text(LOUD)
    done = subprocess.run([*VOLLEY, "check", job, "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert json.loads(done.stdout)["valid"]
    assert all(printed in done.stderr for printed in ("loading a model", "from a child", "from a library"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("command", ["check", "run"])
def test_a_signal_during_the_check_ends_it_in_order(job: Path, command: str, number: signal.Signals) -> None:
    began, scratch = job.parent / "began", job.parent / "scratch"
    scratch.mkdir()
    hangs = f"import time\nopen({str(began)!r}, 'w').close()\ntime.sleep(60)\n"
    (job.parent / "my_checked_scores.py").write_text(hangs)
    with subprocess.Popen(
        [*VOLLEY, command, job], stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(scratch)}, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not began.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(30) == 130
    assert not list(scratch.glob("volley-*"))


THREAD = "threading.Thread(target=time.sleep, args=(600,), name='watcher').start()"
POOL = "concurrent.futures.ThreadPoolExecutor(thread_name_prefix='watcher').submit(time.sleep, 600)"


@pytest.mark.parametrize(("started", "reward", "code"), [(THREAD, "1.0", 0), (POOL, "None + 1", 1)])
def test_a_thread_that_the_users_module_leaves_running_does_not_keep_the_check_alive(
    job: Path, started: str, reward: str, code: int
) -> None:
    module = f"import concurrent.futures, threading, time\n{started}\ndef reward(sample, row):\n    return {reward}\n"
    (job.parent / "my_checked_scores.py").write_text(module)
    done = subprocess.run([*VOLLEY, "check", job], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert "did not wait for the thread watcher" in done.stderr
    assert ("are valid" in done.stdout) == (code == 0)
