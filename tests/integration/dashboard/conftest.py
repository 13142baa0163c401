"""A real browser with the real API and Redis; the drivers of the runs are simulated (`tests.dashboard_server`)."""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, ViewportSize, async_playwright

from tests.dashboard_server import Stage, api
from tests.dashboard_server import stage as made_stage

WIDE: ViewportSize = {"width": 1280, "height": 900}
NARROW: ViewportSize = {"width": 360, "height": 740}

Open = Callable[..., Awaitable[Page]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("the dashboard's tests drive a browser and found none: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """One run of each kind and state, with the API over them."""
    async with made_stage(tmp_path_factory.mktemp("dashboard")) as made, api(made.url) as made.base:
        yield made


@pytest.fixture
async def visit(browser: Browser, stage: Stage) -> AsyncIterator[Open]:
    """Open a page of the dashboard; afterwards, assert that it had no error and contacted no other server."""
    faults: list[str] = []
    async with AsyncExitStack() as stack:

        async def open_page(address: str, *, faultless: bool = True, **options: Any) -> Page:
            context = await browser.new_context(**{"viewport": WIDE, **options})
            stack.push_async_callback(context.close)
            page = await context.new_page()
            if faultless:
                page.on("pageerror", lambda error: faults.append(str(error)))
                page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
            page.on("request", lambda asked: None if asked.url.startswith(stage.base) else faults.append(asked.url))
            await page.goto(f"{stage.base}/{address}")
            return page

        yield open_page
    assert faults == []
