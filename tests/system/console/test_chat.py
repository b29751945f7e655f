"""The chat and its runs in a real browser: what users do by mouse and keyboard, while the model fails."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
from playwright.async_api import FilePayload, Request, expect

from pawl.event.v1 import call_pb2
from pawl.launcher.suite import Suite
from pawl.tool.v1 import source_pb2, source_pb2_grpc
from tests.fakes.mcp_program import stdio_config
from tests.keys import LOCAL_KEY, keyed_channel
from tests.poll import until
from tests.system.console.conftest import NewPage, address, ask, ask_approval, at, background, click, done, say, sees
from tests.system.scripting import Model, scripted

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


@pytest_asyncio.fixture(loop_scope="session")
async def model(suite: Suite) -> AsyncIterator[Model]:
    async with scripted(suite) as model:
        yield model


async def test_refused_edit_is_reported_next_to_its_field_and_can_be_corrected(open_page: NewPage) -> None:
    page = await open_page(user="mender")
    await say(page, "email ann@example.com about tea")
    card = page.locator(".card.wait")
    await card.get_by_role("button", name="Edit").click()
    field = card.get_by_label("to *")
    await field.fill("")
    await card.get_by_role("button", name="Approve with edits").click()
    await expect(card.get_by_role("alert")).to_contain_text("to")
    await expect(field).to_have_attribute("aria-invalid", "true")
    described = await field.get_attribute("aria-describedby")
    assert await card.get_by_role("alert").get_attribute("id") in (described or "").split()
    await field.fill("bob@example.com")
    await card.get_by_role("button", name="Approve with edits").click()
    await done(page)
    await page.locator(".card.good summary").click()
    await expect(page.locator(".card.good")).to_contain_text("bob@")


async def test_large_integers_are_shown_and_sent_exactly(open_page: NewPage, suite: Suite) -> None:
    """HITL-3: an approval covers exactly what was shown, and editing one argument does not change the others."""
    schema = {"type": "object", "properties": {"account": {"type": "integer"}, "note": {"type": "string"}}}
    pay = {
        "name": "pay",
        "description": "Pays.",
        "argumentsSchemaJson": base64.b64encode(json.dumps(schema).encode()).decode(),
        "category": "TOOL_CATEGORY_SENSITIVE",
    }
    text = 'call pay with {"account": 9007199254740993, "note": "lunch"}'
    bearer = {"authorization": f"Bearer {LOCAL_KEY}", "pawl-user": "payer"}
    async with httpx2.AsyncClient(
        base_url=f"{address(suite)}/rpc/pawl.agent.v1.AgentService/", headers=bearer, timeout=60.0
    ) as agent:
        run = (await agent.post("StartRun", json={"text": text, "frontEndTools": [pay]})).json()["run"]
        page = await open_page(f"/c/{run['conversationId']}", user="payer")
        card = page.locator(".card.wait")
        await expect(card).to_contain_text("9007199254740993")
        await card.get_by_role("button", name="Edit").click()
        await expect(card.get_by_label("account")).to_have_value("9007199254740993")
        await card.get_by_label("note").fill("dinner")
        await card.get_by_role("button", name="Approve with edits").click()
        await expect(page.get_by_text("edited and approved by payer")).to_be_visible()
        (call,) = (await agent.post("ListCalls", json={"runId": run["runId"]})).json()["calls"]
    assert json.loads(base64.b64decode(call["argumentsJson"])) == {"account": 9007199254740993, "note": "dinner"}


async def test_question_of_mcp_server_is_answered_in_a_form(open_page: NewPage, suite: Suite, tmp_path: Path) -> None:
    """If the input does not fit the server's schema, the form shows the error and the question stays open."""
    (tmp_path / "tools.json").write_text('[{"name": "ask", "description": "Asks.", "inputSchema": {"type": "object"}}]')
    safe = source_pb2.SourceToolPolicy(tool_name="*", category=call_pb2.TOOL_CATEGORY_SAFE)
    config = source_pb2.SourceConfig(name="shop", mcp_stdio=stdio_config(tmp_path), policies=[safe])
    async with keyed_channel(suite.endpoints.services["tool-registry"][0].grpc) as channel:
        await source_pb2_grpc.SourceServiceStub(channel).AddSource(source_pb2.AddSourceRequest(config=config))
    sizes = {
        "size": {"type": "string", "enum": ["s", "m"], "title": "Size"},
        "count": {"type": "integer", "minimum": 1, "maximum": 9, "title": "How many"},
    }
    asks = {"message": "What may it be?", "requestedSchema": {"type": "object", "properties": sizes}}
    page = await open_page(user="buyer")
    await say(page, f"call shop__ask with {json.dumps({'asks': asks})}")
    card = page.locator(".card.wait")
    await expect(card).to_contain_text("What may it be?")
    await card.get_by_label("Size").select_option("m")
    await card.get_by_label("How many").fill("12")
    await card.get_by_role("button", name="Answer").click()
    await expect(card.get_by_role("alert")).to_contain_text("9")
    await card.get_by_label("How many").fill("2")
    await card.get_by_role("button", name="Answer").click()
    await done(page)
    await page.locator(".card summary").click()
    await sees(page.locator(".card"), "accept", "2")


async def test_model_opens_a_page_and_draws_a_chart(open_page: NewPage) -> None:
    page = await open_page(user="seer")
    await say(
        page, 'call show_chart with {"title": "Sales", "labels": ["May", "June", "July"], "values": [3, -4.5, 0]}'
    )
    await done(page)
    chart = page.get_by_role("table", name="Sales")
    await expect(chart.get_by_role("row", name="June -4.5")).to_be_visible()
    widths = await chart.locator(".bar").evaluate_all("bars => bars.map((bar) => bar.style.width)")
    assert [width[:3] for width in widths] == ["66.", "100", "0%"]
    await page.reload()
    await expect(chart.get_by_role("row", name="May 3")).to_be_visible()
    await say(page, 'call open_page with {"page": "tools"}')
    await expect(page.get_by_role("heading", name="Tools")).to_be_visible()


async def test_a_queued_message_waits_and_the_stop_button_cancels(open_page: NewPage) -> None:
    page = await open_page(user="hasty")
    await say(page, "tell me a long story slowly")
    story = page.locator(".turn").first
    await expect(story.locator(".markdown").last).to_contain_text("Once")
    await say(page, "what is 6 * 7")
    await expect(page.locator(".turn[data-state=queued]")).to_have_count(1)
    await page.get_by_role("button", name="Stop", exact=True).click()
    await expect(story).to_have_attribute("data-state", "stopped")
    await expect(story).to_contain_text("Stopped.")
    await done(page)
    await expect(page.locator(".turn").last).to_contain_text("42")


async def test_turn_of_a_job_appears_on_open_pages_without_polling(open_page: NewPage, tmp_path: Path) -> None:
    """Text that the user is writing at that moment is kept."""
    page, effects = await open_page(user="waiter"), tmp_path / "effects"
    await page.clock.install()
    await page.reload()
    await ask(page, background(effects))
    strip = page.get_by_role("status").filter(has_text="Hold once")
    await expect(strip).to_be_visible()
    phone = await open_page(page.url.removeprefix(at(page, "")), user="waiter", viewport={"width": 390, "height": 700})
    await expect(phone.get_by_role("status").filter(has_text="Hold once")).to_be_visible()
    await page.get_by_label("Your message").fill("half a sent")
    calls: list[str] = []
    page.on("request", lambda asked: calls.append(asked.url.rpartition("/")[2]))
    await page.clock.run_for(10_000)
    effects.with_suffix(".go").touch()
    for each in (page, phone):
        await done(each, 2)
        await expect(each.locator(".turn")).to_have_count(2)
        await expect(each.locator(".turn").last).to_contain_text("has completed: finished.")
        await expect(each.get_by_role("status").filter(has_text="Hold once")).to_have_count(0)
    # GetRun marks a run as seen. The menu reads its two counts after each notification.
    assert {*calls} <= {"stream", "GetRun", "ListAttention", "ListNotifications"}
    await expect(page.get_by_label("Your message")).to_have_value("half a sent")


async def test_a_call_of_a_job_can_be_approved_in_its_conversation(open_page: NewPage) -> None:
    page = await open_page(user="approver")
    await say(page, "in the background: email ann@example.com about lunch")
    await page.locator(".card.wait").get_by_role("button", name="Approve").click()
    await done(page, 2)
    await expect(page.locator(".card.wait")).to_have_count(0)
    await expect(page.locator(".turn").last).to_contain_text("has completed")


async def test_steering_message_appears_where_it_was_received(open_page: NewPage, model: Model) -> None:
    slow = {"text": "Let me see. " * 400, "chunk_delay": 0.1, "tool_calls": [{"name": "get_current_time"}]}
    prompt = await model.play({"when": {"round": 0}, "reply": slow})
    page = await open_page(user="steerer")
    await say(page, prompt)
    await expect(page.locator(".turn .markdown")).to_contain_text("Let me see")
    await page.get_by_label("Steer the current run").check()
    await ask(page, "what is 6 * 8")
    said = await page.locator(".turn .mine, .turn .card").all_inner_texts()
    assert [each.partition("\n")[0] for each in said] == [prompt, "what is 6 * 8", "Look up the time", "Calculate"]
    await expect(page.locator(".turn")).to_contain_text("48")


async def test_conversation_is_restarted_renamed_found_and_archived(open_page: NewPage) -> None:
    page = await open_page(user="editor")
    await ask(page, "what is 2 * 3")
    await ask(page, "what is 2 * 4", 2)
    origin = page.url
    await page.locator(".turn").first.get_by_role("button", name="Fork from here").click()
    await page.wait_for_url(lambda url: url != origin)
    await done(page)
    await ask(page, "what is 2 * 5", 2)
    await page.goto(origin)
    await done(page, 2)
    await page.locator(".turn").last.get_by_role("button", name="Edit message").click()
    await page.get_by_label("Edited message").fill("what is 2 * 6")
    await page.get_by_role("button", name="Send again").click()
    await page.wait_for_url(lambda url: url != origin)
    await done(page, 2)
    await expect(page.locator(".turn").last).to_contain_text("12")
    await page.get_by_role("link", name="Earlier version").click()
    await page.get_by_role("link", name="Newer version").click()
    await page.get_by_label("Conversation actions").click()
    await page.get_by_role("button", name="Rename").click()
    await page.get_by_label("Title").fill("Doubles of mine")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Doubles of mine")).to_be_visible()
    listed = page.get_by_role("complementary", name="Conversations").get_by_role("listitem")
    # The earlier version is not listed.
    await expect(listed).to_have_count(2)
    words = itertools.cycle(("doubles", "doubles "))

    async def found() -> bool:
        """Search once more, because a new title becomes searchable only after a moment."""
        async with page.expect_response("**/ListConversations"):
            await page.get_by_label("Search conversations").fill(next(words))
        return await listed.count() == 1

    await until(found)
    await page.get_by_label("Conversation actions").click()
    await page.get_by_role("button", name="Archive").click()
    await expect(listed).to_have_count(0)
    await page.get_by_label("Show archived").check()
    await expect(listed).to_contain_text("Doubles of mine")
    await page.get_by_label("Conversation actions").click()
    await page.get_by_role("button", name="Unarchive").click()
    await expect(listed).to_have_count(0)


async def test_message_with_a_file_is_sent_exported_and_deleted(open_page: NewPage) -> None:
    page = await open_page(user="filer")
    note = FilePayload(name="note.md", mimeType="text/markdown", buffer=b"Alba is cheap.")
    await page.get_by_label("Files", exact=True).set_input_files([note])
    await expect(page.get_by_role("button", name="Remove note.md")).to_be_visible()
    await ask(page, "what is 2 * 21")
    await page.reload()
    await expect(page.locator(".turn")).to_contain_text("note.md")
    await page.get_by_label("Conversation actions").click()
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Export as JSON").click()
    saved = json.loads(Path(await (await download.value).path()).read_text())
    assert saved[0] == {"role": "user", "content": "what is 2 * 21\n\n[an attachment]"}
    assert saved[-1]["role"] == "assistant"
    await page.get_by_label("Conversation actions").click()
    await click(page, "Delete", "Yes, delete")
    await expect(page.get_by_role("heading", name="What can I do for you?")).to_be_visible()
    await expect(page.get_by_role("complementary", name="Conversations").get_by_role("listitem")).to_have_count(0)


async def test_a_run_is_shown_as_a_timeline_over_a_single_stream(open_page: NewPage) -> None:
    page = await open_page(user="bars")
    watched: list[int] = []

    def look(asked: Request) -> None:
        if asked.url.endswith("/stream"):
            methods = [each["method"] for each in json.loads(asked.post_data or "{}")["subscriptions"].values()]
            watched.append(sum(method.endswith("WatchRun") for method in methods))

    await ask_approval(page, "email ann@example.com about bars")
    await page.wait_for_timeout(500)
    run_id = await page.locator(".turn").get_attribute("data-run")
    page.on("request", look)
    await page.goto(at(page, f"/runs/{run_id}"))
    bars = page.locator("[data-bar]")
    await expect(bars.filter(has=page.get_by_role("rowheader", name="Waiting", exact=True))).to_have_count(1)
    await page.locator(".card.wait").get_by_role("button", name="Approve").click()
    await expect(bars.filter(has_text="Round 2")).to_have_count(1)
    await expect(bars.filter(has_text="Send an e-mail")).to_contain_text("succeeded")
    took = page.locator(".card.good .took, [data-bar=call] .took")
    # Short durations are not shown as zero.
    assert all(re.search(r"(^|\s)(< 1 ms|[1-9]\d* ms|[1-9][\d.]* s)$", text) for text in await took.all_inner_texts())
    assert await took.count() == 2
    kinds = [await bar.get_attribute("data-bar") for bar in await bars.all()]
    assert sorted(kind or "" for kind in kinds) == ["call", "round", "round", "wait"]
    await page.get_by_role("tab", name=re.compile("Events")).click()
    await expect(page.get_by_role("region", name="Events")).to_contain_text("run.")
    for number in (1, 2):
        await bars.get_by_role("button", name=f"Round {number}").click()
        await expect(page.get_by_role("tab", selected=True)).to_have_text(f"Request of round {number}")
        await expect(page.locator(".panel", has_text="This request was sent to")).to_contain_text("send_email")
    assert max(watched) == 1
    await page.get_by_role("button", name="Run again with changes").click()
    await expect(page.get_by_role("textbox", name="Message")).to_have_value("email ann@example.com about bars")


async def test_undo_is_previewed_done_and_reported(open_page: NewPage, tmp_path: Path) -> None:
    page = await open_page(user="regretful")
    effects = tmp_path / "effects"
    await ask(page, f'call put_line with {{"path": "{effects}", "line": "once"}}')
    await page.get_by_role("link", name="Details").click()
    beside = page.get_by_role("complementary", name="Run")
    await beside.get_by_label("More actions").click()
    await beside.get_by_role("button", name="Preview undo").click()
    await expect(beside.get_by_role("region", name="Undo preview")).to_contain_text("to undo")
    await beside.get_by_role("button", name="Undo now").click()
    report = page.get_by_role("region", name="Undo report")
    await expect(report.get_by_role("row", name=re.compile("put_line undone"))).to_be_visible()
    assert effects.read_text() == ""


async def test_operator_resolves_a_call_with_unknown_outcome(open_page: NewPage, suite: Suite, tmp_path: Path) -> None:
    page = await open_page("/attention", user="operator")
    effects = tmp_path / "effects"
    arguments = json.dumps({"path": str(effects), "seconds": 60.0})
    asked = {
        "requestId": "in-doubt",
        "text": f"call act_once with {arguments}",
        "options": {"unknownOutcomePolicy": "UNKNOWN_OUTCOME_POLICY_NEEDS_ATTENTION"},
    }
    bearer = {"authorization": f"Bearer {LOCAL_KEY}", "pawl-user": "someone"}
    async with httpx2.AsyncClient(base_url=address(suite), headers=bearer, timeout=60.0) as program:
        answer = await program.post("/rpc/pawl.agent.v1.AgentService/StartRun", json=asked)
    assert answer.is_success, answer.text
    await until(lambda: effects.exists() and effects.read_text())
    suite.kill("tool-registry")
    await suite.wait_ready("tool-registry")
    need = page.get_by_role("article", name="Did “Act once” happen?")
    await sees(need, str(effects), "for someone")
    await need.get_by_role("button", name="It happened").click()
    await page.get_by_label("Result as JSON").fill('"sent at noon"')
    await page.keyboard.press("Enter")
    await expect(page.locator(".empty")).to_be_visible()
    await page.goto(at(page, "/runs?state=completed"))
    await expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    assert effects.read_text() == "done\n"
