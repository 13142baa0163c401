"""The commands on the pages, run unchanged from top to bottom, against one stack at a tiny scale.

Each page runs in one shell, in a folder with the files it needs. Only `SMALLER`, `CHANGED` and `PRELUDE` differ from
what the pages say.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.models import tiny_llama
from tests.pages import PAGES, ROOT, blocks, page_id, to_run
from volley.forking import VARIABLE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SECONDS = 480  # for one page, on a busy machine
SMALLER: dict[str, Any] = {"prompts_per_step": 4, "checkpoint": {"every": 1}, "learner": {"ranks": 1}}
STEPS = {"sft": 3, "rl": 2}
ENDLESS = "--set steps=100000 --set max_dead_batches=100000"
CHANGED = (
    (r"\.venv/bin/", ""),
    (r"\bvolley up\b", "volley up --port 0 --object-store-mb 400 --cpus 8"),
    (r"\bvolley down\b", "true"),  # one stack for all pages, which is stopped after the last one
    (r"--supervised 20000 --train 2000 --heldout 50", "--supervised 400 --train 40 --heldout 4"),
    # Runs that a page changes are stopped, so that none ends too early on a slow machine.
    (r"\bvolley submit (job|best-of-8)\.yaml(?= *(#.*)?$)", rf"volley submit \1.yaml {ENDLESS}"),
    (r"\b(volley set RUN \S+)(?= *(#.*)?$)", r"\1; stop_after_a_step"),
    (r"\b(volley show RUN --follow)(?= *(#.*)?$)", r"\1 || [ $(state) = stopped ]"),
    (r"\b(volley \w+ )RUN\b", r'\1"$(newest)"'),
    (r"export VOLLEY=\S+", "export VOLLEY=$API"),
    (r"\bcurl -N\b", "curl_for_a_while -N"),
)
PRELUDE = """
newest() { volley ls --json | jq -r '.[0].id'; }
state() { volley ls --json | jq -r '.[0].state'; }
stop_after_a_step() {
    until [ "$(volley ls --json | jq '.[0].step')" -gt 0 ]; do sleep 0.5; done
    volley stop "$(newest)"
}
curl() { command curl -sS --fail-with-body "$@"; }
curl_for_a_while() { command curl -sS --max-time 2 "$@" || [ $? = 28 ]; }
"""
API_PAGE = ROOT / "docs" / "api.md"
SHELL_PAGES = [page for page in PAGES if to_run(page, "bash") and page != API_PAGE]
# README.md starts the stack with the code that its job names; later pages use the running stack.
SHELL_PAGES.sort(key=lambda page: page.name != "README.md")


class Place:
    """A home folder with a project that contains what the pages assume."""

    def __init__(self, home: Path) -> None:
        self.home, self.project = home, home / "my-project"
        self.project.mkdir()
        tiny_llama(self.project / "my-model")
        rows = [{"prompt": f"{a} {b}=", "answer": str(a)} for a in range(1, 9) for b in range(1, 5)]
        (self.project / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (self.project / "eval.jsonl").write_text('{"prompt": "1 2="}\n')
        (self.project / "tests").symlink_to(ROOT / "tests")
        (self.project / "job.json").write_text(json.dumps({"job": RL, "tags": {"team": "a"}}))
        (self.project / "my-job.yaml").write_text((ROOT / "deploy" / "jobs" / "gpu-1.yaml").read_text())
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("VOLLEY", "RAY"))},
            **{name: os.environ[name] for name in (VARIABLE,) if name in os.environ},
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),  # what vLLM found out once
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def prepare(self, page: Path) -> None:
        """Write the files that the page shows, and a small job for a page that shows none."""
        (self.project / "job.yaml").write_text(yaml.safe_dump(SFT))
        for block in blocks(page):
            if block.how == "file":
                text = block.text if block.language != "yaml" else smaller(block.text)
                (self.project / block.what).write_text(text)

    def shell(self, script: str, **variables: str) -> str:
        """Run the script; returns its output. If a command fails, the test fails with the output."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", PRELUDE + script],
            cwd=self.project,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-6000:]}"
        return done.stdout


SFT: dict[str, Any] = {
    "kind": "sft",
    "name": "small",
    "model": {"path": "my-model"},
    "data": {"path": "train.jsonl"},
    "steps": 2,
    "rows_per_step": 4,
}
RL: dict[str, Any] = {
    "kind": "rl",
    "name": "small",
    "model": {"path": "/m"},
    "data": {"path": "/d.jsonl"},
    "steps": 2,
    "scorer": {"kind": "countdown"},
    "objective": {"kind": "max_at_k", "k": 8},
}


def smaller(text: str) -> str:
    """A page's job with few steps and few, short samples."""
    tree = yaml.safe_load(text)
    tree["steps"] = STEPS[tree["kind"]]
    if tree["kind"] == "sft":
        return yaml.safe_dump({**tree, "rows_per_step": 8})
    tree["sampling"]["max_tokens"] = min(tree["sampling"]["max_tokens"], 10)
    tree["actors"] = {"count": 1, "max_num_seqs": 64, "kv_cache_gb": 0.3}
    return yaml.safe_dump({**tree, **SMALLER})


def script(page: Path) -> str:
    """A script of the page's commands that prints each before running it."""
    lines = ["set -x"]
    for block in to_run(page, "bash"):
        text = block.text
        for pattern, replacement in CHANGED:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        lines += [f"# {block.place}", text]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("home"))
    try:
        yield place
    finally:
        place.shell("volley down")


@pytest.mark.parametrize("page", SHELL_PAGES, ids=page_id)
def test_the_commands_of_a_page_do_what_it_says(page: Path, place: Place) -> None:
    place.prepare(page)
    place.shell(script(page))


def test_the_requests_of_the_api_page_are_answered(place: Place) -> None:
    """The real API with a real Redis answers them; the drivers of its runs are simulated."""
    with simulated_service(place) as url:
        run, old = (httpx.get(f"{url}/v1/runs?state={state}").json()["items"][0]["id"] for state in ("running", "done"))
        place.shell(script(API_PAGE), API=url, TOKEN="any", RUN=run, OLD=old)


@contextlib.contextmanager
def simulated_service(place: Place) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.dashboard_server", "--port", str(port), "--tick", "0.1"]
    server = subprocess.Popen(command, cwd=ROOT, env=place.environment)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/readyz").status_code < 500:
                    break
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page, "console")], ids=page_id)
def test_sessions_print_what_the_page_shows(page: Path, place: Place) -> None:
    for block in to_run(page, "console"):
        command, _, shown = block.text.removeprefix("$ ").partition("\n")
        printed = place.shell(command)
        assert not shown or printed == shown, block.place
