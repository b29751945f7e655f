"""The examples of docs/examples as new users run them: npm packages, a real browser and a real suite."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import httpx2
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, Route, expect

from pawl.launcher.ports import free_port
from pawl.launcher.suite import Suite
from tests import npm
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.system.console.conftest import PATIENCE_MS, address, background
from tests.tidy.tree import ROOT

# Each example is installed first: one is built, and the other has a thousand packages.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long, pytest.mark.timeout(900)]

EXAMPLE: Final = ROOT / "docs/examples/chat"
STARTS_SECONDS: Final = 240.0
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


async def answers(url: str) -> None:
    deadline = time.monotonic() + STARTS_SECONDS
    async with httpx2.AsyncClient(timeout=60.0) as client:
        while True:
            try:
                (await client.get(url)).raise_for_status()
                break
            except httpx2.TransportError:
                assert time.monotonic() < deadline, f"{url} does not answer"
                await asyncio.sleep(0.1)


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
    await expect(page.locator("section").last).to_contain_text("has ended, completed: finished.")
    await say(page, background(tmp_path / "second"))
    await page.get_by_role("button", name="Stop it").click(timeout=90_000)
    await expect(page.get_by_role("status")).to_have_count(0, timeout=90_000)
    await expect(page.locator("section").last).to_contain_text("has ended, stopped", timeout=90_000)


INSTALL_SECONDS: Final = 600.0
ANSWER_MS: Final = 120_000
MAIL: Final = 'call send_email with {"to": ["ann@example.com"], "subject": "lunch", "body": "at noon"}'


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pawl-copilotkit-") as made:
        npm.install(ROOT / "docs/examples/copilotkit", Path(made), timeout_seconds=INSTALL_SECONDS)
        yield Path(made)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(folder: Path, suite: Suite) -> AsyncIterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    own = {"PAWL_GATEWAY": address(suite), "PAWL_KEY": LOCAL_KEY, "COPILOTKIT_TELEMETRY_DISABLED": "true"}
    server = await asyncio.create_subprocess_exec(
        npm.NODE, "server.mjs", str(port), cwd=folder, env=os.environ | own, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await answers(url)
        yield url
    finally:
        server.terminate()
        await server.wait()


class Chat:
    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.thread = f"copilotkit-{secrets.token_hex(4)}"

    async def open(self) -> None:
        await self.page.goto(f"{self.url}/?thread={self.thread}")

    async def say(self, text: str) -> None:
        """Send a message once the page has loaded the thread, before which it accepts none."""
        box = self.page.get_by_test_id("copilot-chat-textarea")
        await box.fill(text)
        while await box.input_value():
            await box.press("Enter")
            await asyncio.sleep(0.05)

    @property
    def answers(self) -> Locator:
        return self.page.get_by_test_id("copilot-assistant-message")

    async def ends(self, text: str) -> None:
        await expect(self.answers.last).to_contain_text(text, timeout=ANSWER_MS)


@pytest_asyncio.fixture(loop_scope="session")
async def copilot(server: str, browser: Browser) -> AsyncIterator[Chat]:
    """A window whose page may contact only its server. The test fails if the page had an error."""
    context, faults = await browser.new_context(), list[str]()
    context.set_default_timeout(ANSWER_MS)

    async def guard(route: Route) -> None:
        if route.request.url.startswith((server, "blob:", "data:")):
            await route.continue_()
        else:
            faults.append(route.request.url)
            await route.abort()

    await context.route("**/*", guard)
    page = await context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    chat = Chat(page, server)
    await chat.open()
    yield chat
    await context.close()
    assert faults == []


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


async def test_copilotkit_shows_and_stops_background_work(copilot: Chat, suite: Suite, tmp_path: Path) -> None:
    pages = tmp_path / "pages.txt"
    await copilot.say(f"in the background: call scrape with {json.dumps({'path': str(pages), 'pages': 5000})}")
    job = copilot.page.get_by_role("group", name="Background job")
    await expect(job).to_contain_text("scrape", timeout=ANSWER_MS)
    await expect(job).to_contain_text("of 5000", timeout=ANSWER_MS)
    shown = await job.inner_text()
    await expect(job).not_to_have_text(shown, timeout=ANSWER_MS)
    await job.get_by_role("button", name="Stop").click()
    await expect(job.get_by_role("button", name="Stop")).to_have_count(0)
    headers = {"Authorization": f"Bearer {LOCAL_KEY}"}
    async with httpx2.AsyncClient(base_url=address(suite), headers=headers) as gateway:

        async def is_stopped() -> bool:
            answer = await gateway.post("/rpc/pawl.agent.v1.JobService/ListJobs", json={})
            newest = answer.json()["jobs"][0]
            return (newest["definition"]["toolName"], newest["state"]) == ("scrape", "RUN_STATE_CANCELLED")

        await until(is_stopped)
    scraped = pages.read_text()
    await copilot.say("what is 6 * 7")
    await copilot.ends("42")
    assert pages.read_text() == scraped, "the tool still runs"


async def test_copilotkit_page_tool_runs_in_the_page(copilot: Chat) -> None:
    await copilot.say('call paint with {"colour": "rgb(1, 2, 3)"}')
    await copilot.ends("The page is rgb(1, 2, 3).")
    await expect(copilot.page.locator("main")).to_have_css("background-color", "rgb(1, 2, 3)")


async def test_copilotkit_shows_the_turn_of_a_job_and_keeps_what_is_being_typed(copilot: Chat, tmp_path: Path) -> None:
    await copilot.say(background(tmp_path / "effects"))
    await copilot.ends("in the background")
    box = copilot.page.get_by_test_id("copilot-chat-textarea")
    await box.fill("what is 17 ")
    (tmp_path / "effects.go").touch()
    await copilot.ends("has ended, completed: finished.")
    await expect(box).to_have_value("what is 17 ")
    await copilot.say("what is 17 * 23")
    await copilot.ends("391")
    said = await copilot.answers.all_inner_texts()
    assert [sum(text in each for each in said) for text in ("I started to", "has ended", "391")] == [1, 1, 1]
