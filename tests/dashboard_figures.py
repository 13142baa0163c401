"""Draws the documentation's figures of the dashboard, which show made-up runs.

python -m tests.dashboard_figures
"""

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.async_api import Browser, ViewportSize, async_playwright

from tests.dashboard_server import api, stage

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
SIZE: ViewportSize = {"width": 1200, "height": 1120}
PAGES = {"dashboard_run": "#/runs/countdown-max8-0001", "dashboard_samples": "#/runs/countdown-max8-0001/samples"}
TICK = 3600.0  # seconds: the live run stays where it is
DRAWN_S = 8.0  # until the charts are there; the page never falls silent, since it follows the run


async def draw() -> None:
    """Write one picture per page of `PAGES`."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory(prefix="volley-dashboard-") as folder:
        async with stage(Path(folder), TICK) as made, api(made.url) as base, async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            for name, address in PAGES.items():
                await draw_page(browser, f"{base}/{address}", FIGURES / f"{name}.png")
            await browser.close()


async def draw_page(browser: Browser, address: str, picture: Path) -> None:
    """Write what the page shows at its top."""
    page = await browser.new_page(viewport=SIZE)
    await page.goto(address)
    await asyncio.sleep(DRAWN_S)
    await page.screenshot(path=picture)
    await page.close()
    sys.stdout.write(f"{picture.name}\n")


if __name__ == "__main__":
    asyncio.run(draw())
