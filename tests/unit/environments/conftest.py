"""An interpreter with a package of its own, and programs that need it."""

import venv
from pathlib import Path

import pytest

URL = "http://127.0.0.1:1/v1"
PROGRAMS = """
import asyncio, ctypes, os, subprocess, sys, threading, time
import only_here

def write(row):
    for fd in range(3, 12):
        try:
            if "pipe" in os.readlink(f"/proc/self/fd/{fd}"):
                os.write(fd, row["text"].encode() * row.get("times", 1))
        except OSError:
            pass

class Mute(Exception):
    def __str__(self):
        raise ValueError

async def agent(row, base_url, api_key):
    does = row["does"]
    if does == "raise":
        raise ValueError("no\\nluck")
    if does == "mute":
        raise Mute
    if does == "exit":
        sys.exit(3)
    if does == "interrupt":
        raise KeyboardInterrupt
    if does == "cancelled":
        raise asyncio.CancelledError
    if does == "die":
        print("last words", file=sys.stderr)
        os._exit(7)
    if does == "crash":
        ctypes.string_at(0)
    if does == "block":
        time.sleep(600)
    if does == "write":
        write(row)
        await asyncio.sleep(60)
    if does == "flood":
        while True:
            print("x" * 100_000)
    if does == "fork":
        if os.fork() == 0:
            time.sleep(600)
        os._exit(7)
    if does == "start":
        return float(subprocess.Popen(["sleep", "600"]).pid)
    if does == "pid":
        return float(os.getpid())
    await asyncio.sleep(row.get("seconds", 0))
    print("printed")
    return row.get("returns", only_here.value((base_url, api_key)))

def plain(row, base_url, api_key):
    if row["does"] in ("exit", "interrupt", "cancelled", "mute"):
        return asyncio.run(agent(row, base_url, api_key))
    if row["does"] == "pid":
        return os.getpid()
    time.sleep(row.get("seconds", 0))
    while "until" in row and not os.path.exists(row["until"]):
        time.sleep(0.01)
    return {"reward": eval(row["returns"]), "answer": 4, "detail": "fi\\nne"}

def forgets(row, base_url, api_key):
    return agent(row, base_url, api_key)

class Klass:
    pass

def two(row, url):
    pass
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with a package that Volley's does not have."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "only_here.py").write_text(f"def value(seen): return float(seen == ({URL!r}, 'key'))\n")
    return str(folder / "bin" / "python")


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_programs.py").write_text(PROGRAMS)
    (tmp_path / "breaks.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
