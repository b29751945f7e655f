"""What the console shows to users with keys of several roles and stores."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from pawl.launcher.suite import Suite
from tests.system.console.conftest import NewPage, ask_approval, at, done
from tests.system.suite.client import key_for

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


async def test_console_shows_only_what_the_users_role_allows(open_page: NewPage, suite: Suite) -> None:
    member = await open_page(key=await key_for(suite, "ann", "member", store="acme"))
    await ask_approval(member, "email ann@example.com about roles")
    run_id = await member.locator(".turn").get_attribute("data-run")

    viewer = await open_page(key=await key_for(suite, "vic", "viewer", store="acme"))
    await expect(viewer.get_by_text("You have read-only access.")).to_be_visible()
    await viewer.goto(at(viewer, "/schedules"))
    await expect(viewer.locator(".empty")).to_be_visible()
    await expect(viewer.get_by_role("button", name="New schedule")).to_have_count(0)
    await viewer.goto(at(viewer, "/tools/calculate"))
    await expect(viewer.get_by_role("heading", name="calculate")).to_be_visible()
    await expect(viewer.get_by_role("link", name="Agents")).to_be_visible()
    await expect(viewer.get_by_role("link", name="Audit")).to_have_count(0)
    await viewer.goto(at(viewer, "/inbox"))
    await viewer.wait_for_timeout(500)
    await expect(viewer.get_by_role("button", name="Approve")).to_have_count(0)

    other_user = await open_page(f"/runs/{run_id}", key=await key_for(suite, "eve", "admin", store="other"))
    await expect(other_user.get_by_role("heading", name="This run cannot be shown")).to_be_visible()
    await expect(other_user.locator(".fault")).to_contain_text("The run does not exist")
    await other_user.goto(at(other_user, "/inbox"))
    await expect(other_user.locator(".empty")).to_be_visible()

    approver = await open_page("/inbox", key=await key_for(suite, "bob", "approver", store="acme"))
    card = approver.locator("[data-item]", has_text="roles")
    await expect(card).to_be_visible()
    # A personal rule would not apply to another user's run.
    await expect(card.get_by_label("Remember as a rule")).to_have_count(0)
    await card.get_by_role("button", name="Approve").click()
    await done(member)
    await expect(member.locator(".card", has_text="by bob")).to_be_visible()
