"""The inbox: bulk decisions, remembered approvals, granted series, and keyboard shortcuts."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Page, expect

from tests.keys import LOCAL_KEY
from tests.system.console.conftest import NewPage, ask, ask_approval, at, done, say

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


async def three_wait(open_page: NewPage, user: str) -> Page:
    page = await open_page(user=user)
    for name in ("ann", "bob", "carl"):
        await page.get_by_role("link", name="New conversation").click()
        await expect(page.get_by_role("heading", name="What can I do for you?")).to_be_visible()
        await ask_approval(page, f"email {name}@example.com about {user}")
    await page.goto(at(page, "/inbox"))
    await expect(page.locator("[data-item]", has_text=user)).to_have_count(3)
    return page


async def test_several_approvals_can_be_decided_on_together(open_page: NewPage) -> None:
    page = await three_wait(open_page, "several")
    mine = page.locator("[data-item]", has_text="several")
    several = page.get_by_role("group", name="Bulk decision")
    await expect(several).to_have_count(0)
    # Screen readers tell the cards apart by their names.
    for name in ("ann", "bob", "carl"):
        card = page.get_by_role("group", name=re.compile(f"send_email.*{name}@example.com.*several"))
        await expect(card.get_by_role("button", name="Approve")).to_have_count(1)
    await mine.nth(0).get_by_label("Select", exact=True).check()
    await mine.nth(1).focus()
    await page.keyboard.press("x")
    await several.get_by_label("Reason for all").fill("not today")
    await several.get_by_role("button", name="Reject 2").click()
    await expect(page.get_by_role("status").filter(has_text="rejected by several: not today").first).to_be_visible()
    await expect(mine).to_have_count(1)
    await mine.get_by_role("link", name="run", exact=True).click()
    await expect(page.get_by_role("heading", name=re.compile("about several waits for approval"))).to_be_visible()


async def test_approval_can_be_remembered_as_a_rule(open_page: NewPage) -> None:
    page = await open_page(user="rememberer")
    card = await ask_approval(page, "email ann@example.com about ships")
    await card.get_by_text("Options", exact=True).click()
    await card.get_by_label("Remember as a rule").select_option("RULE_SCOPE_CONVERSATION")
    await card.get_by_role("button", name="Approve").click()
    await done(page)
    await ask(page, "email bob@example.com about boats", 2)
    await expect(page.locator(".card", has_text="by rule")).to_be_visible()
    await page.get_by_role("link", name="Approval rules").click()
    await expect(page.get_by_role("row", name=re.compile("send_email allow conversation"))).to_be_visible()


async def test_edit_can_be_approved_only_while_it_is_visible(open_page: NewPage) -> None:
    page = await open_page(user="exact")
    await say(page, "in the background, every 1 seconds, 3 times: email ann@example.com about planes")
    await page.goto(at(page, "/inbox"))
    card = page.get_by_role("group", name=re.compile("planes"))
    preview, approve = card.locator(".preview"), card.get_by_role("button", name="Approve")
    await expect(preview).to_contain_text("Subject: planes")
    await card.get_by_role("button", name="Edit").click()
    await expect(preview).to_have_count(0)
    await card.get_by_label("subject *").fill("cars")
    await expect(card.get_by_label("Changes")).to_contain_text("cars")
    await expect(approve).to_have_text("Approve with edits")
    await card.get_by_role("button", name="As JSON").click()
    await card.get_by_label("Arguments as JSON").fill("{")
    await expect(approve).to_be_disabled()
    await expect(preview).to_have_count(0)
    await card.get_by_role("button", name="Discard edits").click()
    await expect(preview).to_contain_text("Subject: planes")
    await card.get_by_label("the whole series").check()
    await card.get_by_label("Maximum calls").fill("2")
    await approve.click()
    await expect(card).to_have_count(0)
    await page.goto(at(page, "/background?all=1"))
    row = page.get_by_role("row", name=re.compile("completed 2 of 2"))
    await row.get_by_role("link").click()
    await page.locator(".facts").last.get_by_role("link").first.click()
    await expect(page.locator(".card.good")).to_have_count(2)
    said = await page.locator(".card.good summary").all_inner_texts()
    assert ["planes" in each and "cars" not in each for each in said] == [True, True]


async def test_notification_link_opens_its_call_after_login(open_page: NewPage) -> None:
    """NOTE-1: the call has the keyboard focus, so a key decides it."""
    page = await open_page(user="me")
    await ask_approval(page, "email ann@example.com about links")
    call_id = await page.locator(".card.wait").get_attribute("data-call")
    other_user = await open_page(f"/inbox?call={call_id}", user="")
    await other_user.get_by_label("Your key").fill(LOCAL_KEY)
    await other_user.get_by_role("button", name="Log in").click()
    await expect(other_user.locator("[data-item]", has_text="about links")).to_be_focused()
    await other_user.keyboard.press("r")
    await done(page)
