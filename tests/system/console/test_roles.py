"""Roles in the console: who may only read sees no buttons, who may decide has them, and other stores are not there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.system.console.conftest import PATIENCE_MS, address

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

PEOPLE = {
    "member": ("acme", ["member"]),
    "viewer": ("acme", ["viewer"]),
    "approver": ("acme", ["approver"]),
    "stranger": ("other", ["admin"]),
}


def key_of(user: str) -> str:
    return f"key-of-{user}-0123456789"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def keyed() -> AsyncIterator[Suite]:
    with tempfile.TemporaryDirectory(prefix="pawl-roles-") as folder:
        keys = Path(folder) / "keys.json"
        entries = [
            {"key": key_of(user), "user_id": user, "store_id": store, "roles": roles}
            for user, (store, roles) in PEOPLE.items()
        ]
        keys.write_text(json.dumps(entries))
        options = SuiteOptions(data=Path(folder) / "data", environment={"PAWL_API_KEYS_FILE": str(keys)})
        async with Suite(options) as suite:
            yield suite


async def enter(browser: Browser, suite: Suite, user: str, path: str) -> Page:
    """Return a page of the console, logged in by its form."""
    context = await browser.new_context(base_url=address(suite))
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    await page.goto("/")
    await page.get_by_label("Your key").fill(key_of(user))
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("navigation")).to_be_visible()
    await page.goto(path)
    return page


async def test_who_may_sees_it_who_may_not_does_not(browser: Browser, keyed: Suite) -> None:
    member = await enter(browser, keyed, "member", "/")
    await member.get_by_label("Your message").fill("email ann@example.com about roles")
    await member.keyboard.press("Enter")
    await expect(member.locator(".card.wait")).to_be_visible(timeout=90_000)
    run_id = await member.locator(".turn").get_attribute("data-run")

    viewer = await enter(browser, keyed, "viewer", "/")
    await expect(viewer.get_by_text("You may read here, and not write.")).to_be_visible()
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

    for other in ("viewer", "approver", "stranger"):
        await cannot_watch(keyed, other, str(run_id))
    stranger = await enter(browser, keyed, "stranger", f"/runs/{run_id}")
    await expect(stranger.get_by_role("heading", name="This run cannot be shown")).to_be_visible()
    await expect(stranger.locator(".fault")).to_contain_text("No such run")
    await stranger.goto("/inbox")
    await expect(stranger.locator(".empty")).to_be_visible()

    approver = await enter(browser, keyed, "approver", "/inbox")
    card = approver.locator("[data-item]", has_text="roles")
    await expect(card).to_be_visible(timeout=90_000)
    # A rule of one's own would not count for the run of somebody else.
    await expect(card.get_by_label("Remember as a rule")).to_have_count(0)
    await card.get_by_role("button", name="Approve").click()
    await expect(member.locator(".turn[data-state=completed]")).to_have_count(1, timeout=90_000)
    await expect(member.locator(".card", has_text="by approver")).to_be_visible()


async def cannot_watch(suite: Suite, user: str, run_id: str) -> None:
    """Streams tell a run of somebody else to nobody, and in the words for one that is not there."""
    watch = {"method": "pawl.agent.v1.AgentService/WatchRun"}
    wishes = {each: watch | {"request": {"runId": each}} for each in (run_id, "run_nope")}
    headers = {"authorization": f"Bearer {key_of(user)}"}
    async with httpx2.AsyncClient(base_url=address(suite), headers=headers, timeout=60.0) as program:
        both = [await program.get(f"/runs/{each}/events") for each in wishes]
        assert [answer.status_code for answer in both] == [404, 404]
        assert both[0].json() == both[1].json()
        told = (await program.post("/stream", json={"subscriptions": wishes})).text
        found = [json.loads(line.removeprefix("data: ")) for line in told.splitlines() if line.startswith("data: ")]
        assert {each["key"] for each in found} == set(wishes)
        assert found[0]["error"] == found[1]["error"]
