"""Two stores with their own keys and two replicas of each service: what roles may see, and crashing replicas."""

from __future__ import annotations

import json

import pytest
from playwright.async_api import expect

from tests.system.console.conftest import say
from tests.system.console.keyed import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


async def test_console_shows_only_what_the_users_role_allows(world: World) -> None:
    await world.whole()
    member = await world.enter("acme", "ann")
    await say(member, "email ann@example.com about roles")
    await expect(member.locator(".card.wait")).to_be_visible(timeout=90_000)
    run_id = await member.locator(".turn").get_attribute("data-run")

    viewer = await world.enter("acme", "vic")
    await expect(viewer.get_by_text("You have read-only access.")).to_be_visible()
    await viewer.goto("/schedules")
    await expect(viewer.locator(".empty")).to_be_visible()
    await expect(viewer.get_by_role("button", name="New schedule")).to_have_count(0)
    await viewer.goto("/tools/calculate")
    await expect(viewer.get_by_role("heading", name="calculate")).to_be_visible()
    await viewer.locator(".more summary").click()
    await expect(viewer.get_by_role("link", name="Agents")).to_be_visible()
    await expect(viewer.get_by_role("link", name="Audit")).to_have_count(0)
    await viewer.goto("/inbox")
    for page in (viewer, member):
        await page.wait_for_timeout(500)
    await expect(viewer.get_by_role("button", name="Approve")).to_have_count(0)

    for store, other in (("acme", "vic"), ("acme", "bob"), ("other", "eve")):
        await cannot_watch(world, store, other, str(run_id))
    other_user = await world.enter("other", "eve", f"/runs/{run_id}")
    await expect(other_user.get_by_role("heading", name="This run cannot be shown")).to_be_visible()
    await expect(other_user.locator(".fault")).to_contain_text("The run does not exist")
    await other_user.goto("/inbox")
    await expect(other_user.locator(".empty")).to_be_visible()

    card = (await world.enter("acme", "bob", "/inbox")).locator("[data-item]", has_text="roles")
    await expect(card).to_be_visible(timeout=90_000)
    # A personal rule would not apply to another user's run.
    await expect(card.get_by_label("Remember as a rule")).to_have_count(0)
    await card.get_by_role("button", name="Approve").click()
    await expect(member.locator(".turn[data-state=completed]")).to_have_count(1, timeout=90_000)
    await expect(member.locator(".card", has_text="by bob")).to_be_visible()


async def cannot_watch(world: World, store: str, user: str, run_id: str) -> None:
    """Check that watching another user's run fails with the same error as watching an unknown run."""
    watch = {"method": "pawl.agent.v1.AgentService/WatchRun"}
    subscriptions = {each: watch | {"request": {"runId": each}} for each in (run_id, "run_nope")}
    async with world.program(store, user) as program:
        both = [await program.get(f"/runs/{each}/events") for each in subscriptions]
        assert [answer.status_code for answer in both] == [404, 404]
        assert both[0].json() == both[1].json()
        reported = (await program.post("/stream", json={"subscriptions": subscriptions})).text
        found = [json.loads(line.removeprefix("data: ")) for line in reported.splitlines() if line.startswith("data: ")]
        assert {each["key"] for each in found} == set(subscriptions)
        assert found[0]["error"] == found[1]["error"]
