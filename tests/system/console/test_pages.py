"""The list pages of the console: view, create, change, pause and end the entries of a store."""

from __future__ import annotations

import json
import re

import pytest
from playwright.async_api import Page, expect

from pawl.agent.v1.agents_pb2 import UpdateAgentRequest
from pawl.agent.v1.declaration_pb2 import Declaration, PutDeclarationRequest
from pawl.client import AsyncClient
from pawl.event.v1.agent_pb2 import AgentDefinition
from pawl.event.v1.trigger_pb2 import WEBHOOK_AUTHENTICATION_SIGNATURE, TriggerDefinition, WebhookSource
from pawl.launcher.suite import Suite
from tests.system.console.conftest import NewPage, ask, at, barrier_free, click, say, sees

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


async def write(page: Page, button: str, value: object) -> None:
    field = page.get_by_label(f"{button} (JSON)")
    if not await field.count():
        await page.get_by_role("button", name=button).click()
        as_json = page.get_by_role("button", name="Edit as JSON")
        await field.or_(as_json).wait_for()
        if await as_json.count():
            await as_json.click()
    await field.fill(value if isinstance(value, str) else json.dumps(value, indent=2))
    await page.get_by_role("button", name="Save").click()


async def sure(page: Page, button: str, *, rare: bool = True) -> None:
    if rare:
        await page.get_by_label("More actions").click()
    await page.get_by_role("button", name=button, exact=True).click()
    await page.get_by_role("button", name=f"Yes, {button}").click()


async def test_agent_is_created_changed_and_deleted(open_page: NewPage) -> None:
    page = await open_page("/agents")
    await write(page, "New agent", '{"name": ')
    await expect(page.get_by_role("alert")).to_be_visible()
    await write(page, "New agent", {"name": "NOT A NAME"})
    await expect(page.get_by_role("alert")).to_contain_text("name")
    await expect(page.get_by_label("New agent (JSON)")).to_have_attribute("aria-invalid", "true")
    await expect(page.get_by_label("New agent (JSON)")).to_be_focused()
    await write(page, "New agent", {"name": "clerk", "options": {"instructions": "Be short."}})
    await expect(page.get_by_text("Saved version 1.")).to_be_visible()
    await page.get_by_role("link", name="clerk").click()
    await click(page, "Edit agent", "Edit as JSON")
    await page.get_by_label("Edit agent (JSON)").fill('{"name": "clerk", ')
    await page.reload()
    await expect(page.get_by_label("Edit agent (JSON)")).to_have_value('{"name": "clerk", ')
    await write(page, "Edit agent", {"name": "clerk", "options": {"instructions": "Be long."}})
    await expect(page.get_by_role("region", name="Versions").get_by_role("row")).to_have_count(3)
    await sure(page, "Delete")
    await expect(page.get_by_role("heading", name="Agents")).to_be_visible()
    await expect(page.get_by_role("link", name="clerk")).to_have_count(0)


async def test_agent_is_made_with_a_form_and_found_with_the_palette(open_page: NewPage) -> None:
    page = await open_page("/agents", user="builder")
    await page.get_by_role("button", name="New agent").click()
    await page.get_by_label("Name", exact=True).fill("NOT A NAME")
    await page.get_by_role("radio", name="Only the tools chosen here").check()
    await page.get_by_role("checkbox", name=re.compile("^calculate")).check()
    await page.get_by_label("Instructions").fill("Be short.")
    await page.get_by_label("Instructions").press("Tab")
    # The agent is tried before it is saved.
    await say(page, "what is 6 * 7")
    await expect(page.locator(".turn[data-state=completed]")).to_contain_text("42")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_label("Name", exact=True)).to_be_focused()
    await expect(page.get_by_role("alert")).to_contain_text("name")
    await barrier_free(page, "the form of an agent")
    await page.get_by_label("Name", exact=True).fill("formal")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("Saved version 1.")).to_be_visible()
    await page.goto(at(page, "/inbox"))
    await expect(page.get_by_role("heading", name="Inbox")).to_be_visible()
    await page.keyboard.press("Control+k")
    await page.get_by_role("combobox", name="Search").fill("formal agent")
    await expect(page.get_by_role("option", name=re.compile("formal"))).to_be_visible()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="formal", level=1)).to_be_visible()
    await expect(page.get_by_role("link", name="calculate")).to_be_visible()


async def test_agent_of_a_set_is_read_only_and_names_the_set(open_page: NewPage, suite: Suite) -> None:
    async with AsyncClient(data=suite.options.data) as target:
        await target.agent_register.UpdateAgent(UpdateAgentRequest(definition=AgentDefinition(name="owned")))
        declaration = Declaration(kind="agent", name="owned", set="shop")
        await target.declarations.PutDeclaration(PutDeclarationRequest(declaration=declaration))
    page = await open_page("/agents/owned")
    await expect(page.get_by_text("Read-only: it belongs to the set shop.")).to_be_visible()
    await expect(page.get_by_role("heading", name="Instructions")).to_be_visible()
    for button in ("Edit agent", "Delete"):
        await expect(page.get_by_role("button", name=button)).to_have_count(0)


async def test_schedule_is_created_paused_run_and_deleted(open_page: NewPage) -> None:
    page = await open_page("/schedules", user="planner")
    wanted = {"name": "daily", "text": "what is 2 * 21", "cron": "not a cron", "timeZone": "Europe/Berlin"}
    await write(page, "New schedule", wanted)
    await expect(page.get_by_role("alert")).to_contain_text("cron")
    chosen = "area => area.value.slice(area.selectionStart, area.selectionEnd)"
    assert await page.get_by_label("New schedule (JSON)").evaluate(chosen) == '"cron"'
    await write(page, "New schedule", {**wanted, "cron": "0 9 * * *"})
    await page.get_by_role("link", name="daily").click()
    await page.get_by_role("button", name="Pause").click()
    await page.get_by_label("Reason (optional)").fill("a holiday")
    await page.keyboard.press("Enter")
    await expect(page.locator(".why")).to_contain_text("a holiday")
    await page.get_by_role("button", name="Resume").click()
    await expect(page.locator(".facts")).to_contain_text("active")
    await page.get_by_role("button", name="Run now").click()
    await expect(page.get_by_role("status")).to_contain_text("started")
    await expect(page.get_by_role("region", name="Fires").get_by_role("link")).to_have_count(1)
    await write(page, "Edit schedule", {**wanted, "cron": "30 9 * * *"})
    await expect(page.locator(".facts")).to_contain_text("09:30")
    await sure(page, "Delete")
    await expect(page.locator(".empty")).to_be_visible()


async def test_rule_is_created_and_revoked(open_page: NewPage) -> None:
    page = await open_page("/rules", user="careful")
    rule = {"effect": "RULE_EFFECT_ASK", "scope": "RULE_SCOPE_USER", "toolName": "calculate", "reason": "I want to see"}
    await write(page, "New rule", {**rule, "toolName": "no such tool"})
    await expect(page.get_by_role("alert")).to_be_visible()
    await write(page, "New rule", {**rule, "arguments": [{"argument": "expression", "equalsJson": "1 + 1"}]})
    row = page.get_by_role("row", name=re.compile("I want to see"))
    await row.get_by_role("link").click()
    await page.get_by_text("As JSON", exact=True).click()
    await expect(page.locator("pre.json")).to_contain_text('"equalsJson": "1 + 1"')
    await sure(page, "Revoke", rare=False)
    await expect(row).to_have_count(0)
    await page.get_by_label("Show ended").check()
    await expect(row).to_contain_text("revoked")
    await page.reload()
    await expect(row).to_contain_text("revoked")


async def test_tools_and_audit_entries_are_shown(open_page: NewPage) -> None:
    page = await open_page(user="auditor")
    run_id = await ask(page, "what is 12 * 12")
    await page.get_by_role("link", name="Audit").click()
    await page.get_by_label("User or run ID").fill(run_id or "")
    await page.keyboard.press("Tab")
    call = page.locator(".entries > li")
    await expect(call).to_have_count(1)
    await expect(call).to_contain_text("succeeded")
    await call.locator("summary").click()
    await expect(call.locator("ol > li")).to_have_count(4)
    await sees(call, "calculate started", "calculate succeeded after")
    await page.get_by_label("Kind").select_option("EXECUTED")
    await expect(call.locator("summary")).to_contain_text("started")
    assert "kind=EXECUTED" in page.url
    await page.get_by_role("button", name="Check for tampering").click()
    await expect(page.get_by_role("status")).to_contain_text("entries are intact")
    await page.get_by_role("link", name="Tools").click()
    await page.get_by_role("tab", name="Destructive").click()
    await expect(page.get_by_role("row", name=re.compile("delete_file"))).to_be_visible()
    await expect(page.get_by_role("row", name=re.compile("calculate"))).to_have_count(0)
    await page.goto(at(page, "/tools/calculate"))
    await expect(page.get_by_role("region", name="Arguments").get_by_role("row")).to_have_count(2)
    await expect(page.get_by_role("term").filter(has_text="Calls")).to_be_visible()


async def test_document_is_uploaded_read_and_deleted(open_page: NewPage) -> None:
    page = await open_page("/documents", user="librarian")
    files = [{"name": f"{name}.md", "mimeType": "text/markdown", "buffer": b"# Plan\nBuy milk."} for name in ("a", "b")]
    await page.get_by_label("Upload").set_input_files(files)  # type: ignore[arg-type]
    row = page.get_by_role("row", name=re.compile("Buy milk"))
    await expect(row).to_have_count(2)
    await page.get_by_label("Search").fill("a.md")
    await page.keyboard.press("Enter")
    await expect(row).to_have_count(1)
    await row.get_by_role("link").click()
    await expect(page.locator(".document")).to_have_text("# Plan\nBuy milk.")
    await sure(page, "Delete")
    await expect(page.get_by_role("link", name="b.md")).to_be_visible()
    await expect(page.get_by_role("link", name="a.md")).to_have_count(0)


async def test_job_is_paused_resumed_and_stopped(open_page: NewPage) -> None:
    page = await open_page(user="watcher")
    await say(page, "in the background, every 300 seconds, 5 times: what is 6 * 7")
    await expect(page.locator(".turn").first).to_contain_text("I started a")
    await page.get_by_role("link", name="Background", exact=True).click()
    row = page.get_by_role("row", name=re.compile("Calculate"))
    await row.get_by_role("button", name="Pause").click()
    await expect(row.get_by_role("button", name="Resume")).to_be_visible()
    await row.get_by_role("link").first.click()
    await page.get_by_role("button", name="Resume").click()
    await expect(page.get_by_role("button", name="Pause")).to_be_visible()
    await sure(page, "Stop", rare=False)
    await expect(page.locator(".facts").first).to_contain_text("stopped")


async def test_notification_settings_are_shown_and_changed(open_page: NewPage) -> None:
    page = await open_page(user="listener")
    await ask(page, "what is 5 * 5")
    await page.get_by_role("link", name="Notifications").click()
    reported = page.locator(".entries li").first.get_by_role("link").first
    for _ in range(120):
        if await reported.count():
            break
        await page.reload()
        await page.wait_for_timeout(500)
    unread = page.locator(".count.unread")
    await expect(unread).to_be_visible()
    await page.get_by_role("button", name="Mark all as read").click()
    await expect(unread).to_have_count(0)
    await expect(page.get_by_role("button", name="Mark as read", exact=True)).to_have_count(0)
    await page.get_by_role("button", name="Mute").first.click()
    await expect(page.get_by_role("status")).to_contain_text("Muted")
    await reported.click()
    await page.wait_for_url("**/runs/*")
    await page.get_by_role("link", name="Settings").click()
    await page.get_by_role("button", name="Unmute").click()
    await expect(page.get_by_role("button", name="Unmute")).to_have_count(0)
    async with page.expect_response("**/UpdatePreferences"):
        await page.get_by_label("A run completed").uncheck()
    await page.reload()
    await expect(page.get_by_label("A run completed")).not_to_be_checked()
    await expect(page.get_by_label("A run failed")).to_be_checked()
    hours = [{"start": "25:00", "end": "07:00"}]
    await write(page, "Edit quiet hours", {"hours": hours, "timeZone": "Europe/Berlin"})
    await expect(page.get_by_role("alert")).to_be_visible()
    hours[0]["start"] = "22:00"
    await write(page, "Edit quiet hours", {"hours": hours, "timeZone": "Europe/Berlin"})
    await expect(page.get_by_text("22:00 to 07:00 Europe/Berlin")).to_be_visible()


async def test_limits_of_the_store_are_shown_and_lowered(open_page: NewPage) -> None:
    page = await open_page("/settings?tab=store", user="limiter")
    row = page.get_by_role("row", name=re.compile("Rounds"))
    await expect(row).to_contain_text("Default")
    await page.get_by_role("button", name="Edit limits").click()
    await page.get_by_text("More options").click()
    await page.get_by_label("Rounds", exact=True).fill("0")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_role("alert")).to_contain_text("rounds_max")
    await expect(page.get_by_label("Rounds", exact=True)).to_be_focused()
    await page.get_by_label("Rounds", exact=True).fill("40")
    await page.get_by_role("button", name="Save").click()
    await expect(row).to_contain_text("40")
    await expect(page.get_by_role("region", name="Changes")).to_contain_text("rounds_max: not set → 40")
    await barrier_free(page, "the settings of the store")
    row = page.get_by_role("row", name=re.compile("Triggers"))
    await row.get_by_role("button", name="Switch off").click()
    await page.get_by_role("button", name="Yes, switch off").click()
    await expect(row).to_contain_text("off")
    await row.get_by_role("button", name="Switch on").click()
    await expect(row).to_contain_text("on")


async def test_event_of_a_trigger_is_sent_from_the_console(open_page: NewPage, suite: Suite) -> None:
    webhook = WebhookSource(authentication=WEBHOOK_AUTHENTICATION_SIGNATURE)
    async with AsyncClient(data=suite.options.data, user="sender") as target:
        _, secret = await target.create_trigger(TriggerDefinition(name="hook", text="{{event}}", webhook=webhook))
    page = await open_page("/triggers/hook", user="sender")
    await page.get_by_role("button", name="Send a test event").click()
    await page.get_by_label("Secret").fill("whsec_AAAA")
    await page.get_by_role("button", name="Send", exact=True).click()
    await expect(page.get_by_role("alert")).to_contain_text("signature")
    await page.get_by_label("Secret").fill(secret)
    await page.get_by_role("button", name="Send", exact=True).click()
    await expect(page.get_by_role("status")).to_contain_text("Outcome: started")
    await expect(page.get_by_role("region", name="Fires").get_by_role("link")).to_have_count(1)
