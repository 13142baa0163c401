"""A model named on a hub is downloaded once, and what goes wrong says what to write. The hub here is a small server."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pydantic import ValidationError

from services.stack import keeper
from services.stack.folder import StackFolder
from services.stack.keeper import UpSettings
from volley.hub import HUB_TOKENS
from volley.model import ModelSpec

COMMIT, OLDER = "a" * 40, "b" * 40
CONTENT = {"config.json": b'{"model_type": "tiny"}', "model.safetensors": b"weights", "pytorch_model.bin": b"again"}


class Hub(BaseHTTPRequestHandler):
    """Answers as a hub with one model, ``org/tiny``, which has two commits."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if "org/private" in path and self.headers.get("Authorization") != "Bearer hf_secret":
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            return
        path = path.replace("org/private", "org/tiny")
        if "org/gated" in path:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif "org/tiny" not in path:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/org/tiny/tree/"):
            self._send(200, json.dumps([_entry(name) for name in CONTENT]).encode(), {})
        elif path.startswith("/api/models/org/tiny"):
            self._describe(path.rpartition("/")[2])
        else:
            name = path.rpartition("/")[2]
            headers = {"ETag": f'"{_id(name)}"', "X-Repo-Commit": path.split("/")[-2]}
            self._send(200, CONTENT[name], headers)

    def _describe(self, revision: str) -> None:
        commits = {"main": COMMIT, "tiny": COMMIT, COMMIT: COMMIT, "v1": OLDER, OLDER: OLDER}
        if revision not in commits:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        files = [{"rfilename": name} for name in CONTENT]
        self._send(200, json.dumps({"id": "org/tiny", "sha": commits[revision], "siblings": files}).encode(), {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


def _id(name: str) -> str:
    return sha1(CONTENT[name], usedforsecurity=False).hexdigest()


def _entry(name: str) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(CONTENT[name]), "oid": _id(name)}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(
    endpoint: str, home: Path, name: str, revision: str | None = None, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Ask for the model's folder in a process of its own, since the hub's client reads its variables as it starts."""
    script = f"from volley.hub import hub_model; print(hub_model({name!r}, {revision!r}))"
    environment = {**environment, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)


def test_a_model_is_downloaded_once_without_a_second_copy_of_its_weights(hub: str, tmp_path: Path) -> None:
    answers = [ask(hub, tmp_path, "org/tiny"), ask("http://127.0.0.1:9", tmp_path, "org/tiny")]
    folders = {Path(answer.stdout.strip()) for answer in answers}
    assert len(folders) == 1, [answer.stderr for answer in answers]
    (folder,) = folders
    assert folder.name == COMMIT
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: CONTENT[name] for name in ("config.json", "model.safetensors")
    }


@pytest.mark.parametrize("revision", ["v1", OLDER])
def test_a_revision_is_that_commit(hub: str, tmp_path: Path, revision: str) -> None:
    answer = ask(hub, tmp_path, "org/tiny", revision)
    assert Path(answer.stdout.strip()).name == OLDER, answer.stderr


@pytest.mark.parametrize(
    ("name", "revision", "problem"),
    [
        ("org/none", None, "the hub has no such model; for a private one, set HF_TOKEN to a token that may read it"),
        ("org/tiny", "v9", "at v9: the model has no such commit, tag or branch"),
        ("org/gated", None, "accept its terms on the hub, and set HF_TOKEN"),
        ("a/b/c", None, "write a name such as Qwen/Qwen3-0.6B, or set path to a folder"),
        ("", None, "write a name such as Qwen/Qwen3-0.6B, or set path to a folder"),
    ],
)
def test_what_the_hub_does_not_have(hub: str, tmp_path: Path, name: str, revision: str | None, problem: str) -> None:
    answer = ask(hub, tmp_path, name, revision)
    last = answer.stderr.strip().splitlines()[-1]
    assert last.startswith(f"volley.errors.JobError: model.hub: {name}")
    assert problem in last


def test_without_a_hub_the_error_names_the_other_ways(tmp_path: Path) -> None:
    answer = ask("http://127.0.0.1:9", tmp_path, "org/tiny")
    assert "not in the local cache, and the hub cannot be reached" in answer.stderr
    assert "volley model fetch and volley model import make one without a hub" in answer.stderr


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "set either path, to a folder, or hub"),
        ({"path": "/m", "hub": "org/tiny"}, "set either path, to a folder, or hub"),
        ({"path": "/m", "revision": "v1"}, "revision needs hub"),
    ],
)
def test_a_model_is_at_one_place(given: dict[str, str], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ModelSpec.model_validate(given)


@pytest.mark.parametrize("kept_in", ["a variable", "a file of the account"])
def test_without_the_operators_leave_a_service_uses_no_token(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_in: str
) -> None:
    """A submitter of a service could otherwise read whatever its operator may."""
    for name in HUB_TOKENS:
        monkeypatch.delenv(name, raising=False)
    if kept_in == "a variable":
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
    else:
        (tmp_path / "token").write_text("hf_secret")

    def downloaded(*, hub_token: bool) -> subprocess.CompletedProcess[str]:
        settings = UpSettings(folder=tmp_path, cpus=1, runs=tmp_path, hub_token=hub_token)
        environment = keeper._environment(settings, StackFolder(tmp_path))
        return ask(hub, tmp_path, "org/private", environment=environment)

    assert "for a private one, start the service with volley up --hub-token" in downloaded(hub_token=False).stderr
    assert not list(tmp_path.glob("**/model.safetensors"))
    answer = downloaded(hub_token=True)
    assert Path(answer.stdout.strip()).name == COMMIT, answer.stderr
