"""The whole of it: two stores with keys of their own, two replicas of everything, and gateways that are killed."""

from __future__ import annotations

import pytest
from playwright.async_api import Page, expect

from tests.system.console.conftest import say
from tests.system.console.keyed import SERVICES, STORES, World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


async def done(page: Page, runs: int = 1) -> None:
    await expect(page.locator(".turn[data-state=completed]")).to_have_count(runs, timeout=120_000)


async def test_a_story_goes_on_whichever_replica_dies(world: World) -> None:
    pages = [await world.enter(store, "ann") for store in STORES]
    for page, store in zip(pages, STORES, strict=True):
        await say(page, f"tell me a long story slowly about {store}")
        await expect(page.locator(".turn .markdown").last).to_contain_text(" ", timeout=90_000)
    await world.kill(0, *SERVICES)
    await world.kill(1, "gateway")
    for page, store in zip(pages, STORES, strict=True):
        await done(page)
        run_id = await page.locator(".turn").get_attribute("data-run")
        async with world.program(store, "ann") as program:
            answer = await program.post("/rpc/pawl.agent.v1.AgentService/GetRun", json={"runId": run_id})
        story = answer.json()["run"]["outputText"]
        await expect(page.locator(".turn .markdown").last).to_have_text(" ".join(story.split()))
        await page.reload()
        await expect(page.locator(".turn .markdown").last).to_have_text(" ".join(story.split()))
