"""axe-core finds nothing on any page: names, roles, headings, contrast, keyboard access."""

import asyncio
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, Route, expect

from tests.integration.dashboard.conftest import NARROW, Open
from tests.integration.dashboard.test_pages import BOTH, DONE, GROUPS, PAUSED, RUNNING

FAILED, UNSTARTED, UNKNOWN = "#/runs/apps-code-max12-0004", "#/runs/heldout-0006", "#/nowhere"
COMPARED = f"{DONE}/samples?open=390.12481&compare=1.6"
OF_RUNS = [RUNNING, FAILED, UNSTARTED, COMPARED, f"{RUNNING}/job", f"{RUNNING}/logs"]
EVERY = ["#/runs", *OF_RUNS, BOTH, "#/compare", GROUPS, "#/cluster", UNKNOWN]
COLOURED = ["#/runs", FAILED, COMPARED]  # what the theme changes
WITH_TABLES = [RUNNING, f"{RUNNING}/job", BOTH, GROUPS, "#/cluster"]  # which a phone scrolls


async def faults(page: Page) -> list[str]:
    """What axe reports, with the first element of each rule."""
    found = (await Axe().run(page)).response["violations"]
    return [f"{page.url.partition('#')[2]}: {each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]


@pytest.mark.parametrize(
    ("options", "addresses"),
    [({}, EVERY), ({"color_scheme": "dark"}, COLOURED), ({"viewport": NARROW}, WITH_TABLES)],
    ids=["light", "dark", "phone"],
)
async def test_axe_finds_nothing(visit: Open, options: dict[str, Any], addresses: list[str]) -> None:
    page = await visit("#/runs", **options)
    found = []
    for address in addresses:
        await page.evaluate("address => { location.hash = address; }", address)
        await expect(page.locator("main h1").first).to_be_attached()
        await expect(page.locator(".skeleton")).to_have_count(0)
        found += await faults(page)
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("held", ["timeline?*", "metrics?*", "ledger", "evaluations"])
async def test_axe_finds_nothing_while_an_answer_is_awaited(visit: Open, held: str) -> None:
    """Whatever a page shows before its data are there has a name too."""
    page = await visit("#/runs")
    held_back = asyncio.Event()

    async def hold(_: Route) -> None:
        held_back.set()

    await page.route(f"**/v1/runs/*/{held}", hold)
    await page.evaluate("address => { location.hash = address; }", RUNNING)
    await asyncio.wait_for(held_back.wait(), 30)
    await expect(page.locator("main h1").first).to_be_attached()
    assert await faults(page) == []


async def test_axe_finds_nothing_in_dialogs(visit: Open) -> None:
    page = await visit(PAUSED)
    for name in ("Change k", "Stop"):
        await page.get_by_role("button", name=name).click()
        await expect(page.get_by_role("dialog")).to_be_visible()
        assert await faults(page) == []
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_axe_does_find_faults(visit: Open) -> None:
    page = await visit("#/cluster")
    await expect(page.locator(".nodes")).to_be_visible()
    await page.evaluate("document.querySelector('#theme').removeAttribute('aria-label')")
    await page.evaluate("document.querySelector('#theme').removeAttribute('title')")
    await page.evaluate("document.querySelector('h1').style.color = '#ddd'")
    found = " ".join(await faults(page))
    assert "button-name" in found
    assert "color-contrast" in found
