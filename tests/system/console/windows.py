"""Three front ends, each as a window in which a user chats and a job makes progress."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

from playwright.async_api import Browser, Locator, expect

from pawl.agent.v1 import jobs_pb2
from pawl.client import AsyncClient
from pawl.errors import ConversationNotFound
from pawl.event.v1 import message_pb2
from tests.poll import until
from tests.system.console.conftest import NewPage, at, done, say
from tests.system.console.copilotkit import Chat, chatting

SHOWN_SECONDS = 240.0
PHONE = {"viewport": {"width": 390, "height": 800}}


class Window(ABC):
    """A window on one conversation, with the job `crawl` in it."""

    @abstractmethod
    async def say(self, text: str) -> None:
        """Send a message."""

    @abstractmethod
    async def conversation_id(self, pawl: AsyncClient) -> str:
        """Return the conversation's id, once it exists."""

    @abstractmethod
    async def answered(self, count: int, text: str) -> None:
        """Wait until the window shows the answer to the message or notice with this number, which contains `text`."""

    @abstractmethod
    async def shows(self, progress: str) -> None:
        """Wait until the window shows this progress of the job."""

    @abstractmethod
    async def reopen(self, **device: Any) -> None:
        """Close the window and open the conversation in a new one."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop the job, and wait until the window shows that it is being stopped."""

    @abstractmethod
    async def said(self) -> list[str]:
        """Return the messages that the window shows: the user's and the model's."""


class ConsoleWindow(Window):
    def __init__(self, open_page: NewPage, user: str) -> None:
        self._open, self._user = open_page, user

    async def open(self, path: str = "/", **device: Any) -> None:
        self._page = await self._open(path, user=self._user, **device)

    async def say(self, text: str) -> None:
        await say(self._page, text)

    async def conversation_id(self, pawl: AsyncClient) -> str:
        await expect(self._page.locator(".turn")).to_have_count(1)
        return self._page.url.rpartition("/")[2]

    async def answered(self, count: int, text: str) -> None:
        await done(self._page, count)
        answer = self._page.locator(".turn").nth(count - 1).locator(".markdown").last
        await expect(answer).to_contain_text(text, timeout=SHOWN_SECONDS * 1000)

    async def shows(self, progress: str) -> None:
        card = self._page.locator(".card", has_text="crawl")
        await expect(card).to_contain_text(progress, timeout=SHOWN_SECONDS * 1000)

    async def reopen(self, **device: Any) -> None:
        path = self._page.url.removeprefix(at(self._page, ""))
        await self._page.close()
        await self.open(path, **device)

    async def stop(self) -> None:
        stop = self._page.locator(".job", has_text="crawl").get_by_role("button", name="Stop crawl")
        await until_uncovered(stop)
        await stop.click()
        await expect(stop).to_have_count(0)

    async def said(self) -> list[str]:
        return await self._page.locator(".turn .mine, .turn .markdown").all_inner_texts()


async def until_uncovered(element: Locator) -> None:
    """Wait until an element is in the viewport without scrolling, and no other element covers it."""
    on_top = """element => {
        const {x, y, width, height} = element.getBoundingClientRect();
        return element.contains(document.elementFromPoint(x + width / 2, y + height / 2));
    }"""
    await until(lambda: element.evaluate(on_top))


class CopilotKitWindow(Window):
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


class ClientWindow(Window):
    """A program that uses the Python client."""

    def __init__(self, pawl: AsyncClient) -> None:
        self._pawl, self._id, self._job = pawl, "", jobs_pb2.BackgroundJob()

    async def _follow(self) -> None:
        async with aclosing(self._pawl.follow(self._id)) as changes:
            async for change in changes:
                for item in change.items:
                    match item.WhichOneof("kind"):
                        case "message" if item.message.text and not item.message.notices_json:
                            self._messages.append(item.message)
                        case "job":
                            self._job = item.job

    async def say(self, text: str) -> None:
        self._id = (await self._pawl.start(text, conversation_id=self._id)).conversation_id

    async def conversation_id(self, pawl: AsyncClient) -> str:
        await self.reopen()
        return self._id

    async def answered(self, count: int, text: str) -> None:
        def is_last() -> bool:
            last = self._messages[-1] if self._messages else message_pb2.Message()
            return last.role == message_pb2.ROLE_ASSISTANT and text in last.text

        await until(is_last, patience_seconds=SHOWN_SECONDS)

    async def shows(self, progress: str) -> None:
        await until(lambda: progress in self._job.progress.message, patience_seconds=SHOWN_SECONDS)

    async def reopen(self, **device: Any) -> None:
        await self.close()
        self._messages: list[message_pb2.Message] = []
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if hasattr(self, "_following"):
            self._following.cancel()

    async def stop(self) -> None:
        await until(lambda: self._job.job_id, patience_seconds=SHOWN_SECONDS)
        await self._pawl.stop_job(self._job.job_id)

    async def said(self) -> list[str]:
        return [message.text for message in self._messages]
