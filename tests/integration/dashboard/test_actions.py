"""What a user does by clicking becomes desired state, but only after a confirmation."""

from collections.abc import AsyncIterator
from random import Random

import pytest
from playwright.async_api import Page, expect

from tests.dashboard_data import HOSTILE, FakeRun, make_run, sample_rows
from tests.dashboard_server import Stage
from tests.integration.dashboard.conftest import Open


@pytest.fixture
async def run(stage: Stage) -> AsyncIterator[FakeRun]:
    """A live run for this test only."""
    made = make_run("steered", "running", done=20, steps=5000, seed=200 + len(stage.runs))
    await stage.add(made)
    yield made
    stage.runs.pop(made.record.id)
    await stage.store.delete(made.record.id)


@pytest.fixture
def visit(run: FakeRun, visit: Open) -> Open:
    """As `visit`, with pages that close before the run they show is deleted."""
    return visit


async def opened(visit: Open, run: FakeRun, **options: object) -> Page:
    page = await visit(f"#/runs/{run.record.id}", **options)
    await expect(page.locator(".tile .value").first).not_to_have_text("–")
    return page


async def test_a_role_is_scaled_by_clicks(visit: Open, stage: Stage, run: FakeRun) -> None:
    page = await opened(visit, run)
    actors = page.get_by_role("group", name="Actors")
    await actors.get_by_role("button", name="More actors").click()
    await actors.get_by_role("button", name="More actors").click()
    await expect(actors.locator("output")).to_have_text("2 → 4 ")
    assert (await stage.store.desired(run.record.id)).actors is None, "nothing is sent before Apply"
    await actors.get_by_role("button", name="Apply").click()
    await expect(actors.locator("output")).to_contain_text("4")
    await expect(page.locator(".workers tbody tr", has_text="actor-")).to_have_count(4)
    desired = await stage.store.desired(run.record.id)
    assert (desired.actors, desired.revision) == (4, 1)

    rewards = page.get_by_role("group", name="Reward workers")
    await rewards.get_by_role("button", name="Fewer reward workers").click()
    await expect(rewards.get_by_role("button", name="Fewer reward workers")).to_be_disabled()
    await rewards.get_by_role("button", name="Apply").click()
    await expect(page.locator(".workers tbody tr", has_text="reward-")).to_have_count(1)
    assert (await stage.store.desired(run.record.id)).reward_workers == 1


async def test_a_proposed_change_can_be_cancelled(visit: Open, stage: Stage, run: FakeRun) -> None:
    page = await opened(visit, run)
    actors = page.get_by_role("group", name="Actors")
    await actors.get_by_role("button", name="Fewer actors").click()
    await actors.get_by_role("button", name="Cancel").click()
    await expect(actors.locator("output")).to_have_text("2 ")
    assert (await stage.store.desired(run.record.id)).revision == 0


async def test_pause_and_resume_are_confirmed(visit: Open, stage: Stage, run: FakeRun) -> None:
    page = await opened(visit, run)
    state = page.locator("h1 + .badge")
    dialog = page.get_by_role("dialog")
    await page.get_by_role("button", name="Pause").click()
    await dialog.get_by_role("button", name="Cancel").click()
    await expect(dialog).to_have_count(0)
    assert not (await stage.store.desired(run.record.id)).paused

    await page.get_by_role("button", name="Pause").click()
    await dialog.get_by_role("button", name="Pause").click()
    await expect(state).to_have_text("paused")
    await expect(page.locator(".banner")).to_contain_text("paused by a user")
    assert (await stage.store.desired(run.record.id)).paused

    await page.get_by_role("button", name="Resume").click()
    await dialog.get_by_role("button", name="Resume").click()
    await expect(state).to_have_text("running")
    assert not (await stage.store.desired(run.record.id)).paused


async def test_stop_is_confirmed_and_a_stopped_run_is_resumed(visit: Open, stage: Stage, run: FakeRun) -> None:
    page = await opened(visit, run)
    dialog = page.get_by_role("dialog")
    await page.get_by_role("button", name="Stop").click()
    await expect(dialog).to_contain_text("writes a checkpoint")
    await expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    assert not (await stage.store.desired(run.record.id)).stopped

    await page.get_by_role("button", name="Stop").click()
    await dialog.get_by_role("button", name="Stop").click()
    await expect(page.locator("h1 + .badge")).to_have_text("stopped")
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    await expect(page.get_by_role("button", name="More actors")).to_be_disabled()
    assert (await stage.store.desired(run.record.id)).stopped

    await page.get_by_role("button", name="Resume").click()
    await dialog.get_by_role("button", name="Resume").click()
    await expect(page.locator("h1 + .badge")).to_have_text("running")


async def test_k_can_be_changed_and_an_invalid_k_shows_an_error(visit: Open, stage: Stage, run: FakeRun) -> None:
    page = await opened(visit, run, faultless=False)  # the browser logs each rejected request
    dialog = page.get_by_role("dialog")
    await page.get_by_role("button", name="Change k").click()
    await expect(dialog.get_by_role("textbox")).to_have_value("8")
    await dialog.get_by_role("textbox").fill("16")
    await dialog.get_by_role("button", name="Change").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("baseline: loo")
    await dialog.get_by_role("textbox").fill("4")
    await dialog.get_by_role("button", name="Change").click()
    await expect(dialog).to_have_count(0)
    await expect(page.locator(".run-title")).to_contain_text("k = 4")
    assert (await stage.store.desired(run.record.id)).objective == {"k": 4}
    await page.get_by_role("link", name="Job").click()
    await expect(page.get_by_role("row", name="objective.k 8 4")).to_be_visible()


async def test_k_can_be_replaced_by_weights(visit: Open, stage: Stage, run: FakeRun) -> None:
    page = await opened(visit, run, faultless=False)  # the browser logs each rejected request
    dialog, written = page.get_by_role("dialog"), page.get_by_role("dialog").get_by_role("textbox")
    await page.get_by_role("button", name="Change k").click()
    for wrong, problem in (
        ("a few", "such as 1: 0.5, 8: 0.5"),
        ("1: 0.5, 1: 0.5", "each k once"),
        ("1: 0.5,", "each k once"),
        ("1: 0.5, 99: 0.5", "remove the weights above n"),
        ("1: -1", "not a number of 0 or more"),
    ):
        await written.fill(wrong)
        await dialog.get_by_role("button", name="Change").click()
        await expect(dialog.get_by_role("alert")).to_contain_text(problem)
    await written.fill("1: 0.5, 4: 0.25")
    await dialog.get_by_role("button", name="Change").click()
    await expect(dialog).to_have_count(0)
    await expect(page.locator(".run-title")).to_contain_text("weights 1: 0.5, 4: 0.25")
    assert (await stage.store.desired(run.record.id)).objective == {"weights": {"1": 0.5, "4": 0.25}}
    await page.get_by_role("button", name="Change k").click()
    await expect(written).to_have_value("1: 0.5, 4: 0.25")
    await written.fill("harmonic 6")
    await dialog.get_by_role("button", name="Change").click()
    await expect(page.locator(".run-title")).to_contain_text("weights harmonic 6")
    assert (await stage.store.desired(run.record.id)).objective == {"weights": "harmonic", "order": 6}


async def test_actions_fit_on_a_phone(visit: Open, stage: Stage, run: FakeRun) -> None:
    page = await opened(visit, run, viewport={"width": 360, "height": 740}, has_touch=True)
    actors = page.get_by_role("group", name="Actors")
    await actors.get_by_role("button", name="More actors").tap()
    await actors.get_by_role("button", name="Apply").tap()
    await expect(page.locator(".workers tbody tr", has_text="actor-")).to_have_count(3)
    assert await page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.fixture
async def agents(stage: Stage) -> AsyncIterator[FakeRun]:
    """A live run whose samples are made by a program; its step is fixed."""
    made = make_run("agents", "running", done=20, steps=5000, seed=300 + len(stage.runs))
    made.moves = False
    made.record.job["rollout"] = {"kind": "program", "target": "agents:solve"}
    made.observed = made.observed.model_copy(update={"environment_workers": 1, "environment_workers_wanted": 1})
    called = {"context": "<|user|>2 + 2?", "answer": HOSTILE[0], "observed": 9, "tokens": 7, "seconds": 0.25}
    made.samples = [{**row, "calls": [called, {**called, "context": "again"}]} for row in sample_rows(0, 1, Random(1))]
    begun = made.timeline[-1]["spans"][0][2]
    made.timeline[-1]["spans"].append(["environment-0", "environment", begun, begun + 0.5])
    await stage.add(made)
    yield made
    stage.runs.pop(made.record.id)
    await stage.store.delete(made.record.id)


async def test_environment_workers_are_scaled_and_have_a_lane(visit: Open, stage: Stage, agents: FakeRun) -> None:
    page = await opened(visit, agents)
    await expect(page.locator("canvas[aria-label*='environment-0 ']")).to_have_count(1)
    workers = page.get_by_role("group", name="Environment workers")
    await expect(workers.locator("output")).to_have_text("1 ")
    await expect(workers.get_by_role("button", name="Fewer environment workers")).to_be_disabled()
    await workers.get_by_role("button", name="More environment workers").click()
    async with page.expect_response(lambda answer: answer.request.method == "PATCH"):
        await workers.get_by_role("button", name="Apply").click()
    await expect(workers.locator("output")).to_contain_text("2")
    assert (await stage.store.desired(agents.record.id)).environment_workers == 2


async def test_an_episode_is_shown_call_by_call(visit: Open, agents: FakeRun) -> None:
    page = await visit(f"#/runs/{agents.record.id}/samples")
    sample = page.locator(".detail .sample").first
    await sample.get_by_text("2 calls").click()
    calls = sample.locator(".calls li")
    await expect(calls).to_have_count(2)
    await expect(calls.first).to_contain_text("call 1: 9 tokens of context, 7 sampled in")
    await expect(calls.first.locator("pre").nth(1)).to_have_text(HOSTILE[0])
    await expect(calls.nth(1).locator("pre").first).to_have_text("again")
