"""Whoever opens a link sees what its sender saw, and two samples of a group can be compared."""

import difflib
import json
import random
import re
from itertools import pairwise

import pytest
from playwright.async_api import Page, expect

from tests.integration.dashboard.conftest import NARROW, Open
from tests.integration.dashboard.test_pages import BOTH, DONE, RUNNING

DIFFERENCE = """async ([before, after]) => {
    const {difference} = await import("/js/diff.js");
    return difference(before, after);
}"""


async def copied(page: Page, visit: Open) -> Page:
    """Another browser at the same address."""
    return await visit(page.url.partition("/")[2].partition("/")[2].partition("/")[2])


async def test_a_link_to_a_group_shows_it_however_far_down_the_list_it_is(visit: Open) -> None:
    page = await visit(f"{DONE}/samples")
    await page.get_by_label("Verdict").select_option("passed")
    await page.wait_for_url("**/samples?status=passed")
    await expect(page.locator(".detail .sample")).to_have_count(4)
    await page.locator(".group-row").nth(2).click()
    await page.wait_for_url("**/samples?status=passed&open=390.12483")
    other = await copied(page, visit)
    await expect(other.locator(".group-row[aria-selected=true]")).to_contain_text("group 12483")
    await expect(other.locator(".detail .sample")).to_have_count(4)
    await expect(other.get_by_label("Verdict")).to_have_value("passed")
    last = await visit(f"{DONE}/samples?open=10.322")
    await expect(last.locator(".group-row")).to_have_count(1)
    await expect(last.locator(".detail")).to_contain_text("train:1322")
    gone = await visit(f"{DONE}/samples?open=nonsense&compare=1.2.3")
    await expect(gone.locator(".group-row").first).to_be_visible()


async def test_two_samples_are_compared_by_keyboard_and_by_link(visit: Open) -> None:
    page = await visit(f"{DONE}/samples")
    buttons = page.locator(".sample").get_by_role("button", name="Compare sample")
    await buttons.nth(0).focus()
    await page.keyboard.press("Enter")
    await expect(buttons.nth(0)).to_be_focused()
    await expect(buttons.nth(0)).to_have_attribute("aria-pressed", "true")
    await expect(page.get_by_text("Sample 1 is chosen: choose another")).to_be_visible()
    await buttons.nth(5).focus()
    await page.keyboard.press("Space")
    shown = page.get_by_role("region", name="Sample 1 against sample 6")
    await expect(shown).to_be_focused()
    await expect(shown.locator("del")).to_have_text("0")
    await expect(shown.locator("ins")).to_have_text("5")
    await expect(shown).to_contain_text("return (a + b) * c - d")
    await page.wait_for_url("**/samples?open=390.12481&compare=1.6")
    other = await copied(page, visit)
    await expect(other.get_by_role("region", name="Sample 1 against sample 6").locator("ins")).to_have_text("5")
    await other.get_by_role("button", name="Compare sample 3").click()
    await expect(other.get_by_role("region", name="Sample 6 against sample 3").locator("ins")).to_have_text("2")
    await page.get_by_role("button", name="Close comparison").click()
    await expect(buttons.nth(5)).to_be_focused()
    await expect(page.locator(".difference, .sample [aria-pressed=true]")).to_have_count(0)
    await buttons.nth(0).click()
    await page.locator(".group-row").nth(1).click()
    await expect(page.locator(".difference, .sample [aria-pressed=true]")).to_have_count(0)


async def test_switches_fields_and_choices_are_in_the_address(visit: Open) -> None:
    page = await visit(DONE)
    await page.get_by_label(re.compile("Smooth curves")).uncheck()
    await page.get_by_text("All metrics").click()
    await page.wait_for_url("**?smooth=no&all=yes")
    other = await copied(page, visit)
    await expect(other.get_by_label(re.compile("Smooth curves"))).not_to_be_checked()
    await expect(other.locator("details .chart").first).to_be_visible()
    await page.get_by_role("link", name="Job").click()
    await page.get_by_label("Find a field").fill("objective.k")
    await page.wait_for_url("**/job?find=objective.k")
    other = await copied(page, visit)
    await expect(other.locator("tbody tr")).to_have_count(1)
    await page.goto(page.url.partition("#")[0] + f"{BOTH}&metric=entropy&axis=kl&smooth=no&identical=yes")
    await expect(page.get_by_role("cell", name="seed", exact=True)).to_be_visible()
    await expect(page.get_by_label("Smooth curves")).not_to_be_checked()
    await page.get_by_label("Smooth curves").check()
    await page.wait_for_url("**&metric=entropy&axis=kl&identical=yes")


async def test_a_tabs_link_shows_it_as_it_is_at_first(visit: Open) -> None:
    page = await visit(f"{RUNNING}/samples?status=passed")
    await expect(page.get_by_label("Verdict")).to_have_value("passed")
    await page.get_by_role("link", name="Samples").click()
    await expect(page.get_by_label("Verdict")).to_have_value("")


async def test_a_comparison_fits_a_phone(visit: Open) -> None:
    page = await visit(f"{DONE}/samples?open=390.12481&compare=1.6", viewport=NARROW)
    await expect(page.get_by_role("region", name="Sample 1 against sample 6")).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


def words(text: str) -> list[str]:
    return re.findall(r"\s+|\w+|[^\s\w]", text)


@pytest.mark.parametrize("alphabet", [["a", "b", " "], ["x", "1", "\n", " ", "(", "é", "_"]])
async def test_a_difference_has_both_texts_and_is_as_short_as_possible(visit: Open, alphabet: list[str]) -> None:
    page, chance = await visit("#/cluster"), random.Random(3)
    texts = ["", *("".join(chance.choices(alphabet, k=chance.randrange(30))) for _ in range(40))]
    for before in texts:
        after = chance.choice(texts)
        parts: list[tuple[str, str]] = [tuple(part) for part in await page.evaluate(DIFFERENCE, [before, after])]
        assert "".join(text for kind, text in parts if kind != "added") == before
        assert "".join(text for kind, text in parts if kind != "removed") == after
        kinds = [kind for kind, _ in parts]
        assert all(one != two for one, two in pairwise(kinds)), json.dumps(parts)
        kept = sum(len(words(text)) for kind, text in parts if kind == "same")
        matcher = difflib.SequenceMatcher(None, words(before), words(after), autojunk=False)
        assert kept >= sum(block.size for block in matcher.get_matching_blocks())


async def test_long_texts_are_compared_by_lines_or_as_wholes(visit: Open) -> None:
    page = await visit("#/cluster")
    before = "".join(f"line {i} of many\n" for i in range(800))
    after = before.replace("line 3 ", "row 3 ").replace("line 700 ", "row 700 ")
    parts = await page.evaluate(DIFFERENCE, [before, after])
    assert [kind for kind, _ in parts] == ["same", "removed", "added", "same", "removed", "added", "same"]
    hard = await page.evaluate(DIFFERENCE, ["a b\n" * 3000, "c d\n" * 3000 + "c d"])
    assert [kind for kind, _ in hard] == ["removed", "added"]
