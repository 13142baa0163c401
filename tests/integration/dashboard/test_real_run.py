"""A run of the whole stack, watched and steered only from the browser."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.async_api import Browser, Page, expect

from tests.integration.dashboard.conftest import WIDE
from tests.integration.jobs import unhurried_job, write_inputs
from tests.integration.test_service import Service

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

START_MS = 240_000
CHANGE_MS = 120_000


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(tmp_path)
    await asyncio.to_thread(service.up)
    try:
        yield service
    finally:
        await asyncio.to_thread(service.run, "down")


async def submitted(service: Service, folder: Path) -> str:
    folder.mkdir()
    write_inputs(folder)
    job = folder / "job.yaml"
    job.write_text(yaml.safe_dump(unhurried_job(folder, steps=5000)))
    told: dict[str, Any] = await asyncio.to_thread(service.json, "submit", str(job))
    return str(told["id"])


async def press(page: Page, button: str) -> None:
    """Press a button on the page, then the one in the confirmation dialog."""
    await page.get_by_role("button", name=button).click()
    await page.get_by_role("dialog").get_by_role("button", name=button).click()


async def test_a_real_run_is_watched_scaled_paused_resumed_and_stopped(
    service: Service, browser: Browser, tmp_path: Path
) -> None:
    run = await submitted(service, tmp_path / "inputs")
    address = (await asyncio.to_thread(service.json, "up"))["server"]  # already up: returns its address
    context = await browser.new_context(viewport=WIDE)
    page = await context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    await page.goto(f"{address}/#/runs")
    await page.locator(f".run-row[data-run={run}]").get_by_role("link").click()
    state, step = page.locator("h1 + .badge"), page.locator(".tile .value").first
    await expect(state).to_have_text("running", timeout=START_MS)
    curve = page.locator(".chart canvas").first
    await expect(curve).to_be_visible(timeout=START_MS)
    before = await curve.evaluate("canvas => canvas.toDataURL()")
    await page.wait_for_function(
        "before => document.querySelector('.chart canvas').toDataURL() !== before", arg=before, timeout=CHANGE_MS
    )

    actors = page.get_by_role("group", name="Actors")
    await actors.get_by_role("button", name="More actors").click()
    await actors.get_by_role("button", name="Apply").click()
    serving = page.locator(".workers tbody tr", has_text="actor-").filter(has_text="serving")
    await expect(serving).to_have_count(2, timeout=CHANGE_MS)

    await press(page, "Pause")
    await expect(state).to_have_text("paused", timeout=CHANGE_MS)
    await page.wait_for_timeout(4000)  # groups in flight are finished
    held = await step.inner_text()
    await page.wait_for_timeout(3000)
    assert await step.inner_text() == held
    await press(page, "Resume")
    await expect(state).to_have_text("running", timeout=CHANGE_MS)
    await expect(step).not_to_have_text(held, timeout=CHANGE_MS)

    await page.get_by_role("link", name="Samples").click()
    await expect(page.locator(".detail .sample")).to_have_count(8)
    await page.get_by_role("link", name="Logs").click()
    await expect(page.locator(".log")).to_be_visible()

    await press(page, "Stop")
    await expect(state).to_have_text("stopped", timeout=CHANGE_MS)
    await context.close()
    assert faults == []
