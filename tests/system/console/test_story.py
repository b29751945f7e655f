"""The story of a long job in two front ends, with the gateway and agent-loop killed at each stage."""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, expect

from pawl.client import AsyncClient
from pawl.errors import ConversationNotFound
from pawl.event.v1 import message_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.poll import put, until
from tests.system.console.conftest import NewPage, at, done, say
from tests.system.console.copilotkit import Chat, chatting
from tests.system.suite.client import addresses, kill

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long, pytest.mark.timeout(1800)]


SHOWN_SECONDS = 240.0
PHONE = {"viewport": {"width": 390, "height": 800}}


class ConsoleWindow:
    """A window on one conversation, with the job `crawl` in it."""

    def __init__(self, open_page: NewPage, user: str) -> None:
        self._open, self._user = open_page, user

    async def open(self, path: str = "/", **device: Any) -> None:
        self._page = await self._open(path, user=self._user, **device)

    async def say(self, text: str) -> None:
        """Send a message."""
        await say(self._page, text)

    async def conversation_id(self, pawl: AsyncClient) -> str:
        """Return the conversation's id, once it exists."""
        await expect(self._page.locator(".turn")).to_have_count(1)
        return self._page.url.rpartition("/")[2]

    async def answered(self, count: int, text: str) -> None:
        """Wait until the window shows the answer to the message or notice with this number, which contains `text`."""
        await done(self._page, count)
        answer = self._page.locator(".turn").nth(count - 1).locator(".markdown").last
        await expect(answer).to_contain_text(text, timeout=SHOWN_SECONDS * 1000)

    async def shows(self, progress: str) -> None:
        """Wait until the window shows this progress of the job."""
        card = self._page.locator(".card", has_text="crawl")
        await expect(card).to_contain_text(progress, timeout=SHOWN_SECONDS * 1000)

    async def reopen(self, **device: Any) -> None:
        """Close the window and open the conversation in a new one."""
        path = self._page.url.removeprefix(at(self._page, ""))
        await self._page.close()
        await self.open(path, **device)

    async def stop(self) -> None:
        """Stop the job, and wait until the window shows that it is being stopped."""
        stop = self._page.locator(".job", has_text="crawl").get_by_role("button", name="Stop crawl")
        await until_uncovered(stop)
        await stop.click()
        await expect(stop).to_have_count(0)

    async def said(self) -> list[str]:
        """Return the messages that the window shows: the user's and the model's."""
        return await self._page.locator(".turn .mine, .turn .markdown").all_inner_texts()


async def until_uncovered(element: Locator) -> None:
    """Wait until an element is in the viewport without scrolling, and no other element covers it."""
    on_top = """element => {
        const {x, y, width, height} = element.getBoundingClientRect();
        return element.contains(document.elementFromPoint(x + width / 2, y + height / 2));
    }"""
    await until(lambda: element.evaluate(on_top))


class CopilotKitWindow:
    """The same window, with CopilotKit."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser, self._url = browser, url
        self._stack = AsyncExitStack()

    async def open(self, thread: str = "", **device: Any) -> None:
        self._chat: Chat = await self._stack.enter_async_context(chatting(self._browser, self._url, thread, **device))

    async def close(self) -> None:
        await self._stack.aclose()

    async def say(self, text: str) -> None:
        await self._chat.say(text)

    async def conversation_id(self, pawl: AsyncClient) -> str:
        async def exists() -> str:
            with suppress(ConversationNotFound):
                return (await pawl.get_conversation(conversation_key=self._chat.thread)).conversation_id
            return ""

        await until(exists)
        return await exists()

    async def answered(self, count: int, text: str) -> None:
        await expect(self._chat.answers.last).to_contain_text(text, timeout=SHOWN_SECONDS * 1000)

    async def shows(self, progress: str) -> None:
        await expect(self._chat.job).to_contain_text(progress, timeout=SHOWN_SECONDS * 1000)

    async def reopen(self, **device: Any) -> None:
        await self.close()
        await self.open(self._chat.thread, **device)

    async def stop(self) -> None:
        stop = self._chat.job.get_by_role("button", name="Stop")
        await stop.click()
        await expect(stop).to_have_count(0)

    async def said(self) -> list[str]:
        mine = self._chat.page.get_by_test_id("copilot-user-message")
        return [*await mine.all_inner_texts(), *await self._chat.answers.all_inner_texts()]


@pytest_asyncio.fixture(loop_scope="session")
async def pawl(suite: Suite) -> AsyncIterator[AsyncClient]:
    async with user_of(suite) as pawl:
        yield pawl


def user_of(suite: Suite, user: str | None = None) -> AsyncClient:
    return AsyncClient(addresses(suite), api_key=LOCAL_KEY, user=user, retry_seconds=240.0)


async def test_story_of_a_long_job_in_the_console_survives_kills(
    open_page: NewPage, suite: Suite, tmp_path: Path
) -> None:
    user = f"walker-{secrets.token_hex(3)}"
    window = ConsoleWindow(open_page, user)
    await window.open()
    async with user_of(suite, user) as pawl:
        await play(window, suite, pawl, tmp_path / "pages")


async def test_story_of_a_long_job_in_copilotkit_survives_kills(
    copilotkit: str, browser: Browser, suite: Suite, pawl: AsyncClient, tmp_path: Path
) -> None:
    window = CopilotKitWindow(browser, copilotkit)
    await window.open()
    await play(window, suite, pawl, tmp_path / "pages")
    await window.close()


async def play(window: ConsoleWindow | CopilotKitWindow, suite: Suite, pawl: AsyncClient, pages: Path) -> None:
    """ASYNC-5: the user starts a job, keeps chatting, sees its progress and a report halfway, reopens the
    conversation on a phone and stops the job in one click. Every message appears exactly once.
    """
    asked = [f"in the background: call crawl with {json.dumps({'path': str(pages)})}", "what is 6 * 7"]
    put(pages, "0")
    await window.say(asked[0])
    conversation_id = await window.conversation_id(pawl)
    await started(pawl, conversation_id, 1)
    await restarted(suite, pawl)
    await window.answered(1, "background job")

    await window.say(asked[1])
    await started(pawl, conversation_id, 2)
    await restarted(suite, pawl)
    await window.answered(2, "42")

    put(pages, "0.25")
    await window.shows("25% of the pages")
    await restarted(suite, pawl)
    put(pages, "0.3")
    await window.shows("30% of the pages")
    put(pages, "0.5")
    await restarted(suite, pawl)
    await window.answered(3, "crawl")

    await window.reopen(**PHONE)
    await restarted(suite, pawl)
    await window.answered(3, "crawl")
    await window.stop()
    await restarted(suite, pawl)
    await window.answered(4, "was stopped")
    (job,) = [job async for job in pawl.list_jobs(conversation_id)]
    assert job.state == run_pb2.RUN_STATE_CANCELLED

    messages = [message async for message in pawl.messages(conversation_id)]
    assert [message.number for message in messages] == list(range(1, len(messages) + 1))
    answers = [each.text for each in messages if each.role == message_pb2.ROLE_ASSISTANT and each.text]
    stored = Counter(map(plain, asked + answers))

    async def shows_each_once() -> bool:
        shown = Counter(map(plain, await window.said()))
        return {text: shown[text] for text in stored} == stored

    await until(shows_each_once)
    await window.reopen()
    await until(shows_each_once)


async def started(pawl: AsyncClient, conversation_id: str, count: int) -> None:
    """Wait until the conversation's user messages have started this many runs."""

    async def are_started() -> bool:
        async with aclosing(pawl.runs(conversation_id=conversation_id)) as runs:
            return len([run async for run in runs if not run.parent_run_id]) >= count

    await until(are_started)


async def restarted(suite: Suite, pawl: AsyncClient) -> None:
    """Kill all replicas of the gateway and agent-loop, and wait until both answer."""
    await kill(suite, "gateway", "agent-loop")
    await pawl.whoami()


def plain(text: str) -> str:
    return re.sub(r"\W+", "", text)
