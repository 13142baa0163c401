"""A client of either form, a server for it, and no configuration of this account."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.unit.client.forms import Awaiting, Blocking, Connect, Form, Handler
from tests.unit.fake_api import FakeApi, served


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("VOLLEY_TOKEN", "VOLLEY_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("VOLLEY_HOME", str(tmp_path / "home"))


@pytest.fixture(params=[Blocking, Awaiting])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Open a client of one form: of a server by its URL, or of a function that answers requests."""
    opened: list[Form] = []

    def open_client(server: str | Handler) -> Form:
        transport = None if isinstance(server, str) else httpx.MockTransport(server)
        opened.append(request.param(server if isinstance(server, str) else "http://server", transport))
        return opened[-1]

    yield open_client
    for form in opened:
        form.close()


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    with served(fake.app) as url:
        fake.url = url
        yield fake
