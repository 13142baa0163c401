"""Whatever a model or a user writes appears on the page as text only."""

import random
import re
from pathlib import Path

from playwright.async_api import Page, expect

import services
from tests.dashboard_data import HOSTILE, FakeRun, make_run, sample_rows
from tests.dashboard_server import Stage
from tests.integration.dashboard.conftest import Open

SOURCES = Path(services.__file__).parent / "dashboard"


async def hostile_run(stage: Stage) -> FakeRun:
    """A run whose name, problem, tags, events and samples would all be harmful as HTML."""
    run = make_run("hostile", "failed", done=3, seed=8, problem=HOSTILE[0])
    job = {**run.record.job, "scorer": {"kind": "code", "sandbox": {"min_tier": "none"}}}
    run.record = run.record.model_copy(update={"name": HOSTILE[1], "tags": {"t": HOSTILE[2]}, "job": job})
    run.observed = run.observed.model_copy(update={"waiting": (HOSTILE[3],)})
    run.events.append({"kind": HOSTILE[0], "time": run.record.created, "detail": HOSTILE[1]})
    run.samples = sample_rows(0, 0, random.Random(0))
    if run.record.id not in stage.runs:
        await stage.add(run)
    return run


async def harmless(page: Page) -> None:
    assert await page.evaluate("window.hacked") is None
    assert await page.evaluate("document.querySelectorAll('main img, main script, main style, main svg').length") == 0
    assert "1337" not in await page.title()


async def test_samples_stay_text(visit: Open, stage: Stage) -> None:
    run = await hostile_run(stage)
    page = await visit(f"#/runs/{run.record.id}/samples")
    detail = page.locator(".detail")
    await expect(detail.locator(".sample")).to_have_count(16)
    texts = await detail.locator(".sample-text").all_text_contents()
    assert set(texts) == set(HOSTILE)
    await expect(detail.locator(".prompt-text")).to_have_text(HOSTILE[0])
    assert set(await detail.locator(".failing").all_text_contents()) <= set(HOSTILE)
    await harmless(page)


async def test_names_problems_events_and_tags_stay_text(visit: Open, stage: Stage) -> None:
    run = await hostile_run(stage)
    page = await visit(f"#/runs/{run.record.id}")
    await expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE[1])
    await expect(page.locator(".banner")).to_have_count(3)
    await expect(page.locator(".notes")).to_contain_text(HOSTILE[0])
    await expect(page.locator(".notes")).to_contain_text(HOSTILE[3])
    await expect(page.locator(".notes")).to_contain_text("without isolation")
    await expect(page.locator(".events")).to_contain_text("onerror")
    await page.goto(f"{stage.base}/#/runs")
    await expect(page.locator(".run-row", has_text=HOSTILE[1])).to_contain_text(HOSTILE[0])
    await page.goto(f"{stage.base}/#/compare?runs={run.record.id}")
    await expect(page.locator(".pick")).to_contain_text(HOSTILE[1])
    await harmless(page)


def test_no_source_file_parses_html_or_evaluates_text() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(.on|srcdoc"
    )
    for source in SOURCES.rglob("*.js"):
        if "vendor" not in source.parts:
            assert not forbidden.search(source.read_text()), source.name
    page = (SOURCES / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|https?://", page)
    vendored = (SOURCES / "vendor" / "uplot.min.js").read_text()
    assert not forbidden.search(vendored)
