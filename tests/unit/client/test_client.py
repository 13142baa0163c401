"""Both forms of the client are alike, typed and light."""

import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

from tests.unit.fake_api import FakeApi
from volley.client import AsyncClient, AsyncRun, Client, Metrics, Run, Update
from volley.views import RunView


def test_both_forms_have_the_same_methods_with_the_same_parameters() -> None:
    blocking, awaiting = Client("http://server"), AsyncClient("http://server")
    pairs: list[tuple[Any, Any]] = [(blocking, awaiting), (Run(blocking, "a"), AsyncRun(awaiting, "a"))]
    for one, other in pairs:
        names = [name for name in dir(one) if not name.startswith("_")]
        assert names == [name for name in dir(other) if not name.startswith("_")]
        for name in (name for name in names if callable(getattr(one, name))):
            first, second = (inspect.signature(getattr(each, name)) for each in (one, other))
            assert list(first.parameters.values()) == list(second.parameters.values()), name
            assert "self" not in first.parameters
            assert name == "close" or inspect.getdoc(getattr(one, name)), name


async def test_results_are_typed(api: FakeApi) -> None:
    """What mypy infers for each form is what a call returns."""
    api.add("a", state="running")
    with Client(api.url) as client:
        run = await asyncio.to_thread(client.run, "a")
        assert assert_type(await asyncio.to_thread(run.view), RunView).state == "running"
        assert assert_type(await asyncio.to_thread(run.metrics), Metrics).steps.tolist() == [2]
        assert isinstance(assert_type(run.follow(), Iterator[Update]), Iterator)
    async with AsyncClient(api.url) as other:
        found = await other.run("a")
        assert assert_type(await found.view(), RunView).state == "running"
        assert assert_type(await found.metrics(), Metrics).steps.tolist() == [2]
        assert isinstance(assert_type(found.follow(), AsyncIterator[Update]), AsyncIterator)


def test_the_client_imports_nothing_heavy() -> None:
    heavy = ("torch", "ray", "vllm", "deepspeed", "transformers", "redis", "fastapi", "typer", "pandas", "yaml")
    code = f"import json, sys, volley.client; print(json.dumps(sorted(set(sys.modules) & set({heavy!r}))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_without_httpx_the_client_says_what_to_install() -> None:
    code = "import sys; sys.modules['httpx'] = None\nimport volley.client"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "volley.client needs httpx, which is not installed: pip install 'volley-rl[client]'" in done.stderr
