"""With `pip install volley-rl` alone, every command either works or says in one line which extra it needs."""

import re
import subprocess
import sys
from importlib.metadata import requires

import pytest

BASE = {"numpy", "pydantic", "pyyaml", "rich", "typer"}
OPTIONAL = sorted({re.split(r"[^\w-]", each)[0].replace("-", "_") for each in requires("volley-rl") or []} - BASE)
VOLLEY = """
import importlib.metadata, sys
importlib.metadata.packages_distributions = dict  # as if nothing were installed
sys.modules.update(dict.fromkeys(sys.argv[1].split(","), None))  # importing any of them raises ModuleNotFoundError
sys.argv = ["volley", *sys.argv[2:]]
from services.cli import main
main()
"""
JOB = "examples/jobs/math.yaml"
COMMANDS = (
    ("check", JOB),
    ("run", JOB),
    ("up",),
    ("down",),
    ("submit", JOB),
    ("ls",),
    ("show", "run"),
    ("logs", "run"),
    ("eval", "model"),
    ("export", "run", "--out", "model"),
    ("token", "ls"),
    ("data", "check", JOB),
    ("serve", "model"),
    ("model", "fetch", "smollm2-135m-instruct"),
    ("reward-server",),
)


ASKING = ("submit", "ls", "show", "logs", "token")  # commands that only ask the server


def volley(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", VOLLEY, ",".join((*OPTIONAL, "vllm")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_that_needs_an_extra_says_so(command: tuple[str, ...]) -> None:
    done = volley(*command)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    run = r"volley: this command needs \w+, which is not installed: pip install 'volley-rl\[cpu\]', or \[cuda\] .*"
    ask = r"volley: volley\.client needs httpx, which is not installed: pip install 'volley-rl\[client\]'"
    assert re.fullmatch(ask if command[0] in ASKING else run, line)


@pytest.mark.parametrize(
    "command", [("submit", JOB), ("ls",), ("show", "a"), ("logs", "a"), ("stop", "a")], ids=" ".join
)
def test_a_service_elsewhere_needs_httpx_alone(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "OPTIONAL", sorted({*OPTIONAL} - {"httpx", "h11"}))
    done = volley(*command, "--server", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("volley: http://127.0.0.1:1 does not answer")


def test_doctor_lists_what_is_missing() -> None:
    done = volley("doctor")
    assert done.returncode == 1
    assert not done.stderr
    assert "volley-rl[cpu]" in re.sub(r"\s+", "", done.stdout)


def test_help_and_schema_work() -> None:
    assert "Usage: volley" in volley("--help").stdout
    assert '"title"' in volley("schema").stdout


def test_a_module_of_the_user_that_is_missing_is_no_extra() -> None:
    from services.cli import missing_extra

    assert missing_extra(ModuleNotFoundError("no", name="my_rewards")) is None
    assert missing_extra(ModuleNotFoundError("no", name="ray.util")) is not None
