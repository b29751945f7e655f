"""The CopilotKit example of docs/examples: its server, and its chat in a browser."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
from playwright.async_api import Browser, Locator, Page, Route, expect

from pawl.launcher.ports import free_port
from tests import npm
from tests.keys import LOCAL_KEY
from tests.tidy.tree import ROOT

ANSWER_MS: Final = 120_000
_INSTALL_SECONDS: Final = 600.0
_STARTS_SECONDS: Final = 240.0


async def answers(url: str) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + _STARTS_SECONDS
    async with httpx2.AsyncClient(timeout=60.0) as client:
        while True:
            try:
                (await client.get(url)).raise_for_status()
                break
            except httpx2.TransportError:
                assert time.monotonic() < deadline, f"{url} does not answer"
                await asyncio.sleep(0.1)


@asynccontextmanager
async def serving(folder: Path, gateway: str) -> AsyncIterator[str]:
    """Install the example in `folder`, run its server, and yield its URL."""
    await asyncio.to_thread(npm.install, ROOT / "docs/examples/copilotkit", folder, timeout_seconds=_INSTALL_SECONDS)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    own = {"PAWL_GATEWAY": gateway, "PAWL_KEY": LOCAL_KEY, "COPILOTKIT_TELEMETRY_DISABLED": "true"}
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
    def __init__(self, page: Page, url: str, thread: str) -> None:
        self.page, self.url, self.thread = page, url, thread

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

    @property
    def job(self) -> Locator:
        return self.page.get_by_role("group", name="Background job")

    async def ends(self, text: str) -> None:
        await expect(self.answers.last).to_contain_text(text, timeout=ANSWER_MS)


@asynccontextmanager
async def chatting(browser: Browser, url: str, thread: str = "", **context_options: Any) -> AsyncIterator[Chat]:
    """Open a window whose page may contact only its server. Fail if the page had an error."""
    context, faults = await browser.new_context(**context_options), list[str]()
    context.set_default_timeout(ANSWER_MS)

    async def guard(route: Route) -> None:
        if route.request.url.startswith((url, "blob:", "data:")):
            await route.continue_()
        else:
            faults.append(route.request.url)
            await route.abort()

    await context.route("**/*", guard)
    page = await context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    chat = Chat(page, url, thread or f"copilotkit-{secrets.token_hex(4)}")
    await chat.open()
    yield chat
    await context.close()
    assert faults == []
