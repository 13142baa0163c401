"""Live views move, survive a server restart, and ask for a token if the server needs one."""

import asyncio
import re
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, expect

from tests.dashboard_data import make_run
from tests.dashboard_server import Stage, api, stage
from tests.integration.dashboard.conftest import WIDE, Open

RUNNING = "#/runs/countdown-max8-0001"
TOKEN = "an-admin-token-of-32-characters!"

# Arbitrary pieces, three kinds of line ends, a comment, an event with two data lines, an event without an id.
PARSE = """async () => {
    const {EventParser} = await import("/js/stream.js");
    const text = "event: a\\r\\nid: 1\\r\\ndata: {\\"x\\":\\r\\ndata: 1}\\r\\n\\r\\n: ping\\n\\n"
        + "data:two\\n\\nevent: b\\rid: 9\\rdata: z\\r\\rdata: cut";
    const results = [];
    for (let size = 1; size <= text.length; size += 1) {
        const parser = new EventParser();
        const found = [];
        for (let i = 0; i < text.length; i += size) found.push(...parser.feed(text.slice(i, i + size)));
        results.push(JSON.stringify(found.map(({id, event, data}) => [id ?? null, event, data])));
    }
    return [...new Set(results)];
}"""

STORE = """async () => {
    const {MetricStore} = await import("/js/series.js");
    const store = new MetricStore();
    store.load({steps: [0, 1, 2, 3], series: {a: [0, 1, 2, 3]}, total: 4});
    store.add([{step: 4, a: 4, lag_histogram: {"0": 7}}]);
    store.add([{step: 2, a: 20}, {step: 3, b: 30}]);
    const resumed = {steps: [...store.steps], a: [...store.values("a")], b: [...store.values("b")]};
    const many = new MetricStore();
    for (let step = 0; step < 100_000; step += 1) many.add([{step, a: step}]);
    const rising = many.steps.every((step, i) => i === 0 || step > many.steps[i - 1]);
    const off = Math.max(...many.values("a").map((value, i) => Math.abs(value - many.steps[i])));
    return {resumed, size: many.steps.length, rising, last: many.last("a"), off};
}"""

POINT = """async () => {
    const cards = [...document.querySelectorAll(".chart")];
    const card = cards.find((each) => each.querySelector("h2").textContent === "Reward");
    const over = card.querySelector(".u-over"), at = card.querySelector(".at");
    const box = over.getBoundingClientRect(), found = [];
    for (let x = 0.5; x < box.width; x += 0.5) {
        over.dispatchEvent(new MouseEvent("mousemove", {clientX: box.left + x, clientY: box.top + 9, bubbles: true}));
        await Promise.resolve();
        found.push(at.textContent);
    }
    return found;
}"""


async def displayed_step(page: Page) -> int:
    text = await page.locator(".tile .value").first.inner_text()
    return int(text.replace(",", "")) if re.fullmatch(r"[\d,]+", text) else -1


async def until_step(page: Page, step: int, seconds: float = 15) -> None:
    async with asyncio.timeout(seconds):
        while await displayed_step(page) < step:  # noqa: ASYNC110 - the page has no event for it
            await asyncio.sleep(0.05)


async def test_curves_move_with_the_run(visit: Open) -> None:
    page = await visit(RUNNING)
    canvas = page.locator(".chart canvas").first
    await expect(canvas).to_be_visible()
    before, step = await canvas.evaluate("canvas => canvas.toDataURL()"), await displayed_step(page)
    await until_step(page, step + 3)
    await page.wait_for_function(
        "([canvas, before]) => canvas.toDataURL() !== before", arg=[await canvas.element_handle(), before]
    )


async def test_a_new_run_appears_in_the_list(visit: Open, stage: Stage) -> None:
    page = await visit("#/runs")
    await expect(page.locator(".run-row")).to_have_count(len(stage.runs))
    run_id = await stage.add(make_run("just-made", "starting", seed=77))
    row = page.locator(f".run-row[data-run={run_id}]")
    await expect(row).to_contain_text("just-made")
    stage.runs.pop(run_id)
    await stage.store.delete(run_id)
    await expect(row).to_have_count(0)


async def test_the_page_reconnects_to_a_restarted_server_and_misses_nothing(browser: Browser, tmp_path: Path) -> None:
    resumed_from: list[str | None] = []
    async with stage(tmp_path, tick=0.2) as made:
        context = await browser.new_context(viewport=WIDE)
        page = await context.new_page()
        page.on("request", lambda asked: _note_live(asked, resumed_from))
        async with api(made.url) as base:
            port = int(base.rsplit(":", 1)[1])
            await page.goto(f"{base}/{RUNNING}")
            await until_step(page, 231)
        link = page.locator("#link-state")
        await expect(link).to_contain_text("Reconnecting")
        away = await displayed_step(page)
        await asyncio.sleep(1.5)
        async with api(made.url, port):
            await expect(link).to_have_text("Live", timeout=20_000)
            await until_step(page, away + 5)
            steps = await _steps_drawn(page)
        await context.close()
    assert resumed_from[0] is None
    assert resumed_from[-1] is not None, "the page tells the server the last event it has seen"
    assert steps == list(range(len(steps))), "no step is missing or repeated"


def _note_live(asked: Any, found: list[str | None]) -> None:
    if asked.url.endswith("/live"):
        found.append(asked.headers.get("last-event-id"))


async def _steps_drawn(page: Page) -> list[int]:
    """The steps that the reward chart names while the cursor moves along it."""
    found = await page.evaluate(POINT)
    return sorted({int(text.removeprefix("step ")) for text in found if text})


async def test_a_server_with_tokens_asks_for_one_once(browser: Browser, stage: Stage) -> None:
    async with api(stage.url, admin_token=TOKEN) as base:
        context = await browser.new_context(viewport=WIDE)
        page = await context.new_page()
        await page.goto(f"{base}/#/runs")
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("requires a token")
        await dialog.get_by_label("Token").fill("wrong-token-of-some-length")
        await dialog.get_by_role("button", name="Continue").click()
        await expect(dialog).to_contain_text("there is no such token")
        await dialog.get_by_label("Token").fill(TOKEN)
        await dialog.get_by_role("button", name="Continue").click()
        await expect(page.locator(".run-row")).to_have_count(6)
        await expect(page.locator("#link-state")).to_have_text("Live")
        await page.goto(f"{base}/{RUNNING}")
        await expect(page.get_by_role("heading", name="countdown-max8")).to_be_visible()
        await expect(dialog).to_have_count(0)
        assert TOKEN not in page.url
        assert await page.evaluate("localStorage.length") == 0
        await context.close()


async def test_events_are_parsed_for_every_split(visit: Open) -> None:
    page = await visit("#/runs")
    assert await page.evaluate(PARSE) == ['[["1","a","{\\"x\\":\\n1}"],["1","message","two"],["9","b","z"]]']


async def test_metrics_are_bounded_and_a_resumed_run_overwrites(visit: Open) -> None:
    page = await visit("#/runs")
    found = await page.evaluate(STORE)
    assert found["resumed"] == {"steps": [0, 1, 2, 3], "a": [0, 1, 20, None], "b": [None, None, None, 30]}
    assert found["size"] <= 4000
    assert found["rising"]
    assert found["last"] == 99_999
    assert found["off"] < 100, "a point is a mean over nearby steps, however often points are merged"
