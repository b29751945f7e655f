"""Smoke tests of the console in Firefox, driven by WebDriver BiDi, which Firefox itself speaks."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio

from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.system.console.conftest import address

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

ENTER: Final = "\ue007"
# Returns the first visible element that matches a selector and has a text in its label or content.
FIND: Final = """(selector, text) => [...document.querySelectorAll(selector)].find((each) =>
    each.checkVisibility() && `${each.getAttribute("aria-label") ?? ""} ${each.textContent}`.includes(text)) ?? null"""


class Firefox:
    """A tab. Elements are found by a CSS selector and a text."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids, self._tab = socket, itertools.count(1), ""

    async def start(self) -> None:
        await self._send("session.new", capabilities={})
        self._tab = (await self._send("browsingContext.getTree"))["contexts"][0]["context"]

    async def open(self, url: str) -> None:
        await self._send("browsingContext.navigate", context=self._tab, url=url, wait="complete")

    async def sees(self, selector: str, text: str = "") -> dict[str, Any]:
        """Wait for an element, and return it."""
        found: dict[str, Any] = {}

        async def exists() -> bool:
            found.update(await self.find(selector, text))
            return bool(found["type"] == "node")

        await until(exists)
        return {"sharedId": found["sharedId"]}

    async def find(self, selector: str, text: str = "") -> dict[str, Any]:
        arguments = [{"type": "string", "value": each} for each in (selector, text)]
        target = {"context": self._tab}
        call = {"functionDeclaration": FIND, "arguments": arguments, "target": target, "awaitPromise": False}
        return dict((await self._send("script.callFunction", **call))["result"])

    async def click(self, selector: str, text: str = "") -> None:
        origin = {"type": "element", "element": await self.sees(selector, text)}
        at = {"type": "pointerMove", "x": 0, "y": 0, "origin": origin}
        actions = [at, {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        await self._act({"type": "pointer", "id": "mouse", "actions": actions})

    async def type(self, text: str) -> None:
        keys = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        await self._act({"type": "key", "id": "keyboard", "actions": keys})

    async def say(self, text: str) -> None:
        await self.click("textarea[data-first]")
        await self.type(text + ENTER)

    async def _act(self, source: dict[str, Any]) -> None:
        await self._send("input.performActions", context=self._tab, actions=[source])

    async def _send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async for message in self._socket:
            answer = message.json()
            if answer.get("id") == number:
                assert answer["type"] == "success", answer
                return dict(answer["result"])
        raise AssertionError("Firefox has closed the connection")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def firefox(suite: Suite) -> AsyncIterator[Firefox]:
    """Yield a tab in which a user has logged in."""
    program = shutil.which("firefox-esr") or shutil.which("firefox")
    if program is None:
        pytest.skip("Firefox is not installed: apt-get install firefox-esr")
    with tempfile.TemporaryDirectory(prefix="pawl-firefox-", ignore_cleanup_errors=True) as profile:
        command = (program, "--headless", "--no-remote", "--profile", profile, "--remote-debugging-port", "0")
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        try:
            listening = None
            while listening is None and (line := await process.stderr.readline()):
                listening = re.search(r"BiDi listening on (ws://\S+)", line.decode())
            assert listening is not None, "Firefox does not start"
            async with aiohttp.ClientSession() as http, http.ws_connect(f"{listening[1]}/session") as socket:
                tab = Firefox(socket)
                await tab.start()
                await tab.open(address(suite))
                await tab.click("#key")
                await tab.type(LOCAL_KEY + ENTER)
                await tab.sees("h1", "What can I do for you?")
                yield tab
        finally:
            process.terminate()
            await process.communicate()


async def test_firefox_answers_a_message_after_login(firefox: Firefox) -> None:
    await firefox.say("what is 6 * 7")
    await firefox.sees(".turn[data-state=completed]", "42")


async def test_firefox_approves_a_call(firefox: Firefox) -> None:
    await firefox.click("a", "New conversation")
    await firefox.say("email ann@example.com about foxes")
    await firefox.click(".card.wait button", "Approve")
    await firefox.sees(".card.good", "Send an e-mail")


async def test_firefox_stops_a_job(firefox: Firefox) -> None:
    await firefox.click("a", "New conversation")
    await firefox.say("in the background, every 300 seconds, 5 times: what is 6 * 8")
    await firefox.click(".job button", "Stop")
    await firefox.click("nav a", "Background")
    await firefox.click("[role=tab]", "All")
    await firefox.click("a.opens", "Calculate")
    await firefox.sees(".facts", "stopped")


async def test_firefox_shows_a_run_with_its_timeline(firefox: Firefox) -> None:
    await firefox.click("nav a", "Runs")
    await firefox.click("a.opens", "about foxes")
    await firefox.sees("h1", "email ann@example.com about foxes")
    await firefox.sees("[data-bar=call]", "Send an e-mail")
