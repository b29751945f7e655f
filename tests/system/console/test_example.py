"""The examples of docs/examples as new users run them: npm packages, a real browser and a real suite."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from pawl.launcher.ports import free_port
from pawl.launcher.suite import Suite
from tests import npm
from tests.keys import LOCAL_KEY
from tests.system.console.conftest import PATIENCE_MS, address, background
from tests.system.console.copilotkit import ANSWER_MS, Chat, answers, chatting
from tests.tidy.tree import ROOT

# Each example is installed first: one is built, and the other has a thousand packages.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long, pytest.mark.timeout(900)]

EXAMPLE: Final = ROOT / "docs/examples/chat"
STEP_SECONDS: Final = 400.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def chat(suite: Suite) -> AsyncIterator[str]:
    """Yield the address of the example, installed and checked as its page describes."""
    with tempfile.TemporaryDirectory(prefix="pawl-chat-") as made:
        folder = Path(made) / "chat"
        shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules"))
        await step(folder, sys.executable, ROOT / "web/build.py", "--client", folder)
        package = next(folder.glob("pawl-client-*.tgz"))
        await asyncio.to_thread(npm.add, folder, str(package), timeout_seconds=STEP_SECONDS)
        await step(folder, npm.NODE, npm.NPM, "run", "build")
        port = free_port()
        vite = await asyncio.create_subprocess_exec(
            *(npm.NODE, str(folder / "node_modules/vite/bin/vite.js"), "--port", str(port), "--strictPort"),
            cwd=folder,
            env=npm.environment(PAWL_GATEWAY=address(suite)),
        )
        try:
            url = f"http://127.0.0.1:{port}"
            await answers(url)
            yield url
        finally:
            vite.terminate()
            await vite.wait()


async def step(folder: Path, *command: str | Path) -> None:
    npm.check(await asyncio.to_thread(npm.run, list(command), folder, STEP_SECONDS))


@pytest_asyncio.fixture(loop_scope="session")
async def page(chat: str, browser: Browser) -> AsyncIterator[Page]:
    """A window of a separate browser. The test fails if the page had an error."""
    context = await browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    faults: list[str] = []
    page = await context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    await page.goto(chat)
    yield page
    await context.close()
    assert faults == []


async def log_in(page: Page, key: str = LOCAL_KEY) -> None:
    await page.get_by_label("Your key").fill(key)
    await page.get_by_role("button", name="Log in").click()


async def say(page: Page, text: str) -> None:
    await page.get_by_label("Your message").fill(text)
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator(".asked").last).to_have_text(text, timeout=90_000)


async def ended(page: Page, state: str = "COMPLETED") -> None:
    await expect(page.locator("section").last).to_have_attribute("data-state", f"RUN_STATE_{state}", timeout=120_000)


async def test_text_is_streamed_and_survives_a_reload_during_a_run(page: Page) -> None:
    await log_in(page)
    await say(page, "what is 17 * 23")
    await ended(page)
    await expect(page.locator("article", has_text="calculate")).to_contain_text("succeeded")
    await say(page, "tell me a long story slowly")
    reported = page.locator("section").last.locator(".said").last
    await expect(reported).to_contain_text(" ", timeout=90_000)
    before = await reported.inner_text()
    await page.reload()
    await expect(page.locator("section")).to_have_count(2)
    await expect(page.locator("article", has_text="calculate")).to_contain_text("succeeded")
    await expect(reported).to_contain_text(before)
    assert await page.locator("section").last.get_attribute("data-state") == "RUN_STATE_RUNNING"
    await ended(page)
    assert len(await reported.inner_text()) > len(before)


async def test_calls_can_be_approved_and_rejected_and_questions_answered(page: Page) -> None:
    await log_in(page)
    await say(page, "email ann@example.com about lunch")
    card = page.locator("section").last.locator("article")
    await card.get_by_role("button", name="Approve").click(timeout=90_000)
    await ended(page)
    await expect(card).to_have_attribute("data-state", "CALL_STATE_SUCCEEDED")
    await say(page, "email bob@example.com about golf")
    await card.get_by_label("Why not").fill("not today")
    await card.get_by_role("button", name="Reject").click(timeout=90_000)
    await ended(page)
    await expect(card).to_have_attribute("data-state", "CALL_STATE_REJECTED")
    await say(page, "book a table")
    asked = card.get_by_label("Your answer")
    while await page.locator("section").last.get_attribute("data-state") != "RUN_STATE_COMPLETED":
        if await asked.count():
            number = await card.count()
            await asked.first.fill("7 pm")
            await card.get_by_role("button", name="Answer").first.click()
            await expect(asked).to_have_count(0)
            assert await card.count() >= number
        await asyncio.sleep(0.05)
    await expect(card.first).to_contain_text("7 pm")


async def test_turn_of_a_job_appears_and_the_job_can_be_stopped(page: Page, tmp_path: Path) -> None:
    await log_in(page)
    await say(page, background(tmp_path / "first"))
    await expect(page.get_by_role("status")).to_contain_text("hold_once", timeout=90_000)
    (tmp_path / "first.go").touch()
    await expect(page.locator(".notice")).to_have_count(1, timeout=90_000)
    await expect(page.locator("section").last).to_contain_text("has completed: finished.")
    await say(page, background(tmp_path / "second"))
    await page.get_by_role("button", name="Stop it").click(timeout=90_000)
    await expect(page.get_by_role("status")).to_have_count(0, timeout=90_000)
    await expect(page.locator("section").last).to_contain_text("was stopped", timeout=90_000)


@pytest_asyncio.fixture(loop_scope="session")
async def copilot(copilotkit: str, browser: Browser) -> AsyncIterator[Chat]:
    async with chatting(browser, copilotkit) as chat:
        yield chat


MAIL: Final = 'call send_email with {"to": ["ann@example.com"], "subject": "lunch", "body": "at noon"}'


async def test_copilotkit_calls_can_be_approved_and_rejected_even_after_a_reload(copilot: Chat) -> None:
    await copilot.say(f"{MAIL} and {MAIL.replace('ann', 'bob')}")
    asked = copilot.page.get_by_role("group", name="Approval")
    await expect(asked).to_have_count(2, timeout=ANSWER_MS)
    await copilot.page.reload()
    await expect(asked).to_have_count(2, timeout=ANSWER_MS)
    await asked.filter(has_text="bob@example.com").get_by_role("button", name="Reject").click()
    await expect(asked).to_have_count(2)
    await asked.filter(has_text="ann@example.com").get_by_role("button", name="Approve").click()
    await copilot.ends("Not now.")
    await expect(asked).to_have_count(0)


async def test_a_copilotkit_page_tool_runs_in_the_page(copilot: Chat) -> None:
    await copilot.say('call paint with {"color": "rgb(1, 2, 3)"}')
    await copilot.ends("The page is rgb(1, 2, 3).")
    await expect(copilot.page.locator("main")).to_have_css("background-color", "rgb(1, 2, 3)")


async def test_copilotkit_shows_the_turn_of_a_job_and_keeps_what_is_being_typed(copilot: Chat, tmp_path: Path) -> None:
    await copilot.say(background(tmp_path / "effects"))
    await copilot.ends("background job")
    box = copilot.page.get_by_test_id("copilot-chat-textarea")
    await box.fill("what is 17 ")
    (tmp_path / "effects.go").touch()
    await copilot.ends("has completed: finished.")
    await expect(box).to_have_value("what is 17 ")
    await copilot.say("what is 17 * 23")
    await copilot.ends("391")
    said = await copilot.answers.all_inner_texts()
    assert [sum(text in each for each in said) for text in ("I started a", "has completed", "391")] == [1, 1, 1]
