"""The page of docs/examples/copilotkit with the published CopilotKit, a real browser and a real suite."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, Route, expect

from pawl.launcher.ports import free_port
from pawl.launcher.suite import Suite
from tests import npm
from tests.keys import LOCAL_KEY
from tests.system.console.conftest import address
from tests.system.console.test_example import answers
from tests.tidy.tree import ROOT

# The example has a thousand packages.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long, pytest.mark.timeout(900)]

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
        """Send a message once the page accepts one, which it does not while it loads the thread."""
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
async def chat(server: str, browser: Browser) -> AsyncIterator[Chat]:
    """A window whose page contacts only its server and ends without an error."""
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


async def test_calls_can_be_approved_and_rejected_even_after_a_reload(chat: Chat) -> None:
    await chat.say(f"{MAIL} and {MAIL.replace('ann', 'bob')}")
    asked = chat.page.get_by_role("group", name="Approval")
    await expect(asked).to_have_count(2, timeout=ANSWER_MS)
    await chat.page.reload()
    await expect(asked).to_have_count(2, timeout=ANSWER_MS)
    await asked.filter(has_text="bob@example.com").get_by_role("button", name="Reject").click()
    await expect(asked).to_have_count(2)
    await asked.filter(has_text="ann@example.com").get_by_role("button", name="Approve").click()
    await chat.ends("Not now.")
    await expect(asked).to_have_count(0)


async def test_page_tool_runs_in_the_page(chat: Chat) -> None:
    await chat.say('call paint with {"colour": "rgb(1, 2, 3)"}')
    await chat.ends("The page is rgb(1, 2, 3).")
    await expect(chat.page.locator("main")).to_have_css("background-color", "rgb(1, 2, 3)")
