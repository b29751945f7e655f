"""The story of a long job in the console, with the gateway killed at each stage, and agent-loop at two."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import httpx2
import pytest
from playwright.async_api import Locator, expect

from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.system.console.conftest import NewPage, address, at, done, say
from tests.system.suite.client import kill

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long, pytest.mark.timeout(900)]

SHOWN_MS = 120_000


async def test_story_of_a_long_job_survives_kills(open_page: NewPage, suite: Suite, tmp_path: Path) -> None:
    """ASYNC-5: the user starts a job, keeps chatting, sees its progress and a report halfway, reopens the
    conversation on a phone and stops the job in one click. Every message appears exactly once.

    agent-loop is killed twice: after three kills without a finished step, an operator must decide about the job.
    """
    pages = Pages(tmp_path / "pages")
    page = await open_page(user="walker")
    await say(page, f"in the background: call crawl with {json.dumps({'path': str(pages.path)})}")
    await expect(page.locator(".turn")).to_have_count(1)
    await restarted(suite, "gateway", "agent-loop")
    await done(page)
    card = page.locator(".card", has_text="crawl")
    await expect(card.get_by_role("progressbar")).to_be_visible(timeout=SHOWN_MS)

    await say(page, "what is 6 * 7")
    await expect(page.locator(".turn")).to_have_count(2)
    await restarted(suite, "gateway")
    await done(page, 2)

    pages.reach(0.25)
    await expect(card).to_contain_text("25% of the pages", timeout=SHOWN_MS)
    await restarted(suite, "gateway")
    pages.reach(0.3)
    await expect(card).to_contain_text("30% of the pages", timeout=SHOWN_MS)
    pages.reach(0.5)
    await restarted(suite, "gateway", "agent-loop")
    await done(page, 3)

    address_of_chat = page.url.removeprefix(at(page, ""))
    await page.close()
    await restarted(suite, "gateway")
    phone = await open_page(address_of_chat, user="walker", viewport={"width": 390, "height": 800})
    await done(phone, 3)
    stop = phone.locator(".strip", has_text="crawl").get_by_role("button", name="Stop crawl")
    await until_uncovered(stop)
    await stop.click()
    await expect(stop).to_have_count(0)
    await restarted(suite, "gateway")
    await done(phone, 4)
    await expect(phone.locator(".card", has_text="crawl")).to_contain_text("background job stopped", timeout=SHOWN_MS)

    for _ in range(2):
        for number, text in enumerate(("in the background", "42", "crawl", "has ended, stopped")):
            await expect(phone.locator(".turn").nth(number).locator(".markdown").last).to_contain_text(text)
        await phone.reload()
        await done(phone, 4)
    messages = await stored_messages(suite, address_of_chat.rpartition("/")[2])
    assert [message["number"] for message in messages] == [str(number) for number in range(1, len(messages) + 1)]
    answers = [message["text"] for message in messages if message["role"] == "ROLE_ASSISTANT" and message.get("text")]
    stored = Counter(map(plain, answers))

    async def shows_each_once() -> bool:
        shown = Counter(map(plain, await phone.locator(".turn .markdown").all_inner_texts()))
        return {text: shown[text] for text in stored} == stored

    await until(shows_each_once)


async def until_uncovered(element: Locator) -> None:
    """Wait until an element is in the viewport without scrolling, and no other element covers it."""
    on_top = """element => {
        const {x, y, width, height} = element.getBoundingClientRect();
        return element.contains(document.elementFromPoint(x + width / 2, y + height / 2));
    }"""
    await until(lambda: element.evaluate(on_top))


async def restarted(suite: Suite, *services: str) -> None:
    """Kill all replicas of these services, and wait until a call through the gateway is answered."""
    await kill(suite, *services)
    async with user_of(suite) as gateway:

        async def answers() -> bool:
            return (await gateway.post("/rpc/pawl.agent.v1.AgentService/WhoAmI", json={})).is_success

        await until(answers)


def user_of(suite: Suite) -> httpx2.AsyncClient:
    named = {"authorization": f"Bearer {LOCAL_KEY}", "pawl-user": "walker"}
    return httpx2.AsyncClient(base_url=address(suite), headers=named, timeout=60.0)


class Pages:
    """The file that determines the progress of `crawl`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reach(0.0)

    def reach(self, fraction: float) -> None:
        written = self.path.with_suffix(".new")
        written.write_text(str(fraction))
        written.replace(self.path)


def plain(text: str) -> str:
    return re.sub(r"\W+", "", text)


async def stored_messages(suite: Suite, conversation_id: str) -> list[dict[str, str]]:
    async with user_of(suite) as gateway:
        asked = {"conversationId": conversation_id}
        answer = await gateway.post("/rpc/pawl.agent.v1.AgentService/ListMessages", json=asked)
        messages: list[dict[str, str]] = answer.json()["messages"]
        return messages
