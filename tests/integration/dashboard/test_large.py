"""100,000 steps and 10,000 samples: loading times measured inside the page, which never freezes for long."""

import random
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect

from tests.dashboard_data import big_run
from tests.dashboard_server import Stage
from tests.integration.dashboard.conftest import Open

STEPS, SAMPLES = 100_000, 10_000
FREEZE_MS = 1500  # far above what a loaded machine adds, far below what drawing every row takes
FIRST_CURVES_MS = 6000
EVERY_SAMPLE_MS = 40_000

WATCH = """() => {
    window.longest = 0;
    new PerformanceObserver((list) => {
        for (const task of list.getEntries()) window.longest = Math.max(window.longest, task.duration);
    }).observe({type: "longtask", buffered: true});
}"""


@pytest.fixture(scope="module")
async def big(stage: Stage) -> str:
    run_id = await stage.add(big_run(STEPS, SAMPLES))
    async with httpx.AsyncClient(base_url=stage.base, timeout=120) as client:
        for part in ("metrics", "samples"):  # the server parses a run's rows once; another test measures that
            (await client.get(f"/v1/runs/{run_id}/{part}")).raise_for_status()
    return run_id


async def longest(page: Page) -> Any:
    return await page.evaluate("window.longest")


async def test_a_hundred_thousand_steps_are_shown_quickly(visit: Open, stage: Stage, big: str) -> None:
    page = await visit(f"#/runs/{big}")
    await page.evaluate(WATCH)
    canvas = page.locator(".chart canvas").first
    await expect(canvas).to_be_visible(timeout=FIRST_CURVES_MS)
    assert await page.evaluate("performance.now()") < FIRST_CURVES_MS
    await expect(page.locator(".tile .value").first).to_have_text("100,000")

    chance = random.Random(3)
    rows = [{"step": STEPS + i, "reward_mean": chance.random(), "pass_at_1": 0.5, "kl_k1": 1.0} for i in range(20_000)]
    for start in range(0, len(rows), 1000):
        await stage.write(big, "metrics", rows[start : start + 1000])
    reward = page.locator(".chart", has=page.get_by_role("heading", name="Reward", exact=True))
    before = await reward.locator("canvas").evaluate("canvas => canvas.toDataURL()")
    await page.wait_for_timeout(1500)
    assert await reward.locator("canvas").evaluate("canvas => canvas.toDataURL()") != before
    assert await longest(page) < FREEZE_MS
    heap = await page.evaluate("performance.memory.usedJSHeapSize")
    assert heap < 80e6, f"{heap / 1e6:.0f} MB"


async def test_ten_thousand_samples_are_shown_quickly(visit: Open, big: str) -> None:
    page = await visit(f"#/runs/{big}/samples")
    await page.evaluate(WATCH)
    rows = page.locator(".group-row")
    await expect(rows.first).to_be_visible(timeout=20_000)
    begun = await page.evaluate("performance.now()")
    total = page.locator(".samples h2 + .soft").first
    while "+" in (text := await total.inner_text()) or "loading" in text:
        assert await page.evaluate("performance.now()") - begun < EVERY_SAMPLE_MS, text
        await page.locator(".virtual").evaluate("list => list.scrollTo(0, list.scrollHeight)")
        await page.wait_for_timeout(50)
    assert text == "625 groups, 10,000 samples"
    assert await rows.count() < 40, "only the visible rows are in the page"
    await page.locator(".virtual").evaluate("list => list.scrollTo(0, 300 * 74)")
    await expect(page.locator(".group-row", has_text="group")).not_to_have_count(0)
    assert await longest(page) < FREEZE_MS
    assert await page.evaluate("document.querySelectorAll('*').length") < 1500
