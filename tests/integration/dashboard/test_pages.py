"""Every page in a real browser, by mouse and keyboard, wide and narrow, light and dark."""

import asyncio
import re

import pytest
from playwright.async_api import Locator, Page, Route, expect

from services.sweeps.statistics import Interval, student_t
from tests import dashboard_data
from tests.dashboard_server import Stage
from tests.integration.dashboard.conftest import NARROW, Open

RUNNING = "#/runs/countdown-max8-0001"
GROUPS = "#/groups?tag=sweep%3Dk&by=team"
DONE = "#/runs/countdown-mean-0002"
PAUSED = "#/runs/countdown-max4-0003"
BOTH = "#/compare?runs=countdown-max8-0001,countdown-mean-0002"

ROLE_OF_COLOURS = """() => {
    const style = getComputedStyle(document.body);
    const light = (rgb) => rgb.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765;
    return {page: light(style.backgroundColor), text: light(style.color)};
}"""
PAINTED = """(canvas) => {
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const colours = new Set();
    for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200) colours.add(data.slice(i, i + 3).join());
    return colours.size;
}"""
SHIFTS = """() => {
    window.shifted = 0;
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) window.shifted += entry.value;
    }).observe({type: "layout-shift"});
}"""
# Contrast: the ratio of relative luminances as defined by WCAG 2.
CONTRASTS = """async () => {
    const {color} = await import("/js/palette.js");
    const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const luminance = (name) => {
        const [r, g, b] = color(name).match(/[\\d.]+/g).map((part) => linear(part / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = {};
    const pair = (text, ground) => {
        const [low, high] = [luminance(text), luminance(ground)].sort((a, b) => a - b);
        found[`${text} on ${ground}`] = (high + 0.05) / (low + 0.05);
    };
    for (const ground of ["page", "card", "raised", "hover"]) {
        for (const text of ["text", "soft", "faint", "accent", "bad"]) pair(text, ground);
    }
    for (const tone of ["good", "warn", "bad", "accent"]) pair(tone, `${tone}-soft`);
    pair("soft", "sunk");
    pair("text", "sunk");
    pair("on-accent", "accent");
    pair("on-accent", "bad");
    pair("faint", "accent-soft");
    return found;
}"""


async def paints(canvas: Locator, colours: int) -> None:
    """Wait until the canvas shows more than this many colours, because drawing waits for data."""
    for _ in range(100):
        if await canvas.evaluate(PAINTED) > colours:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"{canvas} stays empty")


async def test_all_runs_are_listed_with_state_and_progress(visit: Open) -> None:
    page = await visit("")
    rows = page.locator(".run-row")
    await expect(rows).to_have_count(6)
    await expect(rows.nth(0)).to_contain_text("heldout")
    failed = rows.filter(has_text="apps-code-max12")
    await expect(failed).to_contain_text("failed")
    await expect(failed).to_contain_text("20 batches in a row")
    await expect(failed.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "16")
    await paints(failed.locator("canvas"), 1)
    await expect(page.locator("#link-state")).to_have_text("Live")


async def test_filters_are_applied_by_the_server_and_kept_in_the_address(visit: Open) -> None:
    page = await visit("#/runs")
    rows = page.locator(".run-row")
    await expect(rows).to_have_count(6)
    await page.get_by_label("Search by name").fill("COUNTDOWN")
    await expect(rows).to_have_count(3)
    await page.get_by_label("Any state").select_option("done")
    await expect(rows).to_have_count(1)
    await page.wait_for_url("**/#/runs?name=COUNTDOWN&state=done")
    await page.reload()
    await expect(rows).to_have_count(1)
    await page.get_by_label("Search by name").fill("nothing is called so")
    await expect(page.get_by_text("No matching runs")).to_be_visible()
    await page.get_by_label("Search by name").fill("")
    await page.get_by_label("Any state").select_option("")
    await page.get_by_label("Tag").fill("team=maths")
    await expect(rows).to_have_count(2)


async def test_a_run_shows_its_curves_workers_events_and_ledger(visit: Open) -> None:
    page = await visit(DONE)
    await expect(page.get_by_role("heading", name="countdown-mean")).to_be_visible()
    for title in ("pass@k", "pass@k before and after", "Reward", "pass@k against KL", "Verdicts", "Lag", "Live groups"):
        card = page.locator(".chart").filter(has=page.get_by_role("heading", name=title, exact=True))
        canvas = card.locator("canvas")
        await expect(canvas, title).to_be_visible()
        await paints(canvas, 3)
    passes = page.locator(".chart").first
    for k in (1, 2, 4, 8, 16, 32):
        await expect(passes.get_by_role("button", name=re.compile(rf"@{k} 0\.\d+"))).to_be_visible()
    await expect(page.locator(".timeline canvas")).to_be_visible()
    await paints(page.locator(".timeline canvas"), 5)
    await expect(page.get_by_text("busiest: actor-")).to_be_visible()
    await expect(page.get_by_text("its process was killed")).to_be_visible()
    ledger = page.locator(".ledger")
    await expect(ledger).to_contain_text("Admitted12,832")
    await expect(ledger).to_contain_text("Dropped9")


async def test_the_workers_table_has_a_row_per_process(visit: Open) -> None:
    page = await visit(RUNNING)
    rows = page.locator(".workers tbody tr")
    await expect(rows).to_have_count(5)
    await expect(rows.nth(0)).to_contain_text("actor-0")
    await expect(rows.nth(0)).to_contain_text("serving")


async def test_environments_have_lanes_between_actors_and_reward_workers(visit: Open) -> None:
    page = await visit("#/runs/apps-code-max12-0004")
    canvas = page.locator(".timeline canvas")
    lanes = r"actor-1 \d+%, environment-0 \d+%, environment-1 \d+%, reward-0 \d+%"
    await expect(canvas).to_have_attribute("aria-label", re.compile(lanes))
    await paints(canvas, 6)


async def test_held_out_results_are_shown_over_the_distance_from_the_initial_model(visit: Open) -> None:
    page = await visit(DONE)
    chart = page.locator(".chart").filter(has=page.get_by_role("heading", name="pass@k against KL", exact=True))
    for k in (1, 16, 32):  # 16 is the largest k of training prompts, 32 of held-out ones
        await expect(chart.get_by_role("button", name=re.compile(rf"@{k} 0\.\d+"))).to_be_visible()
    await page.goto(page.url.replace(DONE, f"{BOTH}&metric=evaluation/pass_at_32&axis=kl"))
    await expect(page.get_by_label("Horizontal axis")).to_have_value("kl")
    curves = page.locator(".chart").filter(has=page.get_by_role("heading", name="Curves"))
    await paints(curves.locator("canvas"), 3)
    await curves.locator(".u-over").hover()
    await expect(curves.locator(".at")).to_have_text(re.compile(r"^KL 0\.\d+$"))
    newest = page.get_by_role("row", name="held-out pass@32 (newest)")
    await expect(newest).to_contain_text("0.99")
    await page.get_by_label("Horizontal axis").select_option("step")
    await page.mouse.move(0, 0)
    await curves.locator(".u-over").hover()
    await expect(curves.locator(".at")).to_have_text(re.compile(r"^step \d+$"))


async def test_a_legend_hides_and_shows_a_series(visit: Open) -> None:
    page = await visit(DONE)
    key = page.locator(".chart").first.locator(".key").first
    await key.click()
    await expect(key).to_have_attribute("aria-pressed", "false")
    await key.click()
    await expect(key).to_have_attribute("aria-pressed", "true")


async def test_the_reason_of_a_failure_is_at_the_top(visit: Open) -> None:
    page = await visit("#/runs/apps-code-max12-0004")
    await expect(page.locator(".banner")).to_contain_text("20 batches in a row had no group with a signal")


async def test_samples_are_browsed_by_mouse_and_keyboard(visit: Open) -> None:
    page = await visit(f"{DONE}/samples")
    rows = page.locator(".group-row")
    await expect(rows.first).to_contain_text("4 of 16 passed")
    detail = page.locator(".detail")
    await expect(detail.locator(".sample")).to_have_count(16)
    await rows.nth(2).click()
    await expect(page.locator(".group-row[aria-selected=true]")).to_contain_text("group 12483")
    await expect(detail).to_contain_text("train:13483")
    await page.keyboard.press("ArrowDown")
    await expect(detail).to_contain_text("train:13484")
    await expect(page.locator(".group-row:focus")).to_contain_text("group 12484")
    first = detail.locator(".sample").first
    await expect(first).to_contain_text("Passed")
    await expect(first).to_contain_text("advantage +0.380")
    await expect(first).to_contain_text("version 390, then 391 from token 31")
    await expect(detail.locator(".failing").first).to_contain_text("test 3 of 8")


async def test_samples_are_filtered_by_verdict(visit: Open) -> None:
    page = await visit(f"{DONE}/samples")
    await expect(page.locator(".group-row").first).to_be_visible()
    await page.get_by_label("Verdict").select_option("passed")
    await expect(page.locator(".detail .sample")).to_have_count(4)
    assert set(await page.locator(".detail .sample").evaluate_all("all => all.map(e => e.dataset.status)")) == {
        "passed"
    }
    await page.get_by_label("Verdict").select_option("infra_error")
    await expect(page.get_by_text("No matching samples")).to_be_visible()


async def test_two_runs_chosen_in_the_list_are_compared(visit: Open) -> None:
    """They appear in the order of selection, whichever answer arrives first."""

    async def late(route: Route) -> None:
        await asyncio.sleep(0.5)
        await route.continue_()

    page = await visit("#/runs")
    await page.route("**/v1/runs/countdown-max8-0001", late)
    await page.get_by_label("Select countdown-max8 to compare").check()
    await page.get_by_label("Select countdown-mean to compare").check()
    await page.get_by_role("link", name="Compare 2 runs").click()
    diff = page.locator(".diff")
    await expect(diff.get_by_role("row", name="objective.k 8 –")).to_be_visible()
    await expect(diff.get_by_role("cell", name="objective.kind")).to_be_visible()
    await expect(diff.get_by_role("cell", name="seed", exact=True)).to_have_count(0)
    await page.get_by_label("Show identical fields").check()
    await expect(diff.get_by_role("cell", name="seed", exact=True)).to_be_visible()
    await page.get_by_label("Metric").select_option("entropy")
    await page.wait_for_url("**metric=entropy&identical=yes")
    await paints(page.locator(".chart canvas").first, 3)


def card_of(page: Page, title: str) -> Locator:
    return page.locator(".card", has=page.get_by_role("heading", name=title, exact=True))


async def test_the_cluster_page_shows_nodes_and_runs(visit: Open) -> None:
    page = await visit("#/cluster")
    await expect(page.locator(".nodes .card")).to_have_count(3)
    await expect(page.locator(".nodes .card").nth(2)).to_contain_text("dead")
    await expect(page.locator(".nodes .card").first).to_contain_text("11.5 of 16")
    await expect(card_of(page, "Who holds what").locator("tbody tr", has_text="countdown-max8").first).to_contain_text(
        "Actors"
    )


async def test_the_cluster_page_shows_the_queue_the_quotas_and_the_audit(visit: Open) -> None:
    page = await visit("#/cluster")
    rows = card_of(page, "Queue").locator("tbody tr")
    await expect(rows).to_have_count(2)
    await expect(rows.nth(0)).to_contain_text("holds")
    await expect(rows.nth(1)).to_contain_text("waits for 1 GPU: alice's countdown-max8-0001 holds 1")
    await expect(card_of(page, "Quotas").locator("tbody tr", has_text="alice")).to_contain_text("1 of 2")
    change = card_of(page, "Who changed what").locator("tbody tr").first
    await expect(change).to_contain_text("alice")
    await expect(change).to_contain_text('learning_rate=0.000001  objective={"kind":"<img src=x')


async def test_the_complete_job_is_shown(visit: Open) -> None:
    page = await visit(f"{RUNNING}/job")
    await page.get_by_label("Find a field").fill("objective")
    await expect(page.get_by_role("row", name="objective.k 8")).to_be_visible()
    await expect(page.get_by_role("cell", name="seed", exact=True)).to_have_count(0)


async def test_unknown_runs_and_pages_are_reported(visit: Open) -> None:
    page = await visit("#/runs/nobody", faultless=False)
    await expect(page.get_by_role("alert")).to_contain_text("Not found")
    await page.goto(page.url.replace("#/runs/nobody", "#/nowhere"))
    await expect(page.get_by_text("Page not found")).to_be_visible()


@pytest.mark.parametrize(
    "address",
    ["#/runs", RUNNING, f"{DONE}/samples", f"{RUNNING}/job", f"{RUNNING}/logs", BOTH, "#/cluster", GROUPS],
)
async def test_nothing_scrolls_sideways_on_a_phone(visit: Open, address: str) -> None:
    page = await visit(address, viewport=NARROW)
    await expect(page.locator("h1, .empty").first).to_be_visible()
    await page.wait_for_timeout(800)
    width = await page.evaluate("document.documentElement.scrollWidth")
    assert width <= NARROW["width"]
    for part in await page.locator("main button:visible, main input:visible, main select:visible").all():
        box = await part.bounding_box()
        assert box is None or box["x"] + box["width"] <= NARROW["width"], await part.evaluate("e => e.outerHTML")


TOPS = """async () => {
    const {calmTop} = await import("/js/charts/range.js");
    return [
        calmTop([12, 2, 2, 2.1, 2], 12), calmTop([2, 2.1, 2, 1.9, 4], 4),
        calmTop([9, 1], 9), calmTop([0, 0, 0, 0, 3], 3),
        calmTop([null, 10, ...new Array(99).fill(1), 10], 10),
        calmTop([...new Array(10).fill(9), ...new Array(10).fill(1)], 9),
    ];
}"""


async def test_one_long_step_does_not_flatten_the_others(visit: Open) -> None:
    page = await visit(PAUSED)  # of a longer run the page shows means of many steps
    chart = page.locator(".chart", has_text="Seconds per step")
    await expect(chart.locator("header")).to_contain_text(re.compile(r"cut off at \d.* highest \d"))
    assert await page.evaluate(TOPS) == [2.1 * 1.25, 4, 9, 3, 1.25, 9], "few or common values are whole"


async def colours(page: Page) -> tuple[float, float]:
    found = await page.evaluate(ROLE_OF_COLOURS)
    return found["page"], found["text"]


async def test_dark_and_light_follow_the_system_until_chosen(visit: Open) -> None:
    page = await visit(DONE, color_scheme="dark")
    ground, text = await colours(page)
    assert ground < 0.15
    assert text > 0.85
    await page.get_by_role("button", name="Use the light theme").click()
    ground, text = await colours(page)
    assert ground > 0.85
    assert text < 0.15
    await page.reload()
    assert (await colours(page))[0] > 0.85, "the choice is kept"


@pytest.mark.parametrize("address", ["#/runs", DONE, f"{DONE}/samples", BOTH])
async def test_nothing_jumps_while_a_page_loads(visit: Open, address: str) -> None:
    page = await visit("#/cluster")
    await page.evaluate(SHIFTS)
    await page.evaluate("address => { location.hash = address; }", address)
    await expect(page.locator("canvas, .sample").first).to_be_visible()
    await page.wait_for_timeout(1500)
    assert await page.evaluate("window.shifted") < 0.1, "the limit that Web Vitals calls good"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_has_enough_contrast(visit: Open, scheme: str) -> None:
    page = await visit("#/runs", color_scheme=scheme)
    found = await page.evaluate(CONTRASTS)
    assert len(found) > 20
    assert {pair: ratio for pair, ratio in found.items() if ratio < 4.5} == {}, "WCAG AA"


async def test_the_keyboard_reaches_the_content(visit: Open, stage: Stage) -> None:
    page = await visit("#/runs")
    await expect(page.locator(".run-row")).to_have_count(len(stage.runs))
    await page.keyboard.press("Tab")
    await expect(page.locator(":focus")).to_have_text("Skip to the content")
    await page.keyboard.press("Enter")
    await expect(page.locator("main")).to_be_focused()
    for _ in range(5):
        await page.keyboard.press("Tab")
    await expect(page.locator(":focus")).to_have_attribute("type", "checkbox")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="heldout")).to_be_visible()


@pytest.fixture(scope="module")
async def rates(stage: Stage) -> str:
    """A sweep of two settings with three seeds each: its tag."""
    for run in dashboard_data.sweep():
        await stage.add(run)
    return "sweep=rates"


async def test_groups_of_a_sweep_are_compared_with_bands(visit: Open, rates: str) -> None:
    page = await visit("#/runs?tag=sweep%3Drates")
    await page.get_by_role("link", name=rates).first.click()
    await expect(page.get_by_role("row", name="lr=0.0003 3 of 3")).to_be_visible()
    await expect(page.get_by_role("row", name="lr=0.0001 2 of 3")).to_contain_text("±")
    await paints(page.locator(".chart canvas").first, 4)
    await paints(page.locator(".chart canvas").nth(1), 4)
    await page.get_by_label("Metric").select_option("entropy")
    await page.wait_for_url("**metric=entropy**")
    await page.get_by_label("Against").select_option("divergence")
    await page.wait_for_url("**x=divergence")
    await page.get_by_label("Group by").select_option("name")
    await expect(page.locator("tbody tr")).to_have_count(6)
    await page.get_by_role("link", name="rates-mean-s0").click()
    await page.wait_for_url("**#/compare?runs=rates-mean-s0-*")


async def test_intervals_of_groups_are_those_of_the_command_line(visit: Open) -> None:
    page = await visit("#/groups")
    await expect(page.get_by_text("No runs chosen")).to_be_visible()
    groups = "const {studentT, interval, axisOf, pointsOf, bandOver} = await import('/js/groups.js');"
    found = await page.evaluate(f"async () => {{ {groups} return [1, 2, 3, 4, 9, 30].map(studentT); }}")
    assert found == pytest.approx([student_t(freedom) for freedom in (1, 2, 3, 4, 9, 30)], rel=1e-9)
    found = await page.evaluate(f"async () => {{ {groups} return interval([0.2, null, 0.5, 0.3]); }}")
    expected = Interval.of([0.2, 0.5, 0.3])
    assert (found["mean"], found["low"], found["high"]) == pytest.approx((expected.mean, expected.low, expected.high))
    curves = "[[[0, 0], [2, 2]], [[1, 5], [4, 8]]]"
    found = await page.evaluate(f"async () => {{ {groups} return bandOver({curves}, [0, 1, 1.5, 3]); }}")
    assert [point and point["mean"] for point in found] == [None, 3.0, 3.5, None]
