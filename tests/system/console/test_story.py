"""The story of a long job in three front ends, with the gateway and agent-loop killed at each stage."""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from pawl.client import AsyncClient
from pawl.event.v1 import message_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.poll import put, until
from tests.system.console.conftest import NewPage
from tests.system.console.windows import PHONE, ClientWindow, ConsoleWindow, CopilotKitWindow, Window
from tests.system.suite.client import addresses, kill

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long, pytest.mark.timeout(1800)]


@pytest_asyncio.fixture(loop_scope="session")
async def pawl(suite: Suite) -> AsyncIterator[AsyncClient]:
    async with user_of(suite) as pawl:
        yield pawl


def user_of(suite: Suite, user: str | None = None) -> AsyncClient:
    return AsyncClient(addresses(suite), api_key=LOCAL_KEY, user=user, retry_seconds=240.0)


async def test_story_of_a_long_job_in_the_python_client_survives_kills(
    suite: Suite, pawl: AsyncClient, tmp_path: Path
) -> None:
    window = ClientWindow(pawl)
    await play(window, suite, pawl, tmp_path / "pages")
    await window.close()


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


async def play(window: Window, suite: Suite, pawl: AsyncClient, pages: Path) -> None:
    """ASYNC-5: the user starts a job, keeps chatting, sees its progress and a report halfway, reopens the
    conversation on a phone and stops the job in one click. Every message appears exactly once.
    """
    asked = [f"in the background: call crawl with {json.dumps({'path': str(pages)})}", "what is 6 * 7"]
    put(pages, "0")
    await window.say(asked[0])
    conversation_id = await window.conversation_id(pawl)
    await started(pawl, conversation_id, 1)
    await restarted(suite, pawl)
    await window.answered(1, "in the background")

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
    await window.answered(4, "has ended, stopped")
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
