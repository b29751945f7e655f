"""Takes the console screenshots used in the docs (`make screenshots`)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.system.console.conftest import NewPage, ask, ask_approval, at

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

# Limit for the images in the README.
BYTES_MAX = 150_000
IMAGES = Path(__file__).parents[3] / "docs/images"


async def test_chat_inbox_and_run_match_the_screenshots(open_page: NewPage, tmp_path: Path) -> None:
    folder = Path(os.environ.get("TESTS_SCREENSHOTS") or tmp_path)
    folder.mkdir(exist_ok=True)
    page = await open_page(user="ann", viewport={"width": 960, "height": 900}, color_scheme="light")
    await ask(page, "what is 17 * 23")
    await ask_approval(page, "email bob@example.com about the picnic")
    run_id = await page.locator(".turn").last.get_attribute("data-run")
    conversation = page.url.rpartition("/")[2]
    await page.wait_for_timeout(500)
    await page.screenshot(path=folder / "console-chat.png")
    await page.get_by_role("link", name=re.compile("^Inbox")).click()
    await expect(page.locator("[data-item]", has_text="picnic")).to_be_visible()
    await page.screenshot(path=folder / "console-inbox.png")
    await page.locator("[data-item]", has_text="picnic").get_by_role("button", name="Approve").click()
    await expect(page.locator("[data-item]", has_text="picnic")).to_have_count(0)
    await page.goto(at(page, f"/runs/{run_id}"))
    await expect(page.get_by_role("heading", name=re.compile("completed"))).to_be_visible()
    await page.get_by_role("region", name="Timeline", exact=True).scroll_into_view_if_needed()
    await page.screenshot(path=folder / "console-run.png")
    await page.get_by_role("button", name="Toggle dark mode").click()
    await page.set_viewport_size({"width": 1120, "height": 660})
    await page.goto(at(page, f"/c/{conversation}?run={run_id}"))
    await expect(page.get_by_role("complementary", name="Run").locator("[data-bar]").first).to_be_visible()
    await expect(page.locator(".card.good", has_text="Send an e-mail")).to_be_visible()
    await page.screenshot(path=folder / "console-beside-dark.png")
    await page.set_viewport_size({"width": 390, "height": 780})
    await page.goto(at(page, f"/c/{conversation}"))
    await expect(page.locator(".card.good", has_text="Send an e-mail")).to_be_visible()
    await page.screenshot(path=folder / "console-phone-dark.png")
    taken = {path.name: path.stat().st_size for path in folder.glob("console-*.png")}
    assert set(taken) == {path.name for path in IMAGES.iterdir()}
    assert max(taken.values()) < BYTES_MAX
