"""An interpreter that a slot's account cannot reach is bound elsewhere, and finds its library there."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from reward_servers.sandbox import launch

pytestmark = pytest.mark.integration
ACCOUNT = 65_533  # of no slot


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts sandboxes under other accounts")
@pytest.mark.parametrize(
    ("libraries", "sources_only", "found"),
    [("lib", False, "/mnt/0/lib"), ("lib", True, None), ("", False, None), ("../lib", False, None)],
    ids=["bound", "in bubblewrap at its own path", "no library", "elsewhere"],
)
def test_the_library_is_looked_for_where_it_is_bound(
    libraries: str, sources_only: bool, found: str | None, tmp_path: Path
) -> None:
    home = tmp_path / "python"
    for folder in (home / "lib", tmp_path / "lib"):
        folder.mkdir(parents=True)
    plan = {
        "uid": ACCOUNT,
        "command": ["/usr/bin/env"],
        "stage": [str(home)],
        "sources_only": sources_only,
        "libraries": str((home / libraries).resolve()) if libraries else "",
    }
    command = [sys.executable, "-I", "-S", "-B", str(launch.STAGE), json.dumps(plan)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={})
    lines = [line for line in done.stdout.splitlines() if line.startswith("LD_LIBRARY_PATH=")]
    assert lines == ([] if found is None else [f"LD_LIBRARY_PATH={found}"])


@pytest.mark.parametrize("shared", [0, 1])
def test_only_an_interpreter_that_is_linked_to_a_library_needs_its_folder(
    shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"Py_ENABLE_SHARED": shared, "LIBDIR": "/opt/python/lib"}
    monkeypatch.setattr(sysconfig, "get_config_var", variables.get)
    assert launch._libraries.__wrapped__() == ("/opt/python/lib" if shared else "")
