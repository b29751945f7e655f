"""The whole of it: two stores with keys of their own, two replicas of everything, and gateways that are killed."""

from __future__ import annotations

import pytest
from playwright.async_api import Page, Route, expect

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


async def test_an_approval_finds_its_approver_through_another_gateway(world: World) -> None:
    ann, bob = await world.enter("acme", "ann"), await world.enter("acme", "bob", "/inbox")
    foreign = await world.enter("other", "bob", "/inbox")
    await say(ann, "email dan@example.com about replicas")
    card = bob.locator("[data-item]", has_text="replicas")
    await expect(card).to_be_visible(timeout=90_000)
    await world.kill(0, "gateway", "agent-loop")
    await card.get_by_role("button", name="Approve").click()
    await world.kill(1, "gateway", "tool-registry")
    await done(ann)
    await expect(ann.locator(".card.good", has_text="send_email")).to_have_count(1)
    await expect(card).to_have_count(0, timeout=90_000)
    await expect(foreign.locator(".empty")).to_be_visible()
    run_id = await ann.locator(".turn").get_attribute("data-run")
    await foreign.goto(f"/runs/{run_id}")
    await expect(foreign.locator(".fault")).to_contain_text("No such run")


async def test_a_request_whose_answer_is_lost_is_sent_again_and_takes_effect_once(world: World) -> None:
    async def lose_answer(route: Route) -> None:
        await route.fetch()
        await route.abort("connectionreset")

    # A gateway without the services behind it is asked once more by itself.
    await world.whole()
    ann, bob = await world.enter("acme", "ann"), await world.enter("acme", "bob", "/inbox")
    sent: list[str] = []
    for page, method in ((ann, "StartRun"), (bob, "DecideCalls")):
        page.on("request", lambda request: sent.append(request.url.rpartition("/")[2]))
        await page.route(f"**/{method}", lose_answer, times=1)
    await say(ann, "email dan@example.com about what is sent twice")
    card = bob.locator("[data-item]", has_text="sent twice")
    async with bob.expect_response("**/DecideCalls", timeout=90_000):
        await card.get_by_role("button", name="Approve").click(timeout=90_000)
    await done(ann)
    await expect(card).to_have_count(0, timeout=90_000)
    assert (sent.count("StartRun"), sent.count("DecideCalls")) == (2, 2)
    await expect(ann.locator(".card.good", has_text="send_email")).to_have_count(1)
    for page in (ann, bob):
        await expect(page.get_by_role("alert")).to_have_count(0)
    async with world.program("acme", "ann") as program:
        search = {"query": "sent twice"}
        found = await program.post("/rpc/pawl.agent.v1.ConversationService/ListConversations", json=search)
    assert len(found.json()["conversations"]) == 1
